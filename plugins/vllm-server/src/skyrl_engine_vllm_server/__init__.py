"""A plugin for vLLM servers that skyrl-engine gives weights to. Nothing here imports skyrl-engine, and vLLM alone is imported where it runs."""
