"""Sessions, manifests, checkpoints, metrics."""
