"""A step of a run, done again from a checkpoint, and several objectives on its batch."""
