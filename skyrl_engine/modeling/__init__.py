"""Torch code shared by backends over Hugging Face models: loading, scoring, optimizer. Public to backend plugins."""
