"""Stand-ins for Transformer Engine's attention, which runs on CUDA alone, written from its documentation; tasks that train with them."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron_tasks import VOCABULARY, Case, Passed, own, run_passes, start
from torch import Tensor

from skyrl_engine import ModelError
from skyrl_engine.testing.backends.batches import WeightedObjective, build_packed, documents
from skyrl_engine_megatron import kernels
from skyrl_engine_megatron.attention import DocumentAttention
from skyrl_engine_megatron.library import (
    AttnMaskType,
    MegatronModule,
    PackedSeqParams,
    gather_from_sequence_parallel_region,
    parallel_state,
)
from skyrl_engine_megatron.plugin import MegatronConfig


class AsDocumented(MegatronModule):
    """`TEDotProductAttention` for `qkv_format = "thd"` and a causal mask, by an explicit mask.

    Tokens of sequence i are those between `cu_seqlens[i]` and `cu_seqlens[i + 1]`. Under context parallelism the numbers are of whole
    sequences, each of which is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r of every sequence, one after another.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__(config=config)
        self.ranks = config.context_parallel_size
        assert (layer_number >= 1, attn_mask_type, attention_type) == (True, AttnMaskType.causal, "self")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert (attention_mask, attention_bias, num_splits, attn_mask_type) == (None, None, None, AttnMaskType.causal)
        assert packed_seq_params is not None
        ends = packed_seq_params.cu_seqlens_q
        assert type(packed_seq_params) is PackedSeqParams
        assert packed_seq_params.qkv_format == "thd"
        assert ends.dtype == torch.int32
        for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
            assert getattr(packed_seq_params, name) is ends
        assert packed_seq_params.max_seqlen_q == packed_seq_params.max_seqlen_kv == int(ends.diff().max())
        places = self.places(ends)
        here, there = places[0], torch.cat(places)
        if self.ranks > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(tensor.contiguous(), group=group) for tensor in (key, value))
            here = places[parallel_state.get_context_parallel_rank()]
        seen = self.seen(ends, here, there)
        shared = query.shape[1] // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(shared, 1)) * query.shape[2] ** -0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(shared, 1)).flatten(1)

    def places(self, ends: Tensor) -> list[Tensor]:
        """For each rank, which tokens of the whole row it holds."""
        ranks = self.ranks
        held: list[list[int]] = [[] for _ in range(ranks)]
        for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            size, rest = divmod(last - first, 2 * ranks if ranks > 1 else 1)
            assert rest == 0
            for rank in range(ranks):
                for chunk in (rank, 2 * ranks - 1 - rank) if ranks > 1 else (0,):
                    held[rank] += range(first + chunk * size, first + (chunk + 1) * size)
        return [torch.tensor(tokens) for tokens in held]

    def seen(self, ends: Tensor, here: Tensor, there: Tensor) -> Tensor:
        """bool[queries, keys]."""
        own_Q, own_K = (torch.searchsorted(ends.long(), places, right=True) for places in (here, there))
        return (own_Q[:, None] == own_K) & (there <= here[:, None])


class Leaking(AsDocumented):
    """A row's documents see each other."""

    def seen(self, ends: Tensor, here: Tensor, there: Tensor) -> Tensor:
        return super().seen(ends[[0, -1]], here, there)


class Halves(AsDocumented):
    """Ranks hold consecutive halves, so that places are not what the engine means."""

    def places(self, ends: Tensor) -> list[Tensor]:
        return list(torch.arange(int(ends[-1])).chunk(self.ranks))


class WrongGradient(AsDocumented):
    """Its output is right, and its values' gradient doubled."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        return super().forward(query, key, 2 * value - value.detach(), *args, **options)


class Raising(AsDocumented):
    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel image is available\nand more")


def install_kernels(base: type, *, is_required: bool) -> Any:
    """In force: `base` is the Transformer Engine that is installed, and this is a device for it."""

    def chosen(_options: Any, config: Any, device: torch.device) -> Any:
        return kernels.choose_kernels(kernels.make_document_kernels(base), config, device, is_required=is_required)

    return patch.object(kernels, "choose_core_attention", chosen)


class OnOneRank(AsDocumented):
    """It raises on rank 1 alone; where ranks wait for each other, rank 0 would wait for ever."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("no kernel image is available")
        return super().forward(*args, **options)


def run_passes_with_kernels(directory: str, options: MegatronConfig, cases: Sequence[Case]) -> list[Passed]:
    """`run_passes` with `AsDocumented` as attention; `DocumentAttention` is called only for the comparisons."""
    genuine = DocumentAttention.forward
    with install_kernels(AsDocumented, is_required=True), patch.object(DocumentAttention, "forward", autospec=True) as forward:
        forward.side_effect = genuine
        results = run_passes(directory, options, cases)
        assert forward.call_count == (1 if options.context_parallel == 1 else 2)
        return results


def catch_refusal(directory: str, options: MegatronConfig, base: type) -> str:
    """Error, if any, of asking for these kernels."""
    try:
        with install_kernels(base, is_required=True):
            start(directory, options=options).close()
    except ModelError as error:
        return str(error)
    return ""


def attending(directory: str, options: MegatronConfig, base: type) -> str:
    """The class that attends where these kernels are installed and nobody asked for them; after a pass over packed rows."""
    with install_kernels(base, is_required=False), closing(start(directory, options=options)) as backend:
        backend.forward_backward(build_packed(own(documents(VOCABULARY), backend), 2), WeightedObjective())
        (piece,) = backend._pipeline.pieces
        return type(piece.decoder.layers[0].self_attention.core_attention).__name__
