"""Hook specifications, markers and the decorators built on them."""
