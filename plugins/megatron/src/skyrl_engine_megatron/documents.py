"""A micro-batch as Megatron computes it: the documents of all its rows, without padding, end to end in one row."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import OF_IMAGES, EmbeddingNoise, MicroBatch
from skyrl_engine.modeling.images import ImageTokens, PlacedImages, place_images
from skyrl_engine.modeling.model_inputs import model_inputs
from skyrl_engine.modeling.rotary_positions import real_positions
from skyrl_engine.modeling.segments import Segments
from skyrl_engine_megatron import context
from skyrl_engine_megatron.images import NOWHERE
from skyrl_engine_megatron.library import PackedSeqParams
from skyrl_engine_megatron.router import RoutedTokens


@dataclass
class Boundaries(PackedSeqParams):  # type: ignore[misc] # megatron-core is untyped
    """The bounds of a row's documents: megatron-core's description of them, and their `lengths` in tokens as plain numbers.

    Where the row holds trees, `segments` are theirs; megatron-core then sees one document of all tokens, since a segment is none.

    The tensors stay on the CPU, because only rotary positions read them, as numbers, and reading from a GPU would wait for it in every layer.
    `order` is that of `context.order_after_gather`, on the device, or None without context parallelism. `router` computes the losses of
    routers; None if they have none. `on_device` repeats the description on the device for kernels that read it there, else None. No rank of
    those that hold experts for each other has more than `most_tokens`; 0: there are none. `token_keys` int64[tokens] are those by which this
    rank's adapters drop inputs, on the device; None: they drop none.
    """

    lengths: tuple[int, ...] = ()
    segments: Segments | None = None
    order: Tensor | None = None
    router: RoutedTokens | None = None
    on_device: PackedSeqParams | None = None
    most_tokens: int = 0
    token_keys: Tensor | None = None

    def for_kernels(self, device: torch.device) -> "Boundaries":
        """Return a copy with `on_device`. A document's padding counts as its tokens: it comes after them, so they do not attend to it."""
        ends = self.cu_seqlens_q.to(device)
        longest = self.max_seqlen_q
        return replace(self, on_device=PackedSeqParams("thd", ends, ends, ends, ends, longest, longest))

    @classmethod
    def of(
        cls, lengths: tuple[int, ...], order: Tensor | None, router: RoutedTokens | None = None, segments: Segments | None = None
    ) -> "Boundaries":
        bounds, longest = ((sum(lengths),), segments.longest) if segments is not None else (lengths, max(lengths))
        ends = torch.tensor([0, *bounds], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(
            "thd",
            ends,
            ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
            segments=segments,
            order=order,
            router=router,
        )


@frozen(eq=False)
class Documents:
    """A context-parallel rank's share of a row of documents, on the CPU.

    `input_ids` and `position_ids` int64[1, tokens] are this rank's tokens. It scores them at `positions` int64[m]; `places` int64[m] are the
    numbers of these positions among the micro-batch's scored positions. `lengths` are those of whole documents, padding included.

    `real` are the lengths, without padding, of the documents that have a token; `document_of` int64[tokens] is, for each token of this rank,
    the number of its document among these, or their count for a padding token; `place_of` int64[tokens] is its place there.

    For rows of trees, `lengths` and `segments` are of segments, `real` are lengths of samples, and `document_of` int64[m] belongs to the tokens
    `held_tokens` int64[m]: a token that several samples share is there once for each of them.

    For a vision-language model, `position_ids` are int64[3, 1, tokens] of whole documents, and `feature_of` int64[tokens] is, for each token
    of this rank, the feature of `images` that takes its place, or `NOWHERE`. `noise` on embeddings is of this rank's tokens, in their order.
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
    segments: Segments | None = None
    held_tokens: Tensor | None = None
    noise: EmbeddingNoise | None = None
    place_of: Tensor | None = None


@frozen
class RowShape:
    """The ranks that share a row: `cp` context-parallel ranks, each of which divides its tokens among `tp` sequence-parallel ranks."""

    tp: int = 1
    cp: int = 1

    @property
    def row(self) -> int:
        """Number of tokens to a multiple of which rows are padded."""
        return self.tp * self.document

    @property
    def document(self) -> int:
        """Number of tokens to a multiple of which documents are padded."""
        return context.alignment(self.cp)

    def tokens_of(self, micro_batch: MicroBatch) -> int:
        """Return the number of tokens in the row that `documents_of` makes, before the row is padded."""
        lengths = (micro_batch.sequence_lengths if micro_batch.tree is None else micro_batch.tree.lengths).values
        return max(1, int((lengths + -lengths % self.document).sum()))

    def documents_of(
        self, micro_batch: MicroBatch, *, cp_rank: int = 0, width: int = 0, sees: ImageTokens | None = None, pixels: bool = True
    ) -> Documents:
        """Return this rank's share of the micro-batch's documents, padded, and of one more document of padding alone up to `width`.

        Padding comes after all tokens of its document, which do not attend to it. A micro-batch without a token gives one document of padding.
        `sees` describes how the model takes images (None: it takes none); `pixels` tells whether this rank is given their pixels.

        Raises what `place_images` raises, ContractError if mask and lengths contradict each other, and UnsupportedError for positions that
        do not count from 0 in every document, as rotary positions of text do here.
        """
        images = None
        if sees is not None:
            images = place_images(micro_batch, sees, pixels=pixels)
            text = {name: tensor for name, tensor in micro_batch.inputs.items() if name not in OF_IMAGES}
            micro_batch = evolve(micro_batch, inputs=text)
        arguments = model_inputs(micro_batch, one_row=True)
        assert arguments.segments is not None
        real, starts_of = arguments.segments.lengths, arguments.segments.starts
        if not torch.equal(arguments.inputs["position_ids"], _positions(starts_of, real)):
            raise UnsupportedError(
                "rows carry position_ids that do not count from 0 in every sequence, and the megatron backend knows no others",
                remedy="Use another collator or another backend",
            )
        lengths = tuple(length + -length % self.document for length in real)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        real_T = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, real, strict=False)])
        tokens = max(width, starts[-1])
        if lacking := tokens + -tokens % self.row - starts[-1]:
            lengths, starts_of = (*lengths, lacking), (*starts_of, 0)
        ids_1T = arguments.inputs["input_ids"].new_zeros(1, sum(lengths))
        ids_1T[:, real_T] = arguments.inputs["input_ids"]
        own_S = context.tokens_of_rank(lengths, self.cp, cp_rank)
        own_places_T = torch.full((sum(lengths),), -1).index_copy(0, own_S, torch.arange(len(own_S)))
        positions_N = own_places_T[real_T[arguments.positions]]
        places_M = (positions_N >= 0).nonzero()[:, 0]
        ids_1S, scored_M = ids_1T[:, own_S], positions_N[places_M]
        if arguments.segments.parents is not None:
            assert self.cp == 1, "setup refuses trees for context-parallel ranks"
            parents = (*arguments.segments.parents, *[-1] * (len(lengths) - len(real)))
            return _trees(micro_batch, Segments(lengths, parents), ids_1T, _positions(starts_of, lengths), scored_M, places_M)
        lengths_D = torch.from_numpy(micro_batch.sequence_lengths.values.astype(np.int64))
        lengths_D = lengths_D[lengths_D > 0]
        all_real_T = real_T
        # drops the padding token that replaces a micro-batch without tokens
        real_T = real_T[: int(lengths_D.sum())]
        document_of_T = torch.full((sum(lengths),), len(lengths_D))
        document_of_T[real_T] = torch.arange(len(lengths_D)).repeat_interleave(lengths_D)
        owners = tuple(lengths_D.tolist()), document_of_T[own_S]
        noise = None if arguments.noise is None else _lay_out(arguments.noise, sum(lengths), all_real_T, own_S)
        places_1S = _positions(starts_of, lengths)[:, own_S]
        if images is None:
            return Documents(ids_1S, places_1S, scored_M, places_M, lengths, *owners, noise=noise, place_of=places_1S[0])
        axes_31T = torch.zeros(3, 1, sum(lengths), dtype=torch.int64)
        axes_31T[:, 0, real_T] = real_positions(images)
        feature_of_T = torch.full((sum(lengths),), NOWHERE)
        feature_of_T[real_T[torch.from_numpy(images.places)]] = torch.arange(len(images.places))
        return Documents(
            ids_1S, axes_31T, scored_M, places_M, lengths, *owners, images, feature_of_T[own_S], noise=noise, place_of=places_1S[0]
        )


def _lay_out(noise: EmbeddingNoise, tokens: int, real_T: Tensor, own_S: Tensor) -> EmbeddingNoise:
    """Return the noise of this rank's tokens from that of real ones; padding has none."""
    keys, lengths = (noise.keys.new_zeros(tokens).index_copy(0, real_T, values)[own_S] for values in (noise.keys, noise.lengths))
    return EmbeddingNoise(noise.alpha, keys, lengths)


def _positions(starts: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    """Return int64[1, tokens], positions that count from the start of every document or segment."""
    return torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])[None]


def _trees(
    micro_batch: MicroBatch, segments: Segments, ids_1T: Tensor, positions_1T: Tensor, scored_M: Tensor, places_M: Tensor
) -> Documents:
    """Return a row of trees, with every sample's tokens for the routers."""
    tree = micro_batch.tree
    assert tree is not None
    firsts = np.repeat(tree.lengths.offsets[:-1], tree.last_segments.lengths)
    held = [
        torch.cat([torch.arange(start, stop) for start, stop in segments.path_to(segment)])
        for segment in (tree.last_segments.values + firsts).tolist()
    ]
    lengths = tuple(len(tokens) for tokens in held)
    document_of = torch.arange(len(held)).repeat_interleave(torch.tensor(lengths))
    return Documents(
        ids_1T,
        positions_1T,
        scored_M,
        places_M,
        segments.lengths,
        lengths,
        document_of,
        segments=segments,
        held_tokens=torch.cat(held),
    )
