"""A mixture of experts over ranks that hold whole experts, or a part of every expert, on CPU and CUDA.

megatron-core's own layer needs CUDA streams, and equally many tokens on all ranks or an exchange of their numbers.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from skyrl_engine_megatron.architecture import Mixture
from skyrl_engine_megatron.documents import Boundaries
from skyrl_engine_megatron.expert_exchange import NO_EXPERT, run_on_all_ranks
from skyrl_engine_megatron.groups import groups
from skyrl_engine_megatron.layers import FamilyLayer, device_of
from skyrl_engine_megatron.library import (
    MegatronModule,
    TransformerConfig,
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
    none. Where ranks with different tokens hold experts for each other, none of them has more than `most_tokens`.
    """

    mixture: ClassVar[Mixture]
    whole_experts: ClassVar[bool]
    routed: RoutedTokens | None = None
    most_tokens = 0
    layer = 0

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        mixture, hidden = self.mixture, config.hidden_size
        ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
        count, width, self.others = mixture.count, mixture.feed_forward, groups.experts
        if self.whole_experts:
            count //= parallel_state.get_expert_model_parallel_world_size()
            rank = parallel_state.get_expert_model_parallel_rank()
        else:
            width //= ranks
        self.first, self.count = rank * count if self.whole_experts else 0, count
        self.router = self._parameter(mixture.count, hidden)
        if mixture.clamped is None:
            self.gate_up, self.down = self._parameter(count, 2 * width, hidden), self._parameter(count, hidden, width)
        else:
            self.gate_up, self.gate_up_bias = self._parameter(count, hidden, 2 * width), self._parameter(count, 2 * width)
            self.down, self.down_bias = self._parameter(count, width, hidden), self._parameter(count, hidden)
            self.router_bias = self._parameter(mixture.count)
        if self.others is not None:
            for parameter in self.list_expert_parameters():
                # megatron-core then sums its gradients over the ranks that hold the same experts
                parameter.allreduce = False  # type: ignore[attr-defined]
        if mixture.corrected:
            self.correction = self._parameter(mixture.count, dtype=torch.float32, trained=False)
        if mixture.shared:
            self.shared_gate_up = self._parameter(2 * mixture.shared // ranks, hidden)
            self.shared_down = self._parameter(hidden, mixture.shared // ranks)
        if mixture.shared_gate:
            self.shared_weight = self._parameter(1, hidden)

    def list_expert_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's experts."""
        biases = () if self.mixture.clamped is None else (self.gate_up_bias, self.down_bias)
        return [self.gate_up, self.down, *biases]

    def set_layer_number(self, number: int) -> None:
        """Take the layer's number from megatron-core, which counts from 1 over all stages."""
        self.layer = number - 1

    def _parameter(self, *shape: int, dtype: torch.dtype | None = None, trained: bool = True) -> nn.Parameter:
        device = device_of(self.config)
        return nn.Parameter(torch.empty(*shape, dtype=dtype or self.config.params_dtype, device=device), requires_grad=trained)

    def forward(self, hidden_T1H: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return [tokens, 1, h] and no bias.

        Every rank routes all tokens of its tensor-parallel group; the outputs of the ranks' experts are summed.
        """
        shared = self.config.sequence_parallel
        gather = gather_from_sequence_parallel_region if shared else copy_to_tensor_model_parallel_region
        tokens_TH = gather(hidden_T1H)[:, 0]
        weights_TK, experts_TK = self._route(tokens_TH)
        if self.others is None:
            sum_TH = self._run_experts(tokens_TH, weights_TK, experts_TK)
        else:
            sum_TH = run_on_all_ranks(self._run_experts, tokens_TH, weights_TK, experts_TK, self.others, self.most_tokens)
        if self.mixture.shared:
            sum_TH = sum_TH + self._run_shared_experts(tokens_TH)
        reduce = reduce_scatter_to_sequence_parallel_region if shared else reduce_from_tensor_model_parallel_region
        return reduce(sum_TH[:, None]), None

    def _run_experts(self, tokens_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Return the weighted sum over this rank's experts, [tokens, h].

        A token's places among its chosen experts are sorted by expert, this rank's experts first. Their numbers stay on the device; places of
        other ranks' experts come last, belong to no group, and count as 0. Of tokens of several ranks they are left out, for which the host
        waits for the number of others: there would be several times as many rows as experts here compute.
        """
        experts_S = experts_TK.flatten()
        places_S = (experts_S - self.first) % self.mixture.count
        if self.others is not None:
            places_S = places_S.masked_fill(experts_S == NO_EXPERT, self.mixture.count)
        sorted_S, chosen_S = places_S.sort(stable=True)
        if self.others is not None:
            own = max(1, int((sorted_S < self.count).sum()))
            sorted_S, chosen_S = sorted_S[:own], chosen_S[:own]
        # a count by bincount would wait for the device
        ends = torch.searchsorted(sorted_S, torch.arange(self.count, device=sorted_S.device), right=True, out_int32=True)
        own_S1 = (sorted_S < self.count)[:, None]
        rows_S = chosen_S // self.mixture.chosen
        # Rows outside of all groups are not written, forwards and backwards. Each product is masked before anything is computed from it, since
        # 0 times the derivative at what lies there need not be 0.
        inputs_SH = torch.where(own_S1, tokens_TH.index_select(0, rows_S), 0)
        if self.mixture.clamped is None:
            products_SF = torch.where(own_S1, multiply_groups(inputs_SH, self.gate_up.transpose(1, 2), ends), 0)
            gate_SF, up_SF = products_SF.chunk(2, -1)
            inner_SF = self.config.activation_func(gate_SF) * up_SF
            output_SH = torch.where(own_S1, multiply_groups(inner_SF, self.down.transpose(1, 2), ends), 0)
        else:
            expert_S = sorted_S.clamp(max=self.count - 1)
            products_SF = multiply_groups(inputs_SH, self.gate_up, ends) + self.gate_up_bias.index_select(0, expert_S)
            inner_SF = apply_clamped_gate(torch.where(own_S1, products_SF, 0), self.mixture.clamped, self.mixture.alpha)
            bias_EH = self.down_bias if self.whole_experts else keep_on_first(self.down_bias)
            products_SH = multiply_groups(inner_SF, self.down, ends) + bias_EH.index_select(0, expert_S)
            output_SH = torch.where(own_S1, products_SH, 0)
        weighted_SH = output_SH * weights_TK.flatten()[chosen_S, None]
        return torch.zeros_like(tokens_TH).index_add(0, rows_S, weighted_SH)

    def _run_shared_experts(self, tokens_TH: Tensor) -> Tensor:
        """Return the output of this rank's columns of the network that all tokens pass through, [tokens, h]."""
        gate_TF, up_TF = nn.functional.linear(tokens_TH, self.shared_gate_up).chunk(2, -1)
        output_TH = nn.functional.linear(self.config.activation_func(gate_TF) * up_TF, self.shared_down)
        if not self.mixture.shared_gate:
            return output_TH
        # each rank has the gradient through its own columns only
        weight_1H = copy_to_tensor_model_parallel_region(self.shared_weight)
        return nn.functional.linear(tokens_TH, weight_1H).sigmoid() * output_TH

    def _route(self, tokens_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and numbers of each token's experts, equal on all tensor-parallel ranks.

        Each rank has the gradient of the weights through its own experts only, so the router's gradient is the sum over ranks.
        """
        mixture, router_EH = self.mixture, copy_to_tensor_model_parallel_region(self.router)
        if mixture.sigmoid:
            logits_TE = nn.functional.linear(tokens_TH.float(), router_EH.float())
            scores_TE = logits_TE.sigmoid()
            probabilities_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        else:
            bias_E = None if mixture.clamped is None else copy_to_tensor_model_parallel_region(self.router_bias)
            logits_TE = nn.functional.linear(tokens_TH, router_EH, bias_E)
            scores_TE = probabilities_TE = logits_TE.softmax(-1, dtype=torch.float32)
        if mixture.corrected:
            experts_TK = choose_experts_by_correction(scores_TE.detach() + self.correction, mixture)
            weights_TK = scores_TE.gather(1, experts_TK)
        elif mixture.of_chosen:
            chosen_TK, experts_TK = logits_TE.topk(mixture.chosen, dim=-1)
            weights_TK = chosen_TK.softmax(-1)
        else:
            weights_TK, experts_TK = scores_TE.topk(mixture.chosen, dim=-1)
        if mixture.normalized:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        weights_TK = weights_TK if mixture.factor == 1.0 else weights_TK * mixture.factor
        if self.routed is not None:
            weights_TK = self.routed.attach_losses(weights_TK, self.layer, logits_TE, probabilities_TE, experts_TK)
        return weights_TK.to(tokens_TH.dtype), experts_TK


def choose_experts_by_correction(corrected_TE: Tensor, mixture: Mixture) -> Tensor:
    """Return int64[tokens, chosen], the best experts of the best groups; a group is as good as its two best experts together.

    Group-limited routing of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    """
    if mixture.groups > 1:
        grouped_TGE = corrected_TE.view(len(corrected_TE), mixture.groups, -1)
        best_TG = grouped_TGE.topk(2, dim=-1).values.sum(-1).topk(mixture.chosen_groups, dim=-1).indices
        open_TG = torch.zeros(grouped_TGE.shape[:2], dtype=torch.bool, device=corrected_TE.device).scatter(1, best_TG, value=True)
        corrected_TE = grouped_TGE.masked_fill(~open_TG[..., None], float("-inf")).flatten(1)
    return corrected_TE.topk(mixture.chosen, dim=-1).indices


def apply_clamped_gate(gate_up_SF: Tensor, limit: float, alpha: float) -> Tensor:
    """Return gpt-oss's product of clamped gates and ups, which alternate: (up + 1) gate sigmoid(alpha gate), [rows, f / 2]."""
    gate_SF, up_SF = gate_up_SF[..., ::2].clamp(max=limit), gate_up_SF[..., 1::2].clamp(-limit, limit)
    return (up_SF + 1) * gate_SF * (gate_SF * alpha).sigmoid()


def keep_on_first(bias: Tensor) -> Tensor:
    """Return a bias on the first tensor-parallel rank and 0 on others, whose outputs are added up; its gradient is the same on all."""
    whole: Tensor = copy_to_tensor_model_parallel_region(bias)
    return whole if parallel_state.get_tensor_model_parallel_rank() == 0 else whole * 0


def multiply_groups(rows_SI: Tensor, weights_EIO: Tensor, ends: Tensor) -> Tensor:
    """Return the rows of group e times weight e, [rows, o]; `ends` int32[experts] are where groups of rows end.

    Rows after the last group have no meaning. torch's grouped product reads the ends on the device. It takes rows of a multiple of 16 bytes;
    others, and devices that have no such product, go group by group, for which a GPU is waited for.
    """
    if _takes_groups(rows_SI, weights_EIO):
        output_SO: Tensor = nn.functional.grouped_mm(rows_SI, weights_EIO, offs=ends)
        return output_SO
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    rest = rows_SI.new_zeros(len(rows_SI) - sum(sizes), weights_EIO.shape[2])
    # unbound, because indexing one expert would give a gradient as large as all experts
    groups = zip(torch.split(rows_SI[: sum(sizes)], sizes), weights_EIO.unbind(), strict=True)
    return torch.cat([*(rows @ weight for rows, weight in groups), rest])


def _takes_groups(rows_SI: Tensor, weights_EIO: Tensor) -> bool:
    if rows_SI.is_cuda and torch.cuda.get_device_capability(rows_SI.device) < (8, 0):
        return False
    aligned = all(size * rows_SI.element_size() % 16 == 0 for size in weights_EIO.shape[1:])
    return aligned and all(tensor.data_ptr() % 16 == 0 for tensor in (rows_SI, weights_EIO))


class RoutedLayer(FamilyLayer):
    """A layer that gives its mixture of experts the documents of the tokens, and how many tokens ranks have.

    It does so at every call, because any of several micro-batches in the pipeline may be the one whose activations are recomputed.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        boundaries: Boundaries = options["packed_seq_params"]
        self.mlp.routed, self.mlp.most_tokens = boundaries.router, boundaries.most_tokens
        return super().forward(*args, **options)


def list_router_biases(pieces: Iterable[nn.Module]) -> dict[int, Tensor]:
    """Return the biases float32[experts] that routers of these pieces choose by, by layer; none where routers have none."""
    layers = [module for piece in pieces for module in piece.modules() if isinstance(module, MixtureOfExperts)]
    return {layer.layer: layer.correction.detach() for layer in layers if layer.mixture.corrected}


def mixture_of(mixture: Mixture, *, whole_experts: bool) -> type[MixtureOfExperts]:
    """Return a class with these sizes, because megatron-core makes layers from classes and passes no such arguments."""
    return type("SizedMixtureOfExperts", (MixtureOfExperts,), {"mixture": mixture, "whole_experts": whole_experts})
