"""A tiny model to sample from, what it should sample, and a generator that is at work on it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, evolve, field
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_engine.contracts.kinds.generator import (
    POLICY,
    Completion,
    GenerationRequest,
    GeneratorCapability,
    GeneratorStart,
    Sampling,
    WeightForm,
)
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import ContractError, EngineError, UnsupportedError
from skyrl_engine.modeling.loading import load_causal_lm
from skyrl_engine.modeling.tiny import VOCABULARY, make_parts_differ, write_model, write_tokenizer
from skyrl_engine.scratch import ScratchFolder
from skyrl_engine.testing.generators.places import PlacedGenerator, description_of, placement_of, start_placed
from skyrl_engine.testing.promise import Broken, Undecidable, any_of
from skyrl_engine.testing.subject import Subject

PATIENCE_SECONDS = 60.0
"""A generator that has answered nothing for so long has lost a request: the model is tiny."""

TOLERANCE = 1e-4
"""Nats, in float32: sums over other shapes are rounded in another order."""

AT_ONCE_SECONDS, AT_ONCE_TIMES = 0.05, 200

WARMEST = 2.0
"""A generator may refuse a temperature above this one, as unsupported."""

PROBE = 10**9

MOMENT_SECONDS = 0.03
"""Time in which a generator with a process of its own samples a token or some of a tiny model."""

OTHER = "reference"
"""Another weight set than the policy's."""

TEXT = "some words to learn from, and a few more words that may stop what is said"


POSITIONS = 640
"""Tokens that a row of the kit's model may have."""


ODD_SIZES: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 101}
"""Sizes that fill no vector: kernels of a CPU compute what is left over in another order, which shows what a row's place tells."""


@cache
def _scratch() -> ScratchFolder:
    return ScratchFolder("generators")


@cache
def model_folder(columns: int = ODD_SIZES["intermediate_size"]) -> Path:
    """A tiny model with a tokenizer, in a temporary folder, once per process; its feed-forward layers have so many `columns`.

    Its embedding, which is its head too, and the norms of its queries and keys are large, so that its distribution is far from uniform and
    depends on every token of a row. Mean entropies at temperatures 0.5, 1 and 2 are 2.0, 3.7 and 4.6 nats of ln 128 = 4.85; the total
    variation between temperatures 1 and 2 is 0.30, between 0.5 and 1 it is 0.42.
    """
    folder = _scratch().path / f"columns-{columns}"
    write_model(folder, "qwen3", max_position_embeddings=POSITIONS, **{**ODD_SIZES, "intermediate_size": columns})
    make_parts_differ(folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "embed" in name:
            weight.mul_(10)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.mul_(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, [TEXT], size=VOCABULARY)
    return folder


@define(eq=False)
class TinyWeights:
    """The model's weights as a rank offers them, in one form, changed by the step `step` where there was one.

    `folder` holds the model: that of this process, or, on a rank, of the process that asks.
    """

    form: WeightForm
    step: int | None = None
    folder: Path = field(factory=model_folder)
    model: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.model = load_causal_lm(ModelConfig(str(self.folder))).eval()
        if self.step is not None:
            self.change(self.step)

    def change(self, step: int) -> None:
        """Multiply every weight, in place, by a number of its own between 0.6 and 1.4, which `step` decides.

        A parameter that keeps its old values shows, whichever it is: norms after a projection would cancel one factor for all of it.
        """
        draw = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.6 + 0.8 * torch.rand(parameter.shape, generator=draw))

    @property
    def forms(self) -> frozenset[WeightForm]:
        return frozenset({self.form})

    def storage(self) -> Mapping[str, Tensor]:
        named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers(remove_duplicate=False)]
        return {name: tensor.detach() for name, tensor in named}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, parameter.detach().clone()) for name, parameter in self.model.named_parameters())

    def directory(self) -> Path:
        """Write the weights to a temporary folder that stays until the process ends, as many are asked for in a session of the kit."""
        folder = Path(mkdtemp(prefix="weights-", dir=self.folder))
        self.model.save_pretrained(folder)
        return folder

    def adapter(self) -> Path:
        raise AssertionError("the kit's model has no adapters")

    def logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> npt.NDArray[np.float64]:
        """float64[T, vocabulary]: log-probabilities after every place of a row, of the whole model without a cache."""
        return self.logprobs_of_rows([ids], temperature)[0]

    @torch.no_grad()
    def logprobs_of_rows(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float64]]:
        """Return `logprobs` of each row, computed together."""
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(list(row))
        # rows are aligned to the left: what is filled up comes after their tokens, which do not see it
        padded_scores = (self.model(input_ids=ids, use_cache=False).logits.double() / temperature).log_softmax(-1).numpy()
        return [scores[: len(row)] for scores, row in zip(padded_scores, rows, strict=True)]


def form_of(subject: Subject[Any]) -> WeightForm | None:
    """Return the form in which the kit gives weights; None where the generator takes none that its place can be given."""
    forms = ("module", "tensors") if placement_of(subject) == "rank" else ("tensors", "directory")
    return next((form for form in description_of(subject).accepts if form in forms), None)


