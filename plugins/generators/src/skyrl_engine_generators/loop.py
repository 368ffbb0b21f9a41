"""The loop over slots: requests wait, are read, are sampled a token a step, and leave; free slots are filled while others go on.

A request waits until some slots are free, or all. Then its prompt is read in one forward pass (prefill), together with other prompts, and
it is live: every step samples one token of every live row. A finished one leaves its slot to the last live row. After an update all live
rows wait again, in front, and are read again with the tokens sampled so far.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import Factory, define, field, frozen
from torch import Tensor

from skyrl_engine.contracts import Completion, FinishReason, GenerationRequest, TopLogprobs, VersionSpans
from skyrl_engine_generators.rows import TokenDecoder
from skyrl_engine_generators.sampling import RowDistributions, draw, logprobs_of
from skyrl_engine_generators.stops import StopRule

DRAWS = 256
"""Uniform numbers of a request that are drawn at once."""

LOGITS_AT_ONCE = 2**22
"""Logits that log-probabilities of a prompt are computed from at once."""


@frozen(eq=False)
class PromptScores:
    """Scores of a prompt of P tokens: `logprobs` float32[P], NaN at place 0, and the most likely tokens of every place, if asked for."""

    logprobs: npt.NDArray[np.float32]
    top: TopLogprobs | None


@define(eq=False)
class SampledRow:
    """A request on its way: what was sampled so far, by which versions."""

    request: GenerationRequest
    rule: StopRule
    prompt: npt.NDArray[np.int64]
    tokens: list[int] = Factory(list)
    logprobs: list[float] = Factory(list)
    starts: list[int] = Factory(list)
    versions: list[int] = Factory(list)
    top: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = Factory(list)
    prompt_scores: PromptScores | None = None
    prompt_hidden: Tensor | None = None
    """The hidden state [width] after the prompt, if other rows share it; computed with the weights that sample the row."""
    _uniforms: list[float] = Factory(list)
    _draw: np.random.Generator = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.request.seed)))

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return np.concatenate([self.prompt, np.array(self.tokens, dtype=np.int64)])

    @property
    def cached_length(self) -> int:
        """Count the tokens that a step finds read: all but the last, which the step reads."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else int(self.prompt[-1])

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Say whether log-probabilities of the prompt are still due."""
        wants_prompt_logprobs = self.request.prompt_logprobs or self.request.top_prompt_logprobs > 0
        return wants_prompt_logprobs and self.prompt_scores is None

    @property
    def prefix(self) -> tuple[int, bytes] | None:
        """Return what rows have alike whose prompts need to be read once; None where this one is read by itself."""
        if self.request.prefix_group is None or self.tokens or self.needs_prompt_logprobs:
            return None
        return self.request.prefix_group, self.prompt.tobytes()

    def uniform(self) -> float:
        """The number in [0, 1) that the next token is drawn with: the n-th of the seed's for the n-th token, whenever it is drawn."""
        place = len(self.tokens)
        while place >= len(self._uniforms):
            self._uniforms += self._draw.random(DRAWS).tolist()
        return self._uniforms[place]

    def add(self, token: int, logprob: float, version: int) -> None:
        if not self.versions or self.versions[-1] != version:
            self.starts.append(len(self.tokens))
            self.versions.append(version)
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def completion(self, finish: FinishReason, stop: int | str | None = None, error: str | None = None) -> Completion:
        top = None
        if self.request.top_logprobs:
            wide = (0, self.request.top_logprobs)
            ids, values = zip(*self.top, strict=True) if self.top else ((np.zeros(wide, np.int32),), (np.zeros(wide, np.float32),))
            top = TopLogprobs(np.vstack(ids), np.vstack(values))
        scores = self.prompt_scores
        return Completion(
            self.request.request_id,
            np.array(self.tokens, dtype=np.int32),
            np.array(self.logprobs, dtype=np.float32),
            VersionSpans(np.array(self.starts, dtype=np.int32), np.array(self.versions, dtype=np.int64)),
            finish,
            stop,
            error,
            scores.logprobs if scores is not None and self.request.prompt_logprobs else None,
            top,
            None if scores is None else scores.top,
        )


