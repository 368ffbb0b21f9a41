"""One engine under every trainer: plugins made, batches planned, passes run."""
