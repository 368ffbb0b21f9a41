"""Plugins: found in package metadata, resolved by name, checked, and only then loaded. Only `loader.py` imports a plugin."""
