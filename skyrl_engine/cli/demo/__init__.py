"""The demo: real fine-tuning on a CPU, offline, that shows what was learned."""
