"""Loss reducers for skyrl-engine: sum, token_mean."""
