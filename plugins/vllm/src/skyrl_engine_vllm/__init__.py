"""A generator for skyrl-engine that samples from vLLM servers over HTTP, and gives them new weights."""
