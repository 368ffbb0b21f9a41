"""Options of the generator `openai`. No torch."""

from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import Attribute, field, frozen
from attrs.validators import ge, gt, in_, instance_of, min_len, optional

from skyrl_engine.contracts import CODE


def require_url(url: str) -> None:
    """Raise ValueError for what is no base URL, or holds a key."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise ValueError(
            f"{url!r} is no base URL of an endpoint; write it as far as its routes begin, such as https://HOST/v1, and name a key by "
            "api_key_env"
        )


def _require_url(_options: object, _attribute: "Attribute[Any]", url: str) -> None:
    require_url(url)


@frozen
class OpenaiOptions:
    """Options of `openai`: an endpoint, a model there, and how patiently it is asked."""

    url: str = field(validator=_require_url, metadata={CODE: True})
    """Base URL of the endpoint, as far as its routes begin: `https://HOST/v1`."""

    model: str = field(validator=min_len(1))
    """The model's name at the endpoint."""

    api_key_env: str | None = field(default=None, validator=optional(min_len(1)), metadata={CODE: True})
    """Name of the environment variable that holds the API key. The key itself is in no configuration or log. None: no key is sent."""

    endpoint: Literal["completions", "chat"] = field(default="completions", validator=in_(("completions", "chat")))
    """Route to call: "completions" continues the rendered prompt; "chat" sends a plain prompt (`rl.template = "none"`) as the only message."""

    dialect: Literal["openai", "vllm"] = field(default="openai", validator=in_(("openai", "vllm")))
    """Language of requests: with "openai" text goes in and comes back, with the parameters that every endpoint knows; with "vllm" token ids do,
    with vLLM's parameters, where the endpoint is a vLLM server of a model with the run's tokenizer."""

    concurrency: int = field(default=32, validator=[instance_of(int), ge(1)])
    """Requests under way at once; more wait."""

    request_seconds: float = field(default=600.0, validator=gt(0.0))
    """Seconds in which the endpoint must have answered a request; also the longest wait that it may ask for."""

    retries: int = field(default=5, validator=[instance_of(int), ge(0)])
    """Times that a request is sent again after 429, a status of 500 or more, or a lost connection; then it fails."""

    def __attrs_post_init__(self) -> None:
        if self.endpoint == "chat" and self.dialect == "vllm":
            raise ValueError('dialect = "vllm" sends token ids, which endpoint = "chat" does not take; leave one of them out')
