"""DeepSpeed ZeRO training backend for skyrl-engine."""
