"""Keys of the metadata of configuration fields."""

PLACE = "skyrl_engine.place"
"""Key of a field's metadata: its text may name a place, so `./` and `../` in it are relative to the file that says so."""


KIND = "skyrl_engine.kind"
"""Key of the metadata of a plugin table's field that lists further plugin tables: the kind of plugin that they select."""
