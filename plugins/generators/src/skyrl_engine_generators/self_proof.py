"""Prove at the start that rows with cached keys and values compute the model's own function, on this model and this transformers."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Completion, GenerationRequest, Sampling
from skyrl_engine.modeling.divided_sampler import collect_words, find_group
from skyrl_engine_generators.keeping_proof import prove_keeping
from skyrl_engine_generators.loop import SlotLoop
from skyrl_engine_generators.rows import CachedDecoder, TokenDecoder, UncachedDecoder
from skyrl_engine_generators.sampled_row import SampledRow
from skyrl_engine_generators.sampling import logprobs_of
from skyrl_engine_generators.slots import Memory
from skyrl_engine_generators.stops import StopRule

logger = logging.getLogger(__name__)

SLOTS, NEW = 3, (9, 3, 6, 4, 5, 7)
"""Six rows over three slots: some end early, others take their place, and the last live ones move."""

LONGEST_WINDOW, SHORT_WINDOW = 512, 16
"""Rows are longer than an attention window of up to `LONGEST_WINDOW`; a larger one is made `SHORT_WINDOW` for as long as the proof takes."""

TOLERANCE = 1e-4
"""Nats, for float32 and float64: sums over other shapes are rounded in another order."""

TOLERANCE_BFLOAT16 = 0.05
"""Mean over tokens, in nats: of rounding to 8 bits in every layer."""


def make_proven_rows(model: Any, slots: int, *, name: str, limit: int | None, memory: Memory | None = None) -> TokenDecoder:
    """Return rows that give the model's own log-probabilities: cached ones where they agree with the whole model, others with a warning.

    Nothing of a row is kept for the next turn where its beginning read alone is another one, to the last bit on a CPU; the log says so.

    Raises UnsupportedError for a model of which no rows give them.
    """
    refusal = _refusal(CachedDecoder, model, limit)
    if refusal is None:
        # ranks that sample together do the same, so that one that may keep less decides
        keeping = min(
            collect_words(prove_keeping(model, limit), find_group(model)), key=lambda each: (each.keeps, each.keeps_sampled)
        )
        rows = CachedDecoder(model, slots, memory)
        rows.keeps, rows.keeps_sampled = keeping.keeps, keeping.keeps_sampled
        if keeping.reason is not None:
            logger.warning(
                "%s (%s) reads the whole history of a dialogue again at every turn: %s", name, type(model).__name__, keeping.reason
            )
        return rows
    if (uncached_refusal := _refusal(UncachedDecoder, model, limit)) is not None:
        raise UnsupportedError(
            f"{name} ({type(model).__name__}) cannot be sampled from: {uncached_refusal}",
            remedy="Use a causal language model of text, or another generator",
        )
    logger.warning(
        "%s (%s) is sampled without a cache, each token by reading its whole row, which is slow, and keeps nothing between turns: %s",
        name,
        type(model).__name__,
        refusal,
    )
    return UncachedDecoder(model, slots)


def _refusal(rows: type[CachedDecoder] | type[UncachedDecoder], model: Any, limit: int | None) -> str | None:
    """Return why these rows are not right for the model, as a clause; None where they are, on all ranks that sample together."""
    words = collect_words(_own_refusal(rows, model, limit), find_group(model))
    return next((word for word in words if word is not None), None)


def _own_refusal(rows: type[CachedDecoder] | type[UncachedDecoder], model: Any, limit: int | None) -> str | None:
    try:
        gap = _gap(rows, model, limit)
    except Exception as error:  # noqa: BLE001 - model code that keeps something else than keys and values may fail in any way
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"
    bound = TOLERANCE_BFLOAT16 if _in_bfloat16(model) else TOLERANCE
    return None if gap <= bound else f"log-probabilities of its rows are {gap:.2g} nats off"


def _in_bfloat16(model: Any) -> bool:
    return bool(next(model.parameters()).dtype == torch.bfloat16)


@torch.inference_mode()
def _gap(kind: type[CachedDecoder] | type[UncachedDecoder], model: Any, limit: int | None) -> float:
    """Return the largest distance in nats, the mean in bfloat16, between sampled log-probabilities and those of the plain model."""
    with _short_windows(model.config) as window:
        rows = kind(model, SLOTS)
        requests = _requests(rows.vocabulary, window, limit)
        try:
            got = _sample(rows, requests)
        finally:
            # what rows change in a model is part of what is proven
            rows.invariance.undo()
        gaps = [_distances(model, request, got[request.request_id], rows.device) for request in requests]
    gaps_of_tokens = np.concatenate(gaps)
    gap = float(gaps_of_tokens.mean() if _in_bfloat16(model) else gaps_of_tokens.max())
    # what is no number is no agreement
    return gap if gap == gap else float("inf")  # noqa: PLR0124 - false for NaN alone


def _sample(rows: TokenDecoder, requests: Iterable[GenerationRequest]) -> dict[int, Completion]:
    loop = SlotLoop(rows, SLOTS)
    for request in requests:
        rule = StopRule(frozenset(), (), 0, request.sampling.max_tokens, None)
        loop.add(SampledRow(request, rule, request.prompt_ids.astype(np.int64)))
    got: dict[int, Completion] = {}
    while len(loop):
        got |= {completion.request_id: completion for completion in loop.step()}
    return got


def _distances(model: Any, request: GenerationRequest, done: Completion, device: torch.device) -> npt.NDArray[np.float64]:
    """float64[n], in nats: between the log-probabilities of what was sampled and those of the whole model."""
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, done.token_ids]).astype(np.int64)).to(device)
    first = len(request.prompt_ids)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, first - 1 : -1]
    return np.abs(logprobs_of(logits, ids[first:, None], 1.0)[:, 0].cpu().numpy() - done.logprobs)


def _requests(vocabulary: int, window: int, limit: int | None) -> list[GenerationRequest]:
    """Six prompts of random tokens and unequal lengths, two of them a little longer than the window."""
    draw = np.random.default_rng(0)
    most = 10**9 if limit is None else max(1, limit - max(NEW))
    lengths = [min(most, length) for length in (2, window + 3, 7, 1, window // 2 + 4, window + 1)]
    return [
        GenerationRequest(
            request_id=number,
            prompt_ids=draw.integers(0, vocabulary, length).astype(np.int32),
            sampling=Sampling(max_tokens=new, ignore_eos=True),
            seed=number,
        )
        for number, (length, new) in enumerate(zip(lengths, NEW, strict=True))
    ]


@contextmanager
def _short_windows(config: Any) -> Iterator[int]:
    """Make windows that are larger than `LONGEST_WINDOW` short, and yield the longest; masks are made of what the configuration says."""
    text = config.get_text_config(decoder=True)
    present = {name: getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")}
    windows = {name: size for name, size in present.items() if isinstance(size, int) and size > 0}
    try:
        for name, size in windows.items():
            if size > LONGEST_WINDOW:
                setattr(text, name, SHORT_WINDOW)
        yield max((min(size, SHORT_WINDOW) if size > LONGEST_WINDOW else size for size in windows.values()), default=4)
    finally:
        for name, size in windows.items():
            setattr(text, name, size)
