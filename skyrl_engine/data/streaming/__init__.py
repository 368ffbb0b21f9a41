"""Read datasets while training, and keep nothing of them."""
