"""What runs on ranks, how ranks are launched, and what is shipped to them."""
