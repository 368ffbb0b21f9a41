"""Options of the generator `vllm`. No torch."""

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import Attribute, Factory, field, frozen
from attrs.validators import deep_iterable, ge, gt, in_, instance_of, le, min_len, optional

from skyrl_engine.contracts import CODE, PLACE, WeightForm

FORMS: tuple[WeightForm, ...] = ("tensors", "directory", "adapter")

SLEEP_FLAG = "--enable-sleep-mode"
"""The flag of a vLLM server that can free its devices."""


def _require_urls(_options: object, _attribute: "Attribute[Any]", urls: tuple[str, ...]) -> None:
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(f"{url!r} is no address of a server; write http://HOST:PORT, and name a key by api_key_env")


@frozen
class VllmOptions:
    """Options of `vllm`: it starts servers by `command`, `python` or `venv`, or connects to those at `urls`."""

    urls: tuple[str, ...] = field(default=(), validator=_require_urls, metadata={CODE: True})
    """Addresses of running servers, `http://HOST:PORT` each, which this run has for itself. None: servers are started."""

    python: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path", CODE: True})
    """The Python interpreter of the environment that holds vLLM and skyrl-engine-vllm-server."""

    venv: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path", CODE: True})
    """The folder of the virtual environment that holds them, in the place of `python`."""

    command: tuple[str, ...] = field(default=(), validator=deep_iterable(min_len(1)), metadata={CODE: True})
    """The words of a command that starts a server, such as `["numactl", "-N", "0", "vllm", "serve"]`; flags are added after them. None: by
    `python` or `venv`."""

    servers: int = field(default=1, validator=[instance_of(int), ge(1)])
    """Servers to start."""

    port: int | None = field(default=None, validator=optional([instance_of(int), ge(1), le(65535)]))
    """Port of the first server that is started; the others have the next ones. None: free ports. They listen on the loopback address."""

    arguments: tuple[str, ...] = field(default=(), metadata={CODE: True})
    """Further flags of the servers that are started, such as `["--tensor-parallel-size", "2"]`."""

    environment: Mapping[str, str] = field(default=Factory(dict), metadata={CODE: True})
    """Further environment variables of the servers that are started."""

    enable_sleep_mode: bool = field(default=False, validator=instance_of(bool))
    """Servers free their devices while the ranks work, as `generator.share_devices` needs: those that are started get the flag
    `--enable-sleep-mode`, those at `urls` must have been started with it."""

    api_key_env: str | None = field(default=None, validator=optional(min_len(1)), metadata={CODE: True})
    """Name of the environment variable that holds the servers' API key. The key itself is in no configuration, log or command line."""

    model: str = field(default="skyrl-engine", validator=min_len(1))
    """Name under which servers that are started serve the model, and that those at `urls` are asked for."""

    weights: WeightForm | None = field(default=None, validator=optional(in_(FORMS)))
    """Form in which servers take weights: "tensors" (a broadcast), "directory" (files that they can read too), or "adapter" (LoRA). None: the
    first of these that the run offers."""

    transfer: Literal["gloo", "nccl"] = field(default="gloo", validator=in_(("gloo", "nccl")))
    """The way of tensors: "gloo" over TCP, or "nccl" between GPUs, for which this process needs one. "nccl" has not been run by the tests."""

    transfer_host: str | None = field(default=None, validator=optional(min_len(1)), metadata={CODE: True})
    """Address of this machine at which servers meet it for the transfer, on several machines that of the network between them. None: the
    loopback address."""

    concurrency: int = field(default=256, validator=[instance_of(int), ge(1)])
    """Requests under way at once, over all servers; more wait."""

    start_seconds: float = field(default=300.0, validator=gt(0.0))
    """Seconds in which a server must have started."""

    request_seconds: float = field(default=600.0, validator=gt(0.0))
    """Seconds in which a server must have answered one request; one that does not is lost, and its requests are sent again."""

    update_seconds: float = field(default=300.0, validator=gt(0.0))
    """Seconds in which a server must have taken new weights."""

    retries: int = field(default=5, validator=[instance_of(int), ge(0)])
    """Times that a request is sent again, with the same seed, after a server failed; then it fails."""

    restarts: int = field(default=3, validator=[instance_of(int), ge(0)])
    """Times that a server which died is started again; then the run goes on without it, and ends if none is left."""

    def __attrs_post_init__(self) -> None:
        ways = [name for name in ("urls", "command", "python", "venv") if getattr(self, name)]
        if len(ways) > 1:
            raise ValueError(f"{ways[0]} and {ways[1]} both say where servers come from; give one of them")
        if self.urls and (self.servers > 1 or self.port is not None or self.arguments or self.environment):
            raise ValueError("servers, port, arguments and environment are of servers that are started; leave them out beside urls")
        if SLEEP_FLAG in self.arguments:
            raise ValueError(f"write enable_sleep_mode = true in the place of {SLEEP_FLAG} in arguments")
