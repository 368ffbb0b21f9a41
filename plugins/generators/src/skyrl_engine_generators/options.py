"""Options of the generators. No torch."""

from attrs import field, frozen
from attrs.validators import ge, instance_of, optional


@frozen
class HfOptions:
    """Options of `hf`."""

    slots: int = field(default=64, validator=[instance_of(int), ge(1)])
    """Requests that are sampled at once on every rank; more wait."""

    prefill_tokens: int = field(default=8192, validator=[instance_of(int), ge(1)])
    """Tokens of prompts, padding included, that one forward pass reads; lower it when memory runs out as requests start."""

    cache_tokens: int | None = field(default=None, validator=optional([instance_of(int), ge(1)]))
    """Tokens whose keys and values every rank holds at most, of all weight sets together: requests that are sampled, and what is kept of
    dialogues until their next turns. Requests wait for room, and what was used last is kept longest; neither changes what is sampled. Default:
    as many as a quarter of the memory takes that is free as the generator starts."""
