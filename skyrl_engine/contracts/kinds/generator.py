"""Generator: tokens in, sampled tokens and their log-probabilities out. No torch at import."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
from attrs import field, frozen
from attrs.validators import ge, gt, instance_of, le, lt

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.returned import describe_returned, refuse_others, require_returned, require_vector
from skyrl_engine.contracts.values.rollout import FinishReason, VersionSpans
from skyrl_engine.errors import ResultError

if TYPE_CHECKING:
    import torch

WeightForm = Literal["module", "tensors", "directory", "adapter"]
"""Storage of the backend in this process; a stream of (name, tensor); a folder of safetensors; a PEFT folder."""

GeneratorCapability = Literal[
    "logprobs",
    "seeded",
    "batch_invariant",
    "abort",
    "stop_strings",
    "filters",
    "prompt_logprobs",
    "top_logprobs",
    "top_prompt_logprobs",
    "update_while_generating",
    "prefix_reuse",
    "recorded",
    "sleep",
    "streaming",
    "tensor_parallel",
]

POLICY = "policy"
"""The weight set that is trained."""


@frozen
class Sampling:
    """The distribution to sample from, and where to stop.

    `max_tokens` counts the token that stops; logits are divided by `temperature`, and 0 takes the most likely token. `top_k` (0: all), `top_p`
    and `min_p` cut the distribution off after that, in this order, for evaluation alone: the `top_k` most likely tokens; of those the fewest
    that hold `top_p` of what is left; of those the ones at least `min_p` times as likely as the most likely one. This is the order of
    transformers; vLLM applies `min_p` first, which leaves fewer tokens where `top_p` is set too. At temperature 0 they change nothing. A
    generator may refuse `top_p` beside `min_p`, and temperatures above 2, as unsupported.

    Sampling stops after a token of `stop_token_ids` or of the model's own end tokens (not with `ignore_eos`), and after the token that
    completes one of `stop_strings`, in both cases not before `min_tokens`.
    """

    max_tokens: int = field(validator=[instance_of(int), ge(1)])
    temperature: float = field(default=1.0, validator=[ge(0.0), lt(float("inf"))])
    top_p: float = field(default=1.0, validator=[gt(0.0), le(1.0)])
    top_k: int = field(default=0, validator=ge(0))
    min_p: float = field(default=0.0, validator=[ge(0.0), lt(1.0)])
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = field(default=0, validator=ge(0))
    ignore_eos: bool = False

    @property
    def filtered(self) -> bool:
        """Say whether a part of the distribution is cut off, so that log-probabilities are not the model's own."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@frozen(eq=False)
class GenerationRequest:
    """One stretch of tokens to sample after `prompt_ids` int32[P], P >= 1.

    `request_id` is unique among the requests of a generator. Turns of one trajectory share a `session`, and attempts at one task share a
    `prefix_group` (None: nobody does), for caches; `last_turn` says that no turn of the session follows, so that nothing of it need be kept. A
    run by reinforcement counts sessions through: attempt m of the group of ticket t is `t * rl.group_size + m`. `seed` (uint64) alone decides
    what is drawn, whatever else is sampled at the same time. `target` names the weight set. `prompt_logprobs`, `top_logprobs` (how many tokens
    per sampled place) and `top_prompt_logprobs` (how many per place of the prompt) ask for what the capabilities of these names give.
    """

    request_id: int
    prompt_ids: npt.NDArray[np.int32]
    sampling: Sampling
    seed: int
    session: int = 0
    prefix_group: int | None = None
    target: str = POLICY
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    top_prompt_logprobs: int = 0
    last_turn: bool = False


