"""Losses of a mixture's routers, computed inside layers, out of a reducer's reach, and yet independent of how a step is divided.

Balance, of one layer and one document of T tokens, each of which chooses K of E experts with router probabilities p:

    E sum_e f_e P_e,   f_e = 1 / (K T) sum_t [t chooses e],   P_e = 1 / T sum_t p_te

which is 1 where assignments or probabilities are even, and at most E / K. It is Switch Transformers' load-balancing loss (Fedus et al. 2021,
arXiv 2101.03961, eq. 4 to 6) for K experts a token, over one sequence instead of a batch, as DeepSeek-V3's sequence-wise balance loss
(DeepSeek-AI 2024, arXiv 2412.19437, eq. 17 to 20; there p are sigmoids over their sum, as
here where sigmoids route; elsewhere the softmax that routes). f has no gradient.

z, of one layer and one token with router logits x: log(sum_e exp x_e)^2 (ST-MoE, Zoph et al. 2022, arXiv 2202.08906, eq. 5).

Summed over layers, the objective gains a coefficient times the mean balance over the step's documents, and a coefficient times the mean z
over its tokens; padding counts in neither. A document is never divided among micro-batches or data-parallel ranks, and every micro-batch
carries the step's numbers of documents and tokens (`StepCounts`), so each micro-batch adds its part of the means and nothing is divided
afterwards. (megatron-core's own losses are means over a micro-batch times its tokens, to be divided by the tokens of all micro-batches.)

Routers that choose by scores plus a bias are balanced without a loss (Wang et al. 2024, arXiv 2408.15664, algorithm 1): where c_e of a step's
tokens chose expert e, its bias gains u sign(mean of c - c_e) after the optimizer's step. `BiasSteps` keeps the counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor

from skyrl_engine import ContractError
from skyrl_engine.contracts import Metric, StepCounts
from skyrl_engine_megatron.architecture import Mixture
from skyrl_engine_megatron.library import parallel_state
from skyrl_engine_megatron.options import MegatronConfig

_MEASURED: Final = 3
"""Number of sums measured per layer: balance, z, load."""


@frozen(eq=False)
class RoutedTokens:
    """One micro-batch's tokens on this rank, for the routers of all layers.

    `document_of` int64[tokens] is each token's document, or the number of documents for padding; `lengths` float32[documents + 1] are those
    of whole documents, infinite for padding. `balance` and `z` are the weights of a document's balance loss and a token's z-loss, None if
    there is no such loss. Where documents share tokens, `document_of` int64[m] belongs to the tokens `held` int64[m], each once for every
    document that holds it; None: to all tokens. `measured` holds float32[3] by layer: the sums of balance, z and load. If `counts`,
    `chosen` holds by layer int64[experts], the tokens that chose each.
    """

    document_of: Tensor
    lengths: Tensor
    tokens: int
    balance: float | None
    z: float | None
    held: Tensor | None = None
    counts: bool = False
    measured: dict[int, Tensor] = field(factory=dict, init=False)
    chosen: dict[int, Tensor] = field(factory=dict, init=False)

    @property
    def documents(self) -> int:
        return len(self.lengths) - 1

    def attach_losses(
        self, weights_TK: Tensor, layer: int, logits_TE: Tensor, probabilities_TE: Tensor, experts_TK: Tensor
    ) -> Tensor:
        """Return `weights_TK` unchanged, so that a backward pass through them differentiates the losses too.

        Measurements are kept by layer, so that recomputed activations are not counted twice.
        """
        if self.held is not None:
            logits_TE, probabilities_TE, experts_TK = logits_TE[self.held], probabilities_TE[self.held], experts_TK[self.held]
        if self.counts:
            self.chosen[layer] = self._count_chosen(experts_TK, probabilities_TE.shape[1])[:-1].sum(0)
        loss = logits_TE.new_zeros((), dtype=torch.float32)
        measured = [loss, loss, loss]
        if self.balance is not None:
            load_DE = self._load(experts_TK, probabilities_TE.shape[1])
            sums_DE = torch.zeros_like(load_DE).index_add(0, self.document_of, probabilities_TE)
            balance = (load_DE * sums_DE / self.lengths[:, None]).sum()
            loss = loss + self.balance * balance
            measured[0] = balance
            # equal on all context-parallel ranks, over which it will be summed
            measured[2] = load_DE.amax(1).sum() / parallel_state.get_context_parallel_world_size()
        if self.z is not None:
            real_T = self.document_of < self.documents
            z = (logits_TE.float().logsumexp(-1).square() * real_T).sum()
            loss = loss + self.z * z
            measured[1] = z
        self.measured[layer] = torch.stack([layer_statistics.detach() for layer_statistics in measured])
        return _WithLoss.apply(weights_TK, loss) if loss.requires_grad else weights_TK  # type: ignore[no-untyped-call] # torch leaves it untyped

    def _load(self, experts_TK: Tensor, experts: int) -> Tensor:
        """Return E f of whole documents, float32[documents + 1, experts]: an expert's load, relative to an even share; 0 for padding."""
        counts_DE = self._count_chosen(experts_TK, experts)
        if parallel_state.get_context_parallel_world_size() > 1:
            dist.all_reduce(counts_DE, group=parallel_state.get_context_parallel_group())
        return counts_DE * (experts / experts_TK.shape[1]) / self.lengths[:, None]

    def _count_chosen(self, experts_TK: Tensor, experts: int) -> Tensor:
        """Return int64[documents + 1, experts], the tokens of each document on this rank that chose each expert."""
        rows = self.documents + 1
        chosen = (self.document_of[:, None] * experts + experts_TK).flatten()
        counts = torch.zeros(rows * experts, dtype=torch.int64, device=chosen.device).scatter_add_(
            0, chosen, torch.ones_like(chosen)
        )
        return counts.view(rows, experts)


