"""`skyrl-engine plugins new`: a distribution with one plugin that works, as a start for one's own."""