@frozen(eq=False)
class TopLogprobs:
    """The k most likely tokens at n places: `token_ids` int32[n, k] and `logprobs` float32[n, k], the most likely first."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


@frozen(eq=False)
class Completion:
    """The result of a request.

    `token_ids` int32[n], 0 <= n <= max_tokens, include the token that stopped sampling, and nothing is cut off after it. `logprobs` float32[n]
    are in nats, of softmax(logits / temperature) that was sampled from (temperature 0: of softmax(logits)); where the distribution was cut off,
    of what was left. `stop` is the token id or string that ended it where `finish` is "stop". `error` says what failed where `finish` is
    "error".

    `prompt_logprobs` float32[P] are at the same temperature and never cut off, NaN at place 0; `top_prompt_logprobs` have P places, of which
    the first holds zeros for ids and NaN. A generator may refuse them, as unsupported, at a temperature other than 1.
    """

    request_id: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: VersionSpans
    finish: FinishReason
    stop: int | str | None = None
    error: str | None = None
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    top_logprobs: TopLogprobs | None = None
    top_prompt_logprobs: TopLogprobs | None = None


class WeightSource(Protocol):
    """Weights on offer, in the forms of `forms`; a generator takes one of them, once per update."""

    @property
    def forms(self) -> frozenset[WeightForm]: ...

    def storage(self) -> "Mapping[str, torch.Tensor]":
        """Form "module": what `SharesStorage.storage` of the backend gives; every step changes it in place."""

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Form "tensors": full weights under their Hugging Face names, adapters merged, one at a time, on CPU; in a bfloat16 run in that."""

    def directory(self) -> Path:
        """Form "directory": a folder with the model's configuration and safetensors files of what `tensors` gives.

        It stays until a later `update` of the same target has returned, so that a server which dies can be given it again.
        """

    def adapter(self) -> Path:
        """Form "adapter": a PEFT folder of the adapters that are trained, over the weights of `GeneratorStart.model`; stays as long."""


@frozen(eq=False)
class TensorParallelGroup:
    """Ranks that sample together, each with its part of the weights (capability "tensor_parallel").

    This one is number `rank` of `size`, and `process_group` joins them. All are given the same calls in the same order; each `poll` has the
    timeout 0 and computes one step, and the completions of the first rank count.
    """

    rank: int
    size: int
    process_group: "torch.distributed.ProcessGroup"


@frozen
class GeneratorStart:
    """Facts for a generator that starts: the model, the device of its process, and the end tokens of the model's generation config.

    `weights` are those of `version`. `folder` is a folder of the run that the generator may write logs to; None outside of a run. `vocabulary`
    counts the tokens that the model knows, and `longest` the tokens of the longest attempt; None where nobody says. `together` are the ranks
    that this one samples with; None: it samples alone, with whole weights.
    """

    model: ModelConfig
    device: str
    eos_token_ids: tuple[int, ...]
    weights: WeightSource
    version: int = 0
    folder: Path | None = None
    vocabulary: int | None = None
    longest: int | None = None
    together: TensorParallelGroup | None = None


@frozen
class GeneratorDescription:
    """A generator as planning knows it, before torch is imported.

    `accepts` are the forms of weights that it takes, the preferred first. None is a frozen endpoint, which cannot be trained with, unless the
    capability "recorded" says that its tokens were sampled before, and so need no weights. `placement` "rank" lives in the process of a rank.
    `concurrency` counts the requests that it makes use of at once. `cache_tokens` counts the tokens whose keys and values it holds at most on
    each rank: "free" where the memory decides that is free as it starts, None where nobody says.
    """

    capabilities: frozenset[GeneratorCapability]
    accepts: tuple[WeightForm, ...]
    placement: Literal["rank", "process", "remote"]
    concurrency: int
    cache_tokens: int | Literal["free"] | None = None


