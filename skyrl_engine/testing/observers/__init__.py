"""The promises of observers: sessions, checks and the pytest suite."""