def no_weights(subject: Subject[Any]) -> str | None:
    """Exempt generators that cannot be given the kit's model."""
    return (
        None if form_of(subject) else "the generator takes no weights that the kit could give it: no module, tensors or directory"
    )


@define(eq=False)
class RunningGenerator:
    """A generator at work on the tiny model of `weights`."""

    placed: PlacedGenerator
    weights: TinyWeights
    has_logprobs: bool
    first_version: int
    """The version of the weights that it began with."""
    steps_in_poll: bool = True
    _awaited: set[int] = field(factory=set)
    _answered: set[int] = field(factory=set)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.placed.submit(requests)
        self._awaited |= {request.request_id for request in requests}

    def poll(self, timeout: float) -> list[Completion]:
        """Return completions. Raises Broken for one that nobody awaits."""
        completions = self.placed.poll(timeout)
        for completion in completions:
            if (number := completion.request_id) not in self._awaited:
                why = "which is answered already" if number in self._answered else "which nobody sent"
                raise Broken(f"answers request {number}, {why}", "Return every request once, under its own id")
            self._awaited.discard(number)
            self._answered.add(number)
        return completions

    def refuses(self, sampling: Sampling) -> bool:
        """Say whether it refuses, as unsupported, what a generator may refuse: a temperature above `WARMEST`, or `top_p` beside `min_p`."""
        if sampling.temperature <= WARMEST and not (sampling.top_p < 1.0 and sampling.min_p > 0.0):
            return False
        prompt, short = np.ones(1, dtype=np.int32), evolve(sampling, max_tokens=1)
        try:
            self.sample([GenerationRequest(PROBE, prompt, short, seed=0, session=PROBE, last_turn=True)])
        except UnsupportedError:
            return True
        return False

    def let_sample(self, tokens: int) -> list[Completion]:
        """Let it sample about so many tokens of each request under way, and return what was finished by then.

        Where it computes in `poll`, these are so many steps; elsewhere a request of so many tokens is sampled beside them.
        """
        if self.steps_in_poll:
            return [completion for _ in range(tokens) for completion in self.poll(0.0)]
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        self.submit([GenerationRequest(PROBE, np.ones(1, dtype=np.int32), sampling, seed=0, session=PROBE, last_turn=True)])
        completions = self._await({PROBE})
        del completions[PROBE]
        return list(completions.values())

    def give_moment(self) -> list[Completion]:
        """Let it sample a step where it computes in `poll`, elsewhere for a moment, and return what was finished by then."""
        return self.poll(0.0 if self.steps_in_poll else MOMENT_SECONDS)

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        self.placed.abort(request_ids)

    def show(self, request_id: int) -> list[int]:
        """Return the tokens that a generator in this process shows of a request under way."""
        driver: Any = self.placed
        tokens: list[int] = driver.read_sampled(request_id).tolist()
        return tokens

    def show_late(self, request_id: int) -> list[int] | None:
        """Return what it shows of a request that it has answered; None where it refuses, as it must."""
        try:
            return self.show(request_id)
        except ContractError:
            return None

    def update(self, step: int) -> int:
        """Change all weights and hand them over, as after so many steps. Return their version."""
        self.weights.change(step)
        return self.hand_over(step)

    def hand_over(self, step: int) -> int:
        """Hand the weights over as they are, as after so many steps. Return their version."""
        self.placed.update(self.weights, self.first_version + step, POLICY)
        return self.first_version + step

    def collect(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Poll until every request is back, and return completions in the order of the requests. Raises Broken for one that never is."""
        completions = self._await({request.request_id for request in requests})
        return [completions[request.request_id] for request in requests]

    def _await(self, ids: set[int]) -> dict[int, Completion]:
        """Poll until all of these are back, and return what came by then."""
        completions: dict[int, Completion] = {}
        since, idle = monotonic(), 0
        while lost := ids - completions.keys():
            before = monotonic()
            news = self.poll(1.0)
            completions |= {completion.request_id: completion for completion in news}
            if news:
                since, idle = monotonic(), 0
                continue
            # one that answers at once, with nothing, where it may wait a second, has nothing left
            idle += monotonic() - before < AT_ONCE_SECONDS
            if idle > AT_ONCE_TIMES or monotonic() - since > PATIENCE_SECONDS:
                raise Broken(
                    f"never answers request {min(lost)} of {len(ids)}", "Keep every request until its completion was returned"
                )
        return completions

    def sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.submit(requests)
        return self.collect(requests)


@contextmanager
def run_generator(
    subject: Subject[Any],
    *,
    ends: tuple[int, ...] = (),
    version: int = 0,
    is_alone: bool = False,
    folder: Path | None = None,
) -> Iterator[RunningGenerator]:
    """Start the generator on the tiny model, in its place, and close it in the end; `is_alone` where promises must not share it.

    `folder` holds the model; None: `model_folder()` does.
    """
    form = form_of(subject)
    assert form is not None, "exempt without a form"
    weights = TinyWeights(form, folder=folder or model_folder())
    start = GeneratorStart(ModelConfig(str(weights.folder)), "cpu", ends, weights, version)
    with start_placed(subject, start, is_alone=is_alone) as (placed, first_version):
        has_logprobs = "logprobs" in description_of(subject).capabilities
        yield RunningGenerator(placed, weights, has_logprobs, first_version, placement_of(subject) == "rank")


def hand_over_to(generator: RunningGenerator, weights: TinyWeights, version: int, target: str) -> bool:
    """Hand weights over to a target; return False for a generator that refuses other weights than the policy's as unsupported."""
    try:
        generator.placed.update(weights, version, target)
    except UnsupportedError:
        return False
    return True


@contextmanager
def undecidable_on_error() -> Iterator[None]:
    """Turn an error of the generator, which other promises report, into Undecidable."""
    try:
        yield
    except EngineError as error:
        raise Undecidable(error.cause) from error


@contextmanager
def raise_broken_on_error() -> Iterator[None]:
    """Turn an error of the generator into Broken: every request of the kit is one that a generator must serve."""
    try:
        yield
    except EngineError as error:
        raise Broken(f"fails: {error.cause}", error.remedy) from error


def requests_of(count: int, *, first: int = 0, seed: int = 0, longest: int = 14, **sampling: Any) -> list[GenerationRequest]:
    """Draw requests of unequal prompts, lengths and seeds; `sampling` overrides what they ask for."""
    draw = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        prompt = draw.integers(0, VOCABULARY, draw.integers(1, 17)).astype(np.int32)
        plain_sampling = Sampling(max_tokens=int(draw.integers(1, longest)), ignore_eos=True)
        requests.append(
            GenerationRequest(first + number, prompt, evolve(plain_sampling, **sampling), seed=1000 * seed + number, session=number)
        )
    return requests


def due_logprobs(weights: TinyWeights, request: GenerationRequest, done: Completion) -> npt.NDArray[np.float64]:
    """float64[n, vocabulary]: the model's log-probabilities at the places of the sampled tokens, at the request's temperature."""
    return due_logprobs_of(weights, [request], [done])[0]


def due_logprobs_of(
    weights: TinyWeights, requests: Sequence[GenerationRequest], done: Sequence[Completion]
) -> list[npt.NDArray[np.float64]]:
    """Return `due_logprobs` of each of several requests of one temperature, computed together."""
    (temperature,) = {request.sampling.temperature or 1.0 for request in requests}
    rows = [
        [*request.prompt_ids.tolist(), *completion.token_ids.tolist()] for request, completion in zip(requests, done, strict=True)
    ]
    row_scores = weights.logprobs_of_rows(rows, temperature)
    firsts = [len(request.prompt_ids) - 1 for request in requests]
    return [scores[first:-1] for first, scores in zip(firsts, row_scores, strict=True)]


def lacks(*capabilities: GeneratorCapability) -> Callable[[Subject[Any]], str | None]:
    """Exempt generators that lack one of these capabilities."""

    def exempt(subject: Subject[Any]) -> str | None:
        missing = [capability for capability in capabilities if capability not in description_of(subject).capabilities]
        return f"the generator does not declare the capability {missing[0]!r}" if missing else None

    return exempt


def claims(*capabilities: GeneratorCapability) -> Callable[[Subject[Any]], str | None]:
    """Exempt generators that lack one of these capabilities, or cannot be given the kit's model."""
    return any_of(no_weights, lacks(*capabilities))


def name_request(request: GenerationRequest) -> str:
    """Name a request in a sentence."""
    return f"request {request.request_id} ({len(request.prompt_ids)} prompt tokens, {request.sampling})"


def require_likeliest(generator: RunningGenerator, request: GenerationRequest, done: Completion, remedy: str) -> None:
    """Raise Broken unless a greedy request took the most likely token at every place, and, where it tells any, gives its log-probability."""
    due = due_logprobs(generator.weights, request, done)
    if (due.max(-1) - due[np.arange(len(due)), done.token_ids]).max(initial=0) > TOLERANCE:
        raise Broken(f"takes another token than the most likely one for {name_request(request)}", remedy)
    if generator.has_logprobs:
        require_logprobs(generator, request, done, remedy)


def require_logprobs(
    generator: RunningGenerator,
    request: GenerationRequest,
    done: Completion,
    remedy: str,
    since: int = 0,
    *,
    due: npt.NDArray[np.float64] | None = None,
) -> None:
    """Raise Broken unless the log-probabilities from token `since` on are the model's: `due` float64[n, vocabulary], or computed here."""
    rows = due_logprobs(generator.weights, request, done) if due is None else due
    own = rows[np.arange(len(done.token_ids)), done.token_ids]
    gap = np.abs(own - done.logprobs)[since:]
    if not gap.size or gap.max() <= TOLERANCE:
        return
    place = since + int(np.argmax(gap > TOLERANCE))
    raise Broken(
        f"gives token {place} of {name_request(request)} the log-probability {done.logprobs[place]:.4f}, "
        f"where the model gives {own[place]:.4f}",
        remedy,
    )
