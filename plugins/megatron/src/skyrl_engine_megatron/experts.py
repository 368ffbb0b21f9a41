"""A mixture of experts over tensor-parallel ranks, which hold whole experts or a part of every expert, on CPU and CUDA.

megatron-core's own layer needs CUDA streams, and equally many tokens on all ranks or an exchange of their numbers.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from skyrl_engine_megatron.architecture import Mixture
from skyrl_engine_megatron.documents import Boundaries
from skyrl_engine_megatron.library import (
    MegatronModule,
    TransformerConfig,
    TransformerLayer,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from skyrl_engine_megatron.router import RoutedTokens


class MixtureOfExperts(MegatronModule):  # type: ignore[misc] # megatron-core is untyped
    """The feed-forward part of a layer: each token passes through its most probable experts, weighted by their probabilities.

    No token is dropped, so a token's output does not depend on how the batch is divided. `routed` computes the router's losses; None: it has
    none.
    """

    mixture: ClassVar[Mixture]
    whole_experts: ClassVar[bool]
    routed: RoutedTokens | None = None
    layer = 0

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
        count, width = self.mixture.count, self.mixture.feed_forward
        if self.whole_experts:
            count //= ranks
        else:
            width //= ranks
        self.own = slice(rank * count, (rank + 1) * count) if self.whole_experts else slice(None)
        self.router = self._parameter(self.mixture.count, config.hidden_size)
        self.gate_up = self._parameter(count, 2 * width, config.hidden_size)
        self.down = self._parameter(count, config.hidden_size, width)

    def set_layer_number(self, number: int) -> None:
        """Take the layer's number from megatron-core, which counts from 1 over all stages."""
        self.layer = number - 1

    def _parameter(self, *shape: int) -> nn.Parameter:
        device = "cpu" if self.config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        return nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=device))

    def forward(self, hidden_T1H: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return [tokens, 1, h] and no bias. Every rank routes all tokens of its group; the outputs of the ranks' experts are summed."""
        shared = self.config.sequence_parallel
        gather = gather_from_sequence_parallel_region if shared else copy_to_tensor_model_parallel_region
        tokens_TH = gather(hidden_T1H)[:, 0]
        weights_TK, experts_TK = self._route(tokens_TH)
        counts = experts_TK.flatten().bincount(minlength=self.mixture.count).tolist()
        chosen_S = torch.cat(torch.split(experts_TK.flatten().argsort(stable=True), counts)[self.own])
        rows_S = chosen_S // self.mixture.chosen
        inputs = torch.split(tokens_TH.index_select(0, rows_S), counts[self.own])
        # unbound, because indexing one expert would give a gradient as large as all experts
        outputs = [_expert(*arguments) for arguments in zip(inputs, self.gate_up.unbind(), self.down.unbind(), strict=True)]
        weighted_SH = torch.cat(outputs) * weights_TK.flatten()[chosen_S, None]
        sum_TH = torch.zeros_like(tokens_TH).index_add(0, rows_S, weighted_SH)
        reduce = reduce_scatter_to_sequence_parallel_region if shared else reduce_from_tensor_model_parallel_region
        return reduce(sum_TH[:, None]), None

    def _route(self, tokens_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and numbers of each token's experts, equal on all tensor-parallel ranks.

        Each rank has the gradient of the weights through its own experts only, so the router's gradient is the sum over ranks.
        """
        logits_TE = nn.functional.linear(tokens_TH, copy_to_tensor_model_parallel_region(self.router))
        probabilities_TE = logits_TE.softmax(-1, dtype=torch.float32)
        weights_TK, experts_TK = probabilities_TE.topk(self.mixture.chosen, dim=-1)
        if self.mixture.normalized:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        if self.routed is not None:
            weights_TK = self.routed.attach_losses(weights_TK, self.layer, logits_TE, probabilities_TE, experts_TK)
        return weights_TK.to(tokens_TH.dtype), experts_TK


class RoutedLayer(TransformerLayer):  # type: ignore[misc] # megatron-core is untyped
    """A layer that gives its mixture of experts the documents of the tokens.

    It does so at every call, because any of several micro-batches in the pipeline may be the one whose activations are recomputed.
    """

    def forward(self, *args: Any, packed_seq_params: Boundaries, **options: Any) -> Any:
        self.mlp.routed = packed_seq_params.router
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


def _expert(tokens_SH: Tensor, gate_up_FH: Tensor, down_HF: Tensor) -> Tensor:
    gate_SF, up_SF = nn.functional.linear(tokens_SH, gate_up_FH).chunk(2, -1)
    return nn.functional.linear(nn.functional.silu(gate_SF) * up_SF, down_HF)


def mixture_of(mixture: Mixture, *, whole_experts: bool) -> type[MixtureOfExperts]:
    """Return a class with these sizes, because megatron-core makes layers from classes and passes no such arguments."""
    return type("SizedMixtureOfExperts", (MixtureOfExperts,), {"mixture": mixture, "whole_experts": whole_experts})
