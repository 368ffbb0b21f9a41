"""Keys of the metadata of configuration fields."""

KIND = "skyrl_engine.kind"
"""Key of the metadata of a plugin table's field that lists further plugin tables: the kind of plugin that they select."""
