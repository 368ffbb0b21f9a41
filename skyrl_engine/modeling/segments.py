"""The segments of a row, passed to every attention layer as the keyword argument `segments`: documents, or a tree of shared prefixes."""

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field, frozen

from skyrl_engine.contracts.values.model import AttentionKernel

if TYPE_CHECKING:
    import torch

REMEDY: Final = "Use a collator with one sample per row, such as padded, or another model"
"""The remedy if the documents of a packed row would attend to each other."""


@frozen
class Run:
    """Tokens of a row end to end, from `start` up to `stop`, each of which sees those before it in the run and all tokens of `path`.

    `path` are earlier pieces of the row, (start, stop) each, in the order of their positions; none where the run begins a document.
    """

    start: int
    stop: int
    path: tuple[tuple[int, int], ...] = ()

    @property
    def prefix(self) -> int:
        """Number of tokens of the path."""
        return sum(stop - start for start, stop in self.path)


@define(eq=False, slots=False)
class Segments:
    """One row of segments end to end, of these `lengths` (all positive, in tokens).

    Without `parents` every segment is a document, which attends to itself alone. `parents` make trees of them: a token sees its own segment
    up to itself, and all segments above it; -1 is the parent of a segment that begins a document.

    It is a plain object and no tensor, so that activation checkpointing and the hooks of sharding frameworks leave it unchanged. Every
    attention call that follows these segments appends its sliding window (None: full attention) to `windows`, so that their number shows
    whether a layer ignored them.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    windows: list[int | None] = field(factory=list)
    _ends: dict["torch.device", "torch.Tensor"] = field(factory=dict, init=False, repr=False)
    _kept: dict[object, Any] = field(factory=dict, init=False, repr=False)

    def ends(self, device: "torch.device") -> "torch.Tensor":
        """Return int32[segments + 1] on `device`: 0, and the end of each segment. Made once, for all layers."""
        if device not in self._ends:
            import torch

            self._ends[device] = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        return self._ends[device]

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what was made for this key before, such as a mask that layers share; made now where nothing was."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The start and the stop of every segment in the row."""
        stops = list(accumulate(self.lengths))
        return tuple(zip([0, *stops[:-1]], stops, strict=True))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The row as few runs: a segment that follows its parent without a gap continues the parent's run."""
        if self.parents is None:
            return tuple(Run(start, stop) for start, stop in self.bounds)
        runs: list[Run] = []
        for segment, (parent, (start, stop)) in enumerate(zip(self.parents, self.bounds, strict=True)):
            if parent >= 0 and parent == segment - 1:
                runs[-1] = Run(runs[-1].start, stop, runs[-1].path)
            else:
                runs.append(Run(start, stop, self.path_to(parent)))
        return tuple(runs)

    @property
    def longest(self) -> int:
        """Tokens of the longest document, from its beginning down to the end of a segment."""
        return max((run.prefix + run.stop - run.start for run in self.runs), default=0)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Per segment the position of its first token in its documents, which count from 0."""
        starts: list[int] = []
        for parent in self.parents or (-1,) * len(self.lengths):
            starts.append(0 if parent < 0 else starts[parent] + self.lengths[parent])
        return tuple(starts)

    @cached_property
    def seen_until(self) -> tuple[int, ...]:
        """Per segment the column up to which tokens see it, if they come after it: the end of the last segment below it."""
        until = [stop for _, stop in self.bounds]
        for segment in range(len(until) - 1, -1, -1):
            if self.parents is not None and (parent := self.parents[segment]) >= 0:
                until[parent] = max(until[parent], until[segment])
        return tuple(until)

    def path_to(self, segment: int) -> tuple[tuple[int, int], ...]:
        """Return the pieces of the row from the beginning of a document down to the end of a segment; -1 is none."""
        pieces: list[tuple[int, int]] = []
        while segment >= 0:
            pieces.append(self.bounds[segment])
            segment = -1 if self.parents is None else self.parents[segment]
        return join_pieces(reversed(pieces))


def join_pieces(pieces: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges, in their order, as few as possible: those without tokens are left out, and neighbours are one."""
    joined: list[tuple[int, int]] = []
    for start, stop in pieces:
        if start == stop:
            continue
        joined.append((joined.pop()[0], stop) if joined and joined[-1][1] == start else (start, stop))
    return tuple(joined)


@frozen(eq=False)
class WholeRows:
    """A marker for rows of one sequence each, whose padding the attention mask marks."""


WHOLE_ROWS: Final = WholeRows()


@frozen
class SegmentSupport:
    """A model's support of segments: `layers` attention calls per forward pass follow them; if 0, `refusal` is a clause that says why.

    `mixes` says that its documents were seen to reach each other, in a forward pass of finite numbers. `tree_refusal`, where it follows
    segments, is a clause that says why their prefixes cannot be shared; empty where they can. `division_refusal` says the same of ranks that
    divide documents. `kernel` is the one that attends to them.
    """

    layers: int = 0
    refusal: str = "nobody has checked whether its attention can be replaced"
    mixes: bool = False
    tree_refusal: str = "nobody has checked whether its samples can share prefixes"
    division_refusal: str = "nobody has checked whether ranks can divide its documents"
    kernel: AttentionKernel = "auto"
