"""Loss reducers for skyrl-engine: sums and means over tokens, sequences and groups."""
