"""Adapters: plugins made of code that was written for other engines. Public ground for plugins; torch is imported when one is called."""

from skyrl_engine.interop.masked_loss import masked_loss

__all__ = ["masked_loss"]