class Generator(Protocol):
    """The product of `skyrl_engine_make_generator`."""

    def start(self, start: GeneratorStart) -> None:
        """Load the model with the weights of version `start.version`. Raises ModelError or UnsupportedError."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests; returns at once. Raises ContractError for a request that no generator could serve, before any is taken."""

    def poll(self, timeout: float) -> list[Completion]:
        """Completions that are ready, in any order; none after `timeout` seconds. Computes where nothing else does.

        Every request comes back exactly once. A failure of one request is its completion's `error`.
        """

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End requests (None: all). Each still comes back once, with what was sampled and `finish` "abort"; unknown ids are passed over."""

    def update(self, weights: WeightSource, version: int, target: str = POLICY) -> None:
        """Take new weights: tokens sampled from now on carry `version`. Raises ModelError for names or shapes that do not fit, before any
        weight changes.
        """

    def release(self, target: str) -> None:
        """Drop a weight set other than the policy's."""

    def close(self) -> None:
        """End, with requests in flight too."""


@runtime_checkable
class KeepsSessions(Protocol):
    """A generator that keeps something of a session until its next turn, such as keys and values. A generator need not have this member."""

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Free what is kept of sessions, of any weight set, that no turn follows in; unknown ones are passed over."""


@runtime_checkable
class Sleeps(Protocol):
    """A generator that frees its devices for others (capability "sleep"). A generator need not have this member."""

    def sleep(self) -> None:
        """Free the weights, keys and values of all weight sets on the devices. No request is under way; an `update` of every set comes before
        the next one.
        """


@runtime_checkable
class Streams(Protocol):
    """A generator that shows tokens before their request ends (capability "streaming"). A generator need not have this member."""

    def read_sampled(self, request_id: int) -> npt.NDArray[np.int32]:
        """Return int32[n], the tokens that were sampled so far of a request under way: its completion begins with them.

        They do not change by being shown. Raises ContractError for a request that is not under way: polled already, or never sent.
        """


def as_completions(label: str, result: object) -> list[Completion]:
    """Take what `poll` of a generator returned: whole completions, with arrays of the lengths and dtypes that `Completion` names.

    Raises ResultError, which names the generator, the method and the request.
    """
    completions = require_returned(label, "poll", result, list)
    refuse_others(label, "poll", "the list", completions, Completion)
    for completion in completions:
        _require_whole(label, completion)
    return completions


def _require_whole(label: str, completion: Completion) -> None:
    number = completion.request_id
    if not isinstance(number, int | np.integer) or isinstance(number, bool):
        raise ResultError(
            f"{label} returned {describe_returned(number)} as request_id from poll", remedy="Return the request_id of the request"
        )
    method = f"poll (request {number})"
    require_vector(label, method, "token_ids", completion.token_ids, np.int32)
    count = len(completion.token_ids)
    require_vector(label, method, "logprobs", completion.logprobs, np.float32, count)
    if completion.prompt_logprobs is not None:
        require_vector(label, method, "prompt_logprobs", completion.prompt_logprobs, np.float32)
    for name in ("top_logprobs", "top_prompt_logprobs"):
        if (top := getattr(completion, name)) is not None:
            _require_top(label, method, name, top)
    spans = require_returned(label, f"versions of {method}", completion.versions, VersionSpans)
    rising = len(spans.starts) == len(spans.versions) and (np.diff(spans.starts) > 0).all()
    if not rising or (spans.starts[:1] != 0).any() or bool(count) != bool(len(spans.starts)) or (spans.starts >= count).any():
        raise ResultError(
            f"{label} returned versions from {spans.starts.tolist()} on for {count} tokens from {method}",
            remedy="Return VersionSpans that cover the sampled tokens from 0 on, and none where nothing was sampled",
        )
    if completion.finish not in (reasons := get_args(FinishReason)):
        raise ResultError(
            f"{label} returned {completion.finish!r:.80} as finish from {method}", remedy=f"Return one of {', '.join(reasons)}"
        )


def _require_top(label: str, method: str, name: str, top: object) -> None:
    held = require_returned(label, f"{name} of {method}", top, TopLogprobs)
    for part, dtype in (("token_ids", np.int32), ("logprobs", np.float32)):
        values = getattr(held, part)
        if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 2:
            raise ResultError(
                f"{label} returned {describe_returned(values)} as {name}.{part} from {method}",
                remedy=f"Return a NumPy array {np.dtype(dtype)}[n, k] as {name}.{part}",
            )
