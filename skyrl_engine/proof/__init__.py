"""The engine proves its promise on this machine: one batch, cut in every way, gives one loss and one gradient."""
