"""Options of the generators. No torch."""

from attrs import field, frozen
from attrs.validators import ge, instance_of


@frozen
class HfOptions:
    """Options of `hf`."""

    slots: int = field(default=64, validator=[instance_of(int), ge(1)])
    """Requests that are sampled at once on every rank; more wait. A slot holds keys and values of one request."""

    prefill_tokens: int = field(default=8192, validator=[instance_of(int), ge(1)])
    """Tokens of prompts, padding included, that one forward pass reads; lower it when memory runs out as requests start."""
