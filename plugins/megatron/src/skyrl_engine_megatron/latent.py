"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries, keys and values from compressed states.

megatron-core's own needs CUDA's fused kernels or rotary positions of its own. Here projections to compressed states are whole on every
tensor-parallel rank, which has the heads that it is given; one key of rotary positions is shared by all heads.
"""

from typing import Any

import torch
from torch import Tensor, nn

from skyrl_engine_megatron.architecture import Architecture, Latent
from skyrl_engine_megatron.compiling import BiasedRows, Columns, Rows
from skyrl_engine_megatron.layers import Norm, device_of
from skyrl_engine_megatron.library import (
    MegatronModule,
    TransformerConfig,
    attention_layers,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

_EPSILON = 1e-6
"""That of the norms of compressed states, which transformers' models do not read from their configuration."""


class WholeLinear(nn.Linear):
    """A linear layer that every tensor-parallel rank holds whole, over its share of the tokens under sequence parallelism."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias, device=device_of(config), dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] # megatron-core reads it


class LatentAttention(MegatronModule):  # type: ignore[misc] # megatron-core is untyped
    """The attention of a layer; `core` is its class of `core_attention`."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, architecture: Architecture, core: Any, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config=config)
        assert architecture.latent is not None
        self.latent: Latent = architecture.latent
        self.rotary_scaling = architecture.rotary[0].scaling
        self.cp_group = pg_collection.cp
        latent, heads, hidden, biased = self.latent, architecture.heads, architecture.hidden, architecture.biases.output

        def columns(inputs: int, outputs: int) -> Columns:
            options = {"gather_output": False, "bias": False, "skip_bias_add": False, "is_expert": False}
            return Columns(inputs, outputs, config=config, init_method=config.init_method, tp_group=pg_collection.tp, **options)

        if latent.query_rank is not None:
            self.query_down = WholeLinear(config, hidden, latent.query_rank, bias=biased)
            self.query_norm = Norm(config, latent.query_rank, _EPSILON)
        self.query = columns(latent.query_rank or hidden, heads * latent.query_size)
        self.key_value_down = WholeLinear(config, hidden, latent.key_value_rank + latent.rotated, bias=biased)
        self.key_value_norm = Norm(config, latent.key_value_rank, _EPSILON)
        self.key_value = columns(latent.key_value_rank, heads * (latent.plain + latent.value_size))
        self.core_attention = core(config=config, layer_number=layer_number)
        self.linear_proj = (BiasedRows if biased else Rows)(
            heads * latent.value_size,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=pg_collection.tp,
        )

    def forward(self, hidden_T1H: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: Any, **_: Any) -> tuple[Tensor, Any]:
        """Return [tokens, 1, h] and a bias; under sequence parallelism of this rank's share of the tokens."""
        latent = self.latent
        states = hidden_T1H if latent.query_rank is None else self.query_norm(self.query_down(hidden_T1H))
        query_T1, _ = self.query(states)
        query_TAD = query_T1.view(len(query_T1), -1, latent.query_size)
        compressed, key_rotated = self.key_value_down(hidden_T1H).split([latent.key_value_rank, latent.rotated], -1)
        key_value_T1, _ = self.key_value(self.key_value_norm(compressed))
        key_value_TAD = key_value_T1.view(len(key_value_T1), -1, latent.plain + latent.value_size)
        # all ranks' heads use this key, so that their gradients of it are summed
        share = gather_from_sequence_parallel_region if self.config.sequence_parallel else copy_to_tensor_model_parallel_region
        key_rotated_T1D = self._rotate(share(key_rotated.contiguous()), rotary_pos_emb, packed_seq_params)
        plain_TAD, rotated_TAD = query_TAD.split([latent.plain, latent.rotated], -1)
        query_TAD = torch.cat([plain_TAD, self._rotate(rotated_TAD, rotary_pos_emb, packed_seq_params)], -1)
        key_TAD, value_TAD = key_value_TAD.split([latent.plain, latent.value_size], -1)
        key_TAD = torch.cat([key_TAD, key_rotated_T1D.expand(-1, key_TAD.shape[1], -1)], -1)
        output = self.core_attention(query_TAD, key_TAD, value_TAD, None, packed_seq_params=packed_seq_params)
        result: tuple[Tensor, Any] = self.linear_proj(output[:, None])
        return result

    def _rotate(self, part_TAD: Tensor, angles: Tensor, boundaries: Any) -> Tensor:
        """Return the part of queries or keys that has positions, rotated; pairs of neighbours come apart first where files interleave them."""
        if self.latent.interleaved:
            part_TAD = torch.cat([part_TAD[..., 0::2], part_TAD[..., 1::2]], -1)
        rotated: Tensor = attention_layers.apply_rotary_pos_emb(
            part_TAD,
            angles,
            config=self.config,
            cu_seqlens=boundaries.cu_seqlens_q,
            mscale=self.rotary_scaling,
            cp_group=self.cp_group,
        )
        return rotated
