"""Make plugins of code that was written for other engines. Public to plugins; torch is imported when such a plugin is called."""

from skyrl_engine.interop.masked_loss import masked_loss

__all__ = ["masked_loss"]
