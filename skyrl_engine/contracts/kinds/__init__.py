"""The protocols that factories return, one file per kind of plugin."""