class _WithLoss(torch.autograd.Function):
    """The identity of `carrier`, whose backward pass gives the scalar `loss` the gradient 1."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        return upstream[0], ctx.like


@frozen
class RouterLosses:
    """The coefficients of the routers' losses, and for each of the model's layers, whether it has experts.

    With `counts`, tokens are counted by the experts that they choose.
    """

    balance: float
    z: float
    layers: tuple[bool, ...]
    counts: bool = False

    @classmethod
    def of(cls, options: MegatronConfig, mixture: Mixture | None) -> "RouterLosses | None":
        """Return what the options ask for, or None if they ask for nothing or there are no experts."""
        counts = options.router_bias_rate > 0
        if mixture is None or not (options.router_losses or counts):
            return None
        return cls(options.router_balance_coefficient, options.router_z_coefficient, mixture.layers, counts)

    @property
    def has_losses(self) -> bool:
        return self.balance > 0 or self.z > 0

    def tokens(
        self, lengths: tuple[int, ...], document_of: Tensor, held: Tensor | None, step: StepCounts | None, *, learn: bool
    ) -> RoutedTokens:
        """Return a micro-batch's tokens; `document_of` and `held` are on the device. Without `learn` the losses are only measured.

        Every tensor-parallel rank routes all tokens of its group, and gradients are summed over these ranks, so each takes an equal part of
        the losses. Raises ContractError if the counts of the step are missing.
        """
        if learn and step is None and self.has_losses:
            raise ContractError(
                "the losses of routers are means over an optimizer step, and a micro-batch does not say what its step is made of",
                remedy="Give every MicroBatch its `step`, or set backend.router_balance_coefficient and backend.router_z_coefficient to 0",
            )
        sequences, tokens = (step.sequences, step.tokens) if step is not None else (0, 0)
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return RoutedTokens(
            document_of,
            torch.tensor([*lengths, float("inf")]).to(document_of.device),
            sum(lengths),
            balance=self.balance / (max(1, sequences) * ranks) if self.balance else None,
            z=self.z / (max(1, tokens) * ranks) if self.z else None,
            held=held,
            counts=self.counts and learn,
        )

    def metrics(self, forward_passes: Sequence[RoutedTokens], device: torch.device) -> dict[str, Metric]:
        """Return the metrics of all layers' routers, on all ranks that share these tokens.

        `router_balance` is a mean over documents and layers, `router_z` one over tokens and layers, and `router_load/LAYER` the mean over
        documents of the busiest expert's load relative to an even share. Layers are on all stages and outputs are collected from the last
        one only, so these metrics are summed over ranks.
        """
        context = parallel_state.get_context_parallel_world_size()
        measurements = [
            (layer, row, forward_pass) for forward_pass in forward_passes for layer, row in forward_pass.measured.items()
        ]
        rows = torch.stack([*(row for _, row, _ in measurements), torch.zeros(_MEASURED, device=device)])[:-1].double()
        counts = torch.tensor(
            [[row.documents / context, row.tokens / context] for _, _, row in measurements], dtype=torch.float64
        ).reshape(-1, 2)
        places = torch.tensor([layer for layer, _, _ in measurements], dtype=torch.int64, device=device)
        sums = torch.zeros(len(self.layers), _MEASURED + 2, dtype=torch.float64, device=device)
        sums.index_add_(0, places, torch.cat([rows, counts.to(device)], 1))
        for group in (parallel_state.get_context_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
        by_layer = sums.tolist()
        balance, z, _, documents, tokens = (sum(values) for values in zip(*by_layer, strict=True))
        metrics = {}
        if self.balance:
            metrics["router_balance"] = Metric.mean(balance, documents)
            metrics |= {
                f"router_load/{layer}": Metric.mean(row[2], row[3]) for layer, row in enumerate(by_layer) if self.layers[layer]
            }
        if self.z:
            metrics["router_z"] = Metric.mean(z, tokens)
        return metrics


class BiasSteps:
    """Steps of the biases that the routers of this rank's pieces of the model choose by, at a rate; 0: there are none."""

    def __init__(self, rate: float, biases: Mapping[int, Tensor]) -> None:
        """Take the `biases` float32[experts] by layer, which are changed in place."""
        self._rate, self._biases = rate, biases if rate > 0 else {}
        self._chosen = {
            layer: torch.zeros(len(bias), dtype=torch.int64, device=bias.device) for layer, bias in self._biases.items()
        }

    def add(self, forward_passes: Sequence[RoutedTokens]) -> None:
        """Add up the tokens of micro-batches that learn."""
        for forward_pass in forward_passes:
            for layer, chosen in forward_pass.chosen.items():
                self._chosen[layer] += chosen

    def clear(self) -> None:
        """Drop the counts, as the gradient of the same micro-batches is dropped."""
        for chosen in self._chosen.values():
            chosen.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases by the counts of all ranks with other tokens. These ranks call it together."""
        if not self._chosen:
            return
        # tensor-parallel ranks count the same tokens
        chosen_LE = torch.stack([self._chosen[layer] for layer in sorted(self._chosen)])
        dist.all_reduce(chosen_LE, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        # whole numbers: an expert with exactly the mean stays
        signs_LE = torch.sign(chosen_LE.sum(1, keepdim=True) - chosen_LE * chosen_LE.shape[1])
        for layer, signs_E in zip(sorted(self._chosen), signs_LE, strict=True):
            self._biases[layer].add_(signs_E, alpha=self._rate)
