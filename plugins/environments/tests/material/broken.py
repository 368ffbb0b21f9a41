"""A file that cannot be imported."""

raise RuntimeError("no licence")
