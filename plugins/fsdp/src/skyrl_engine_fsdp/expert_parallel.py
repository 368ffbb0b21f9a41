"""Experts divided among data-parallel ranks: a token's row goes to the ranks that hold its experts, and what they return comes back.

Tensor-parallel ranks, which have the same tokens, send the rows of different experts, and sum what comes back.

Two exchanges of rows per layer (all-to-all), and two in its backward pass. The host learns once per layer how many rows go where; rows of one
expert are multiplied together, by transformers' own code for the experts that a rank holds.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from skyrl_engine.model_facts.tensor_parallel_plan import EXPERTS, match_styles
from skyrl_engine.modeling.vision import language_part
from skyrl_engine_fsdp.experts import divide_weights
from skyrl_engine_fsdp.meshes import ExpertHolders
from skyrl_engine_fsdp.parameter_views import view_parameters
from skyrl_engine_fsdp.rank_sums import sum_backward, sum_forward
from skyrl_engine_fsdp.vocabulary import get_local

_exchange: Final[Any] = dist.all_to_all_single
"""Untyped in torch."""


def divide_experts_among(
    decoder: nn.Module, styles: Mapping[str, str], ranks: ExpertHolders, tensor: dist.ProcessGroup | None
) -> list[nn.Module]:
    """Divide, in place, the experts of every layer among `ranks`, and return the modules that hold them.

    `styles` are those of the model's tensor-parallel plan, which names the experts; `tensor` is the group of tensor-parallel ranks. Raises
    UnsupportedError for experts that cannot be divided.
    """
    part = language_part(decoder)
    names = match_styles(
        {pattern: style for pattern, style in styles.items() if style == EXPERTS}, (name for name, _ in part.named_modules())
    )
    divided = []
    for name in names:
        experts = part.get_submodule(name)
        count = divide_weights(name, experts, ranks.holders)
        _Dispatch(ranks, count, tensor).attach(experts)
        divided.append(experts)
    return divided


@frozen(eq=False)
class _Sent:
    """The inputs kept while rows are away, the `order` int64[rows] in which choices were sent, and the numbers of rows by rank."""

    hidden: Tensor
    shares: Tensor
    order: Tensor
    sent: list[int]
    received: list[int]


class _Dispatch:
    """Sends rows to the ranks that hold the `count` experts of a layer, equally many each, and adds up what comes back, over `tensor` too."""

    def __init__(self, ranks: ExpertHolders, count: int, tensor: dist.ProcessGroup | None) -> None:
        self._group, self._ranks, self._tensor = ranks.exchange, ranks.exchange.size(), tensor
        self._held = count // ranks.holders.size()
        # tensor-parallel ranks are next to each other among the holders, and each sends the rows of experts of those with its own place
        self._places = ranks.holders.size() // self._ranks
        self._place = ranks.holders.get_local_rank() % self._places
        # one place and no list: a layer that is computed again may end before its output is asked for
        self._sent: _Sent | None = None

    def attach(self, experts: nn.Module) -> None:
        """Let a module of experts, called with hidden states, choices and shares, compute the rows that all ranks send it."""
        view_parameters(experts, get_local)
        experts.register_forward_pre_hook(self._send)
        experts.register_forward_hook(self._bring_back)

    def _send(self, _experts: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_TH, chosen_TK, shares_TK = inputs
        if self._tensor is not None:
            hidden_TH, shares_TK = sum_backward(hidden_TH, self._tensor), sum_backward(shares_TK, self._tensor)
        chosen = self._number_own(chosen_TK.reshape(-1))
        order = chosen.argsort(stable=True)
        # bincount would ask the device for the largest number; the last one counts what other tensor-parallel ranks send
        every = self._ranks * self._held
        counts = chosen.new_zeros(every + 1).scatter_add_(0, chosen, torch.ones_like(chosen))[:-1].view(self._ranks, -1)
        from_others = torch.empty_like(counts)
        _exchange(from_others, counts, group=self._group)
        sent, received = torch.stack([counts.sum(1), from_others.sum(1)]).tolist()
        order = order[: sum(sent)]
        self._sent = _Sent(hidden_TH, shares_TK, order, sent, received)
        rows_RH = _ExchangeRows.apply(hidden_TH[order // chosen_TK.shape[1]], sent, received, self._group)  # type: ignore[no-untyped-call] # torch leaves it untyped
        own = torch.arange(counts.shape[1], device=chosen.device).repeat(self._ranks)
        experts_R = own.repeat_interleave(from_others.reshape(-1), output_size=sum(received))
        # a row of zeros, which is dropped again: a rank to whose experts no row goes takes part in the backward pass too
        rows_RH = torch.cat([rows_RH, rows_RH.new_zeros(1, rows_RH.shape[1])])
        experts_R = torch.cat([experts_R, experts_R.new_zeros(1)])
        return rows_RH, experts_R[:, None].to(chosen.dtype), shares_TK.new_ones(len(experts_R), 1)

    def _number_own(self, experts: Tensor) -> Tensor:
        """Return the numbers, among the experts whose rows this rank sends, of `experts` int64[n]; how many these are stands for all others."""
        holder, within = experts // self._held, experts % self._held
        own = holder // self._places * self._held + within
        return torch.where(holder % self._places == self._place, own, self._ranks * self._held)

    def _bring_back(self, _experts: nn.Module, _inputs: object, output_RH: Tensor) -> Tensor:
        assert self._sent is not None, "rows come back that were not sent"
        sent, self._sent = self._sent, None
        back: Tensor = _ExchangeRows.apply(output_RH[:-1], sent.received, sent.sent, self._group)  # type: ignore[no-untyped-call] # as above
        weighted = back * sent.shares.reshape(-1)[sent.order, None]
        tokens = sent.order // sent.shares.shape[1]
        total = torch.zeros_like(sent.hidden).index_add(0, tokens, weighted.to(sent.hidden.dtype))
        return total if self._tensor is None else sum_forward(total, self._tensor)


class _ExchangeRows(torch.autograd.Function):
    """Send rows [n, h] to ranks, so many to each, and return those that they send; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(upstream[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    _exchange(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
