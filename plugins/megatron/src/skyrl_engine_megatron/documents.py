"""A micro-batch as Megatron computes it: one row of documents laid end to end, padding left out, whatever its rows were."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import OF_IMAGES, MicroBatch
from skyrl_engine.modeling.images import ImageTokens, PlacedImages, placed_images
from skyrl_engine.modeling.model_inputs import model_inputs
from skyrl_engine.modeling.rotary_positions import real_positions
from skyrl_engine_megatron import context
from skyrl_engine_megatron.images import NOWHERE
from skyrl_engine_megatron.library import PackedSeqParams
from skyrl_engine_megatron.router import RoutedTokens


@dataclass
class Boundaries(PackedSeqParams):  # type: ignore[misc] # megatron-core is untyped
    """Where documents begin and end: megatron-core's own description, and `lengths` in tokens for whoever needs plain numbers.

    Its tensors stay on the CPU: only rotary positions read them, as numbers, and reading numbers from a GPU would wait for it in every layer.
    `order` is that of `context.order_of_gathered`, on the device, and None without context parallelism. `router` is what routers add to the
    objective and measure; None where they have no loss. `on_device` is the same for kernels that read it there; None without such.
    """

    lengths: tuple[int, ...] = ()
    order: Tensor | None = None
    router: RoutedTokens | None = None
    on_device: PackedSeqParams | None = None

    def for_kernels(self, device: torch.device) -> "Boundaries":
        """The same with `on_device`. What fills a document up counts as its tokens: it comes behind them all, and they do not see it."""
        ends = self.cu_seqlens_q.to(device)
        longest = self.max_seqlen_q
        return replace(self, on_device=PackedSeqParams("thd", ends, ends, ends, ends, longest, longest))

    @classmethod
    def of(cls, lengths: tuple[int, ...], order: Tensor | None, router: RoutedTokens | None = None) -> "Boundaries":
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(
            "thd", ends, ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths), lengths=lengths, order=order, router=router
        )


@frozen(eq=False)
class Documents:
    """`input_ids` and `position_ids` int64[1, tokens] of this context-parallel rank and, into them, the flat `positions` int64[m] that it
    scores; `places` int64[m] says which of the micro-batch's n scored positions those are. `lengths` are whole documents', filled up. All on
    the CPU.

    `real` are the lengths of documents that have a token, without what fills up, and `document_of` int64[tokens] is, for each token of this
    rank, the number of its document among them, or their count where it fills up.

    For a model that sees, `position_ids` are int64[3, 1, tokens] of whole documents, and `feature_of` int64[tokens] is, for each token of this
    rank, the feature of `images` that takes its place, or `NOWHERE`.
    """

    input_ids: Tensor
    position_ids: Tensor
    positions: Tensor
    places: Tensor
    lengths: tuple[int, ...]
    real: tuple[int, ...]
    document_of: Tensor
    images: PlacedImages | None = None
    feature_of: Tensor | None = None


@frozen
class RowShape:
    """What a row's documents must fit: `cp` context-parallel ranks, of which each one's tokens are shared by `tp` sequence-parallel ones."""

    tp: int = 1
    cp: int = 1

    @property
    def row(self) -> int:
        """Rows are filled up to a multiple of this many tokens."""
        return self.tp * self.document

    @property
    def document(self) -> int:
        """Documents are filled up to a multiple of this many tokens."""
        return context.alignment(self.cp)

    def tokens_of(self, micro_batch: MicroBatch) -> int:
        """Tokens of the row that `documents_of` makes, before it is filled up."""
        lengths = micro_batch.sequence_lengths.values
        return max(1, int((lengths + -lengths % self.document).sum()))

    def documents_of(
        self, micro_batch: MicroBatch, *, cp_rank: int = 0, width: int = 0, sees: ImageTokens | None = None, pixels: bool = True
    ) -> Documents:
        """This rank's share of the real tokens of all rows, filled up, and of one more document of nothing up to `width`.

        What fills a document up comes after all its tokens, which do not see it. A micro-batch without a token gives a document of nothing.
        Raises ContractError where mask and lengths contradict each other, UnsupportedError for positions that do not count from 0 in every
        document: rotary positions of text always do. `sees` is how the model takes images; None: it takes none. What `placed_images` raises
        is raised here; `pixels`: whether this rank is given them.
        """
        images = None
        if sees is not None:
            images = placed_images(micro_batch, sees, pixels=pixels)
            text = {name: tensor for name, tensor in micro_batch.inputs.items() if name not in OF_IMAGES}
            micro_batch = evolve(micro_batch, inputs=text)
        arguments = model_inputs(micro_batch, one_row=True)
        assert arguments.segments is not None
        real = arguments.segments.lengths
        if not torch.equal(arguments.inputs["position_ids"], _counted(real)):
            raise UnsupportedError(
                "rows carry position_ids that do not count from 0 in every sequence, and the megatron backend knows no others",
                remedy="Use another collator or another backend",
            )
        lengths = tuple(length + -length % self.document for length in real)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        kept_T = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, real, strict=False)])
        tokens = max(width, starts[-1])
        if lacking := tokens + -tokens % self.row - starts[-1]:
            lengths = (*lengths, lacking)
        ids_1T = arguments.inputs["input_ids"].new_zeros(1, sum(lengths))
        ids_1T[:, kept_T] = arguments.inputs["input_ids"]
        own_S = context.tokens_of_rank(lengths, self.cp, cp_rank)
        where_T = torch.full((sum(lengths),), -1).index_copy(0, own_S, torch.arange(len(own_S)))
        positions_N = where_T[kept_T[arguments.positions]]
        places_M = (positions_N >= 0).nonzero()[:, 0]
        ids_1S, scored_M = ids_1T[:, own_S], positions_N[places_M]
        held_D = torch.from_numpy(micro_batch.sequence_lengths.values.astype(np.int64))
        held_D = held_D[held_D > 0]
        kept_T = kept_T[: int(held_D.sum())]  # without what stands for a micro-batch of no token
        document_of_T = torch.full((sum(lengths),), len(held_D))
        document_of_T[kept_T] = torch.arange(len(held_D)).repeat_interleave(held_D)
        owners = tuple(held_D.tolist()), document_of_T[own_S]
        if images is None:
            return Documents(ids_1S, _counted(lengths)[:, own_S], scored_M, places_M, lengths, *owners)
        axes_31T = torch.zeros(3, 1, sum(lengths), dtype=torch.int64)
        axes_31T[:, 0, kept_T] = real_positions(images)
        feature_of_T = torch.full((sum(lengths),), NOWHERE)
        feature_of_T[kept_T[torch.from_numpy(images.places)]] = torch.arange(len(images.places))
        return Documents(ids_1S, axes_31T, scored_M, places_M, lengths, *owners, images, feature_of_T[own_S])


def _counted(lengths: tuple[int, ...]) -> Tensor:
    """int64[1, tokens]: positions that count from 0 in every document."""
    return torch.cat([torch.arange(length) for length in lengths])[None]
