"""Whose code a configuration out of a run directory may run: the user's key, the seal of a run, the gate that every command passes."""
