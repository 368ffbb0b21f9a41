"""A request on its way: what was sampled of it, by which weights, and what it is known by to others that begin alike."""

from weakref import ref

import numpy as np
import numpy.typing as npt
from attrs import Factory, define, field, frozen
from torch import Tensor

from skyrl_engine.contracts import Completion, FinishReason, GenerationRequest, TopLogprobs, VersionSpans
from skyrl_engine_generators.buckets import PLACES, round_up
from skyrl_engine_generators.kept import KeptRow
from skyrl_engine_generators.stops import StopRule

DRAWS = 256
"""Uniform numbers of a request that are drawn at once."""


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
    kept: ref[KeptRow] | None = None
    """The row that was kept of the session's last turn, if this one goes on from its first `kept_tokens`; its memory is not held by this."""
    kept_tokens: int = 0
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
    def bound(self) -> int:
        """Count the tokens that the row may come to."""
        return round_up(len(self.prompt) + self.request.sampling.max_tokens, PLACES)

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
