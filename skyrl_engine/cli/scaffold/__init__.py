"""`skyrl-engine plugins new`: write a distribution with one working plugin, to start your own from."""
