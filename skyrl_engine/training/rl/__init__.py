"""Training by reinforcement: attempts at tasks, their advantages, and steps on them."""
