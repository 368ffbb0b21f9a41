"""The promises of generators, checked on a tiny model that is made here."""
