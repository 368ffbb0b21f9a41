"""The layers of every family: megatron-core's, with norms on what is added, factors, windows and kinds of rotary positions."""

import math
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from skyrl_engine_megatron.architecture import Architecture
from skyrl_engine_megatron.attention import DocumentAttention
from skyrl_engine_megatron.library import (
    RotaryEmbedding,
    TransformerConfig,
    TransformerLayer,
    copy_to_tensor_model_parallel_region,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
)


class Norm(torch.nn.RMSNorm):
    """RMSNorm of hidden states, times its weight, or 1 plus it (Gemma).

    Under sequence parallelism each rank normalises its share of the tokens only; the mark on the weight makes megatron-core sum gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=device_of(config), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] # megatron-core reads it
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.zero_centered:
            return super().forward(hidden)
        exact = hidden if hidden.dtype == torch.float64 else hidden.float()
        return torch.nn.functional.rms_norm(exact, self.normalized_shape, 1 + self.weight.to(exact.dtype), self.eps).type_as(hidden)


class HeadNorm(Norm):
    """RMSNorm of this rank's query or key heads, one by one; megatron-core sums its gradients over tensor-parallel ranks, by its name."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        del self.weight.sequence_parallel  # type: ignore[attr-defined]


class WholeNorm(torch.nn.Module):
    """RMSNorm over the numbers of all query or key heads, of which this rank has its share (OLMo 2, arXiv 2501.00656, section 3).

    Every rank holds the whole weight and multiplies by its part, so that its gradient is a part of the whole, which megatron-core sums over
    tensor-parallel ranks, by the module's name.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.width, self.eps = self.heads(config) * hidden_size, eps
        self.weight = torch.nn.Parameter(torch.empty(self.width, device=device_of(config), dtype=config.params_dtype))

    def heads(self, config: TransformerConfig) -> int:
        raise NotImplementedError

    def forward(self, heads_T1HD: Tensor) -> Tensor:
        exact = heads_T1HD if heads_T1HD.dtype == torch.float64 else heads_T1HD.float()
        # each rank's output depends on the sum, so that the sum's gradient is summed too
        squares = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(exact.square().sum((-2, -1), keepdim=True))
        )
        share = heads_T1HD.shape[-2] * heads_T1HD.shape[-1]
        first = parallel_state.get_tensor_model_parallel_rank() * share
        own_weight = self.weight[first : first + share].view(heads_T1HD.shape[-2:])
        return (exact * torch.rsqrt(squares / self.width + self.eps)).type_as(heads_T1HD) * own_weight


class WholeQueryNorm(WholeNorm):
    def heads(self, config: TransformerConfig) -> int:
        return int(config.num_attention_heads)


class WholeKeyNorm(WholeNorm):
    def heads(self, config: TransformerConfig) -> int:
        return int(config.num_query_groups)


def device_of(config: TransformerConfig) -> torch.device:
    """Return the device on which a rank makes its parameters."""
    return torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


class FamilyLayer(TransformerLayer):  # type: ignore[misc] # megatron-core is untyped
    """A layer as `architecture` describes it; megatron-core's own where it asks for nothing else.

    `dropping` are its adapters that drop inputs. They get the tokens' keys at every call, because any of several micro-batches in the pipeline
    may be the one whose activations are recomputed.
    """

    def __init__(self, config: TransformerConfig, *args: Any, architecture: Architecture, **options: Any) -> None:
        super().__init__(config, *args, **options)
        # megatron-core counts layers from 1 over all stages
        number = self.layer_number - 1
        self.rotary = architecture.rotary_of[number]
        self.chooses_rotary = len(architecture.rotary) > 1
        self.dropping: list[Any] = []
        core = self.self_attention.core_attention
        if isinstance(core, DocumentAttention):
            core.window = architecture.window if architecture.windowed[number] else None
            core.scaling = architecture.attention_scale
            if architecture.family.sinks:
                heads = architecture.heads // parallel_state.get_tensor_model_parallel_world_size()
                core.sinks = torch.nn.Parameter(torch.empty(heads, device=device_of(config), dtype=config.params_dtype))
        if architecture.latent is None and self.rotary is not None and (scaling := architecture.rotary[self.rotary].scaling) != 1.0:
            self.self_attention.config = _scale_rotary(config, scaling)
        if architecture.family.norms.after:
            sizes = (config, config.hidden_size, config.layernorm_epsilon)
            self.post_attention_layernorm, self.post_mlp_layernorm = Norm(*sizes), Norm(*sizes)
        if architecture.family.norms.after or architecture.residual_scale != 1.0:
            scale = architecture.residual_scale
            self.self_attn_bda = _add_to_residual(getattr(self, "post_attention_layernorm", None), scale)
            self.mlp_bda = _add_to_residual(getattr(self, "post_mlp_layernorm", None), scale)

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **options: Any) -> Any:
        """Run the layer with its own kind of the rotary angles [tokens, kinds, 1, d], or without positions."""
        if self.rotary is None:
            rotary_pos_emb = None
        elif self.chooses_rotary and rotary_pos_emb is not None:
            rotary_pos_emb = rotary_pos_emb[:, self.rotary : self.rotary + 1]
        for adapters in self.dropping:
            adapters.token_keys = options["packed_seq_params"].token_keys
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **options)


def _add_to_residual(norm: Norm | None, scale: float) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Return what megatron-core calls to add an output, with its bias, to the residual stream: here normalised and scaled."""

    def add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, _dropout: float) -> Tensor:
        output, bias = output_and_bias
        output = output if bias is None else output + bias
        output = output if norm is None else norm(output)
        return residual + (output if scale == 1.0 else output * scale)

    return lambda _training, _fused: add


def _scale_rotary(config: TransformerConfig, scaling: float) -> TransformerConfig:
    """Return a copy by which megatron-core multiplies cosines and sines by `scaling`.

    It computes (0.1 m log s + 1) / (0.1 n log s + 1) from YaRN's mscale m, mscale_all_dim n and factor s.
    """
    scaled = copy(config)
    scaled.yarn_rotary_scaling_factor, scaled.yarn_mscale, scaled.yarn_mscale_all_dim = math.e, 10 * (scaling - 1), 0.0
    return scaled


class SeveralRotaryEmbeddings(RotaryEmbedding):  # type: ignore[misc] # megatron-core is untyped
    """Rotary angles of several kinds of layers, [tokens, kinds, 1, d]."""

    def __init__(self, first: RotaryEmbedding, inverse_frequencies: list[Tensor]) -> None:
        torch.nn.Module.__init__(self)
        self.rotary_interleaved, self.seq_len_interpolation_factor = first.rotary_interleaved, first.seq_len_interpolation_factor
        self.cp_group, self.inv_freq = first.cp_group, inverse_frequencies[0]
        self.kinds = inverse_frequencies

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        angles = []
        for inverse_frequencies in self.kinds:
            self.inv_freq = inverse_frequencies
            angles.append(super().get_emb(max_seq_len, offset))
        return torch.cat(angles, 1)