class SlotLoop:
    """Samples requests from `rows`, `slots` of them at once. `version` is the number of steps after which `rows` took its weights."""

    def __init__(self, rows: TokenDecoder, slots: int, *, version: int = 0, prefill_tokens: int = 8192) -> None:
        self._rows = rows
        self._slots = slots
        self._prefill_tokens = prefill_tokens
        # few free slots are not worth a forward pass of their own
        self._refill = max(1, slots // 16)
        self._waiting: deque[SampledRow] = deque()
        # the row in slot i is the i-th
        self._live: list[SampledRow] = []
        self._settings: RowDistributions | None = None
        self.version = version

    def __len__(self) -> int:
        """Count the requests that are not finished."""
        return len(self._waiting) + len(self._live)

    def add(self, row: SampledRow) -> None:
        self._waiting.append(row)

    def update(self, version: int) -> None:
        """Go on with other weights: the KV cache of the old weights is dropped, and live rows are read again before their next token."""
        for row in self._live:
            row.prompt_hidden = None
        self._waiting.extendleft(reversed(self._live))
        self._live.clear()
        self._settings = None
        self.version = version

    @torch.inference_mode()
    def abort(self, chosen: Callable[[int], bool]) -> list[Completion]:
        """End the requests of chosen ids."""
        ended = [row for row in (*self._live, *self._waiting) if chosen(row.request.request_id)]
        if ended:
            gone = {id(row) for row in ended}
            self._waiting = deque(row for row in self._waiting if id(row) not in gone)
            self._compact(id(row) in gone for row in self._live)
        return [row.completion("abort") for row in ended]

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Read prompts into free slots where enough of them are free, else sample one token of every live row; what finished by it."""
        done = self._step()
        if done and not len(self):
            self._rows.rest()
        return done

    def _step(self) -> list[Completion]:
        free = self._slots - len(self._live)
        if self._waiting and free and (free >= self._refill or not self._live):
            return self._admit(free)
        if not self._live:
            return []
        hidden = self._rows.step([row.last for row in self._live], [row.cached_length for row in self._live])
        if self._settings is None:
            self._settings = self._of(self._live)
        ended = self._sample(self._live, self._rows.logits(hidden), self._settings)
        self._compact(completion is not None for completion in ended)
        return [completion for completion in ended if completion is not None]

    def _of(self, rows: Sequence[SampledRow]) -> RowDistributions:
        return RowDistributions.of([row.request.sampling for row in rows], self._rows.device)

    def _admit(self, free: int) -> list[Completion]:
        """Read waiting rows into free slots. A prompt that rows have alike is read once, for those that are live already too."""
        fresh: list[SampledRow] = []
        alike: dict[tuple[int, bytes], list[SampledRow]] = {}
        donors = {prefix: place for place, row in enumerate(self._live) if (prefix := _prompt_of(row)) is not None}
        copied: list[SampledRow] = []
        longest = 0
        while self._waiting and len(fresh) + sum(map(len, alike.values())) + len(copied) < free:
            row = self._waiting[0]
            prefix = row.prefix
            if prefix is not None and prefix in donors:
                copied.append(row)
            elif prefix is not None and prefix in alike:
                alike[prefix].append(row)
            else:
                longest = max(longest, len(row.prompt) + len(row.tokens))
                if fresh and longest * (len(fresh) + 1) > self._prefill_tokens:
                    break
                fresh.append(row)
                if prefix is not None:
                    alike[prefix] = []
            self._waiting.popleft()
        self._settings = None
        first = len(self._live)
        ends: list[Tensor] = []
        for place, row in enumerate(copied, first):
            donor = donors[row.prefix]  # type: ignore[index] # only rows with a prefix are here
            self._rows.copy(donor, [place], len(row.prompt))
            row.prompt_hidden = self._live[donor].prompt_hidden
            assert row.prompt_hidden is not None
            ends.append(row.prompt_hidden)
        joined, read = self._read(fresh, alike, first + len(copied))
        self._live += [*copied, *joined]
        done = self._sample(self._live[first:], self._rows.logits(torch.stack([*ends, *read])), self._of(self._live[first:]))
        self._compact([*([False] * first), *(completion is not None for completion in done)])
        return [completion for completion in done if completion is not None]

    def _read(
        self, fresh: Sequence[SampledRow], alike: dict[tuple[int, bytes], list[SampledRow]], first: int
    ) -> tuple[list[SampledRow], list[Tensor]]:
        """Read rows into the slots from `first` on; return them and those of the same prompt, with hidden states after the last tokens."""
        if not fresh:
            return [], []
        ids = [row.ids for row in fresh]
        hidden = self._rows.read(range(first, first + len(fresh)), ids)
        joined = list(fresh)
        ends = [states[-1] for states in hidden]
        for place, row in enumerate(fresh):
            prefix = row.prefix
            if row.needs_prompt_logprobs:
                row.prompt_scores = self._of_prompt(row, hidden[place])
            if prefix is None:
                continue
            row.prompt_hidden = ends[place].clone()
            same_prefix = alike[prefix]
            self._rows.copy(first + place, range(first + len(joined), first + len(joined) + len(same_prefix)), len(row.prompt))
            for candidate in same_prefix:
                candidate.prompt_hidden = row.prompt_hidden
            joined += same_prefix
            ends += [row.prompt_hidden] * len(same_prefix)
        return joined, ends

    def _sample(self, rows: Sequence[SampledRow], logits: Tensor, settings: RowDistributions) -> list[Completion | None]:
        """Draw a token of every row; the completions of rows that end by it."""
        uniforms = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=logits.device)
        drawn = draw(logits, uniforms, settings)
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        done: list[Completion | None] = []
        for place, (row, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            # false for NaN too
            if not logprob > -float("inf"):
                done.append(row.completion("error", error=f"the model's logits are not finite after token {row.cached_length}"))
                continue
            row.add(token, logprob, self.version)
            if row.request.top_logprobs:
                values, ids = (drawn.scaled[place] - drawn.normalizer[place]).topk(row.request.top_logprobs)
                row.top.append((ids.cpu().numpy().astype(np.int32), values.cpu().numpy().astype(np.float32)))
            finish, stop = row.rule.after(row.tokens)
            done.append(None if finish is None else row.completion(finish, stop))
        return done

    def _of_prompt(self, row: SampledRow, hidden: Tensor) -> PromptScores:
        """Score every prompt token, and the most likely tokens at its position, given the tokens before it."""
        count, k, temperature = len(row.prompt), row.request.top_prompt_logprobs, row.request.sampling.temperature
        logprobs = np.full(count, np.nan, dtype=np.float32)
        top = TopLogprobs(np.zeros((count, k), dtype=np.int32), np.full((count, k), np.nan, dtype=np.float32))
        step = max(1, LOGITS_AT_ONCE // self._rows.vocabulary)
        for start in range(0, count - 1, step):
            places = slice(start + 1, min(start + step, count - 1) + 1)
            logits = self._rows.logits(hidden[places.start - 1 : places.stop - 1])
            own = torch.from_numpy(row.prompt[places, None]).to(logits.device)
            most = logits.topk(k).indices
            scores = logprobs_of(logits, torch.cat([own, most], dim=1), temperature).cpu().numpy()
            logprobs[places], top.logprobs[places] = scores[:, 0], scores[:, 1:]
            top.token_ids[places] = most.cpu().numpy()
        return PromptScores(logprobs, top if k else None)

    def _compact(self, ended: Iterable[bool]) -> None:
        """Drop rows that ended, and move the last live ones into their slots."""
        gone = {place for place, is_ended in enumerate(ended) if is_ended}
        if not gone:
            return
        kept = len(self._live) - len(gone)
        movers = (place for place in range(len(self._live) - 1, kept - 1, -1) if place not in gone)
        for hole in sorted(index for index in gone if index < kept):
            mover = next(movers)
            self._rows.copy(mover, [hole], self._live[mover].cached_length)
            self._live[hole] = self._live[mover]
        del self._live[kept:]
        self._settings = None


def _prompt_of(row: SampledRow) -> tuple[int, bytes] | None:
    """Return what the prompt of a live row that others may copy is known by; None where its end is not at hand."""
    group = row.request.prefix_group
    return None if group is None or row.prompt_hidden is None else (group, row.prompt.tobytes())
