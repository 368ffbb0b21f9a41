"""Context parallelism: ranks divide the tokens of a row; each attends to the keys and values of all of them, and all see all scores.

Keys and values are gathered layer by layer, and their gradients summed and scattered, as Llama 3 was trained (arXiv 2407.21783, section 3.3.2).
Each segment of a row is cut into 2 n chunks for n ranks, of which rank r computes chunks r and 2 n - 1 - r: early tokens attend to few keys and
late ones to many, so that every rank has the same work.
"""

from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, evolve, frozen
from torch import Tensor

from skyrl_engine.contracts.kinds.backend import EmbeddingNoise
from skyrl_engine.contracts.values.extras import IMAGE_GRID, PIXEL_VALUES
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.modeling.images import ImageTokens, choose_images
from skyrl_engine.modeling.model_inputs import ModelInputs
from skyrl_engine.modeling.segments import Run, Segments, join_pieces

# torch before 2.13 has them under other names
_gather: Final[Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Final[Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@frozen(eq=False)
class ContextRanks:
    """The ranks that share every row with this one: their `group`, how many they are (`size`), and the number of this one among them."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "ContextRanks":
        """Describe a process group of which this process is a member."""
        return cls(group, dist.get_world_size(group), dist.get_rank(group))


def cut_chunks(lengths: tuple[int, ...], ranks: int) -> IntArray:
    """Return int64[segments, 2 ranks], the tokens of every chunk of segments of these lengths.

    What the chunks of a segment do not divide evenly goes to one rank after another, over all segments, so that the tokens of two ranks differ
    by one at most, however short the segments are.
    """
    base, rest = np.divmod(np.asarray(lengths, dtype=np.int64), 2 * ranks)
    turns = (np.arange(ranks) - ((np.cumsum(rest) - rest) % ranks)[:, None]) % ranks
    # a rank takes every `ranks`-th of the rest, its first in its early chunk and its second in the late one
    more = (rest[:, None] - turns + ranks - 1) // ranks
    return cast("IntArray", base[:, None] + np.concatenate([more >= 1, (more >= 2)[:, ::-1]], 1))


@define(eq=False, slots=False)
class DividedSegments(Segments):
    """A row of segments of which this rank has some tokens; `lengths` and `parents` are those of the whole row.

    `own_runs` are the runs of this rank's tokens, in their order, within the row of all ranks' tokens; that row ends with a token of padding if
    this rank has one. `order` int64[tokens] are the places of its tokens among those of all ranks, one rank after another, on the device.
    `ranks` is None where this process has the tokens of all of them.
    """

    own_runs: tuple[Run, ...] = ()
    order: Tensor | None = None
    ranks: ContextRanks | None = None

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.own_runs

    @property
    def longest(self) -> int:
        return Segments(self.lengths, self.parents).longest

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, heads, tokens, d] of the row, from this rank's [1, heads, own tokens, d].

        One collective gathers both; the backward pass sums the gradients that all ranks' queries give them.
        """
        assert self.order is not None
        if self.ranks is None:
            return key.index_select(2, self.order), value.index_select(2, self.order)
        both_SHE = torch.cat([key, value], -1)[0].transpose(0, 1)
        gathered: Tensor = _GatherRow.apply(both_SHE, self.order, self.ranks)  # type: ignore[no-untyped-call] # torch leaves it untyped
        row = gathered.transpose(0, 1)[None]
        width = key.shape[-1]
        return row[..., :width], row[..., width:]


def divide_row(arguments: ModelInputs, ranks: ContextRanks, images: ImageTokens | None = None) -> tuple[ModelInputs, Tensor]:
    """Return this rank's share of a row of segments, and int64[m], the places of the positions that it scores among all.

    Its tokens keep their order and their position_ids. All ranks have equally many: those with one less have a token of padding at the end,
    which nothing attends to and which is never scored. Of the row's images, whose form is `images`, a rank has those that its tokens belong
    to, and the numbers of its tokens' features (`image_features`). Everything is on the CPU.
    """
    segments = arguments.segments
    assert segments is not None, "rows of one sequence each were laid end to end"
    chunks = cut_chunks(segments.lengths, ranks.size)
    numbers = np.arange(2 * ranks.size)
    owner_T = np.repeat(np.tile(np.minimum(numbers, numbers[::-1]), len(chunks)), chunks.reshape(-1))
    counts = np.bincount(owner_T, minlength=ranks.size)
    longest = int(counts.max())
    own_T = owner_T == ranks.rank
    tokens_S = torch.from_numpy(np.flatnonzero(own_T))
    padding = longest - len(tokens_S)
    by_owner = np.argsort(owner_T, kind="stable")
    within_T = np.empty_like(owner_T)
    within_T[by_owner] = np.arange(len(owner_T)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.concatenate([owner_T * longest + within_T, ranks.rank * longest + np.arange(longest - padding, longest)])

    # a token of padding must be no image
    filler = int(images is not None and images.token == 0)

    def share(tensor: Tensor) -> Tensor:
        chosen = tensor[..., tokens_S]
        return torch.cat([chosen, chosen.new_full((*chosen.shape[:-1], padding), filler)], -1) if padding else chosen

    positions = arguments.positions.numpy()
    places_M = np.flatnonzero(own_T[positions])
    noise = arguments.noise
    divided = ModelInputs(
        {
            **{name: share(tensor) for name, tensor in arguments.inputs.items() if name not in (PIXEL_VALUES, IMAGE_GRID)},
            **({} if images is None else _choose_own_images(arguments.inputs, images, tokens_S)),
        },
        torch.from_numpy(within_T[positions[places_M]]),
        DividedSegments(
            segments.lengths,
            segments.parents,
            own_runs=(*_list_runs(segments, chunks, ranks.rank), *[Run(len(owner_T), len(owner_T) + padding)] * (padding > 0)),
            order=torch.from_numpy(order),
            ranks=ranks,
        ),
        None if noise is None else EmbeddingNoise(noise.alpha, share(noise.keys), share(noise.lengths)),
    )
    return divided, torch.from_numpy(places_M)


def _choose_own_images(inputs: Mapping[str, Tensor], images: ImageTokens, tokens_S: Tensor) -> dict[str, Tensor]:
    """Return the images of a row that the tokens int64[s] belong to, and their features' numbers; nothing where they belong to none."""
    is_image_T = inputs["input_ids"][0] == images.token
    own_S = is_image_T[tokens_S]
    if PIXEL_VALUES not in inputs or not own_S.any():
        return {}
    features = (is_image_T.cumsum(0) - 1)[tokens_S[own_S]]
    grid = inputs[IMAGE_GRID]
    pixels, grid, features = choose_images(inputs[PIXEL_VALUES], grid, grid.prod(1) // images.merge**2, features)
    return {PIXEL_VALUES: pixels, IMAGE_GRID: grid, "image_features": features}


def divide_in_process(segments: Segments, ranks: int) -> tuple[Tensor, DividedSegments]:
    """Return int64[tokens], the tokens of so many ranks, one rank after another, and their segments, as if one rank had all of them."""
    chunks = cut_chunks(segments.lengths, ranks)
    runs = tuple(run for rank in range(ranks) for run in _list_runs(segments, chunks, rank))
    tokens = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    return tokens, DividedSegments(segments.lengths, segments.parents, own_runs=runs, order=tokens.argsort())


def _list_runs(segments: Segments, chunks: IntArray, rank: int) -> list[Run]:
    """Return the runs of a rank's tokens: a chunk sees what is above its segment, and its segment's chunks before it."""
    runs: list[Run] = []
    parents = segments.parents or (-1,) * len(segments.lengths)
    ends = np.cumsum(chunks, 1)
    for parent, (first, _), stops, sizes in zip(parents, segments.bounds, ends.tolist(), chunks.tolist(), strict=True):
        for chunk in (rank, chunks.shape[1] - 1 - rank):
            start, stop = first + stops[chunk] - sizes[chunk], first + stops[chunk]
            if start == stop:
                continue
            if runs and runs[-1].stop == start > first:
                runs[-1] = evolve(runs[-1], stop=stop)
            else:
                runs.append(Run(start, stop, join_pieces((*segments.path_to(parent), (first, start)))))
    return runs


class _GatherRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_SHE: Tensor, order_T: Tensor, ranks: ContextRanks) -> Tensor:
        ctx.ranks, ctx.own = ranks, len(own_SHE)
        ctx.save_for_backward(order_T)
        own_SHE = own_SHE.contiguous()
        all_RHE = own_SHE.new_empty(ranks.size * len(own_SHE), *own_SHE.shape[1:])
        _gather(all_RHE, own_SHE, group=ranks.group)
        return all_RHE.index_select(0, order_T)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (order_T,) = ctx.saved_tensors
        (gradient_THE,) = upstream
        ranks: ContextRanks = ctx.ranks
        # other ranks' padding has no place in this rank's row, and no gradient
        all_RHE = gradient_THE.new_zeros(ranks.size * ctx.own, *gradient_THE.shape[1:]).index_copy_(0, order_T, gradient_THE)
        own_SHE = gradient_THE.new_empty(ctx.own, *gradient_THE.shape[1:])
        _scatter(own_SHE, all_RHE, group=ranks.group)
        return own_SHE, None, None
