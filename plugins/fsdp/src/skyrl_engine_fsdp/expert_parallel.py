"""Experts divided among data-parallel ranks: a token's row goes to the ranks that hold its experts, and what they return comes back.

Two exchanges of rows per layer (all-to-all), and two in its backward pass. The host learns once per layer how many rows go where; rows of one
expert are multiplied together, by transformers' own code for the experts that a rank holds.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from skyrl_engine.model_facts.tensor_parallel_plan import EXPERTS, match_styles
from skyrl_engine.modeling.vision import language_part
from skyrl_engine_fsdp.experts import divide_weights
from skyrl_engine_fsdp.parameter_views import view_parameters
from skyrl_engine_fsdp.vocabulary import get_local

_exchange: Final[Any] = dist.all_to_all_single
"""Untyped in torch."""


def divide_experts_among(decoder: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> list[nn.Module]:
    """Divide, in place, the experts of every layer among the ranks of `mesh`, and return the modules that hold them.

    `styles` are those of the model's tensor-parallel plan, which names the experts. Raises UnsupportedError for experts that cannot be divided.
    """
    part = language_part(decoder)
    names = match_styles(
        {pattern: style for pattern, style in styles.items() if style == EXPERTS}, (name for name, _ in part.named_modules())
    )
    divided = []
    for name in names:
        experts = part.get_submodule(name)
        count = divide_weights(name, experts, mesh)
        _Dispatch(mesh.get_group(), mesh.size(), count).attach(experts)
        divided.append(experts)
    return divided


@frozen(eq=False)
class _Sent:
    """The inputs kept while rows are away, the `order` int64[choices] in which rows were sent, and their numbers by rank."""

    hidden: Tensor
    shares: Tensor
    order: Tensor
    sent: list[int]
    received: list[int]


class _Dispatch:
    """Sends rows to the `ranks` of a group, which hold `count` experts, equally many each, and adds up what comes back."""

    def __init__(self, group: dist.ProcessGroup, ranks: int, count: int) -> None:
        self._group, self._ranks, self._count = group, ranks, count
        # one place and no list: a layer that is computed again may end before its output is asked for
        self._sent: _Sent | None = None

    def attach(self, experts: nn.Module) -> None:
        """Let a module of experts, called with hidden states, choices and shares, compute the rows that all ranks send it."""
        view_parameters(experts, get_local)
        experts.register_forward_pre_hook(self._send)
        experts.register_forward_hook(self._bring_back)

    def _send(self, _experts: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_TH, chosen_TK, shares_TK = inputs
        chosen = chosen_TK.reshape(-1)
        order = chosen.argsort(stable=True)
        # bincount would ask the device for the largest number
        counts = chosen.new_zeros(self._count).scatter_add_(0, chosen, torch.ones_like(chosen)).view(self._ranks, -1)
        from_others = torch.empty_like(counts)
        _exchange(from_others, counts, group=self._group)
        sent, received = torch.stack([counts.sum(1), from_others.sum(1)]).tolist()
        self._sent = _Sent(hidden_TH, shares_TK, order, sent, received)
        rows_RH = _ExchangeRows.apply(hidden_TH[order // chosen_TK.shape[1]], sent, received, self._group)  # type: ignore[no-untyped-call] # torch leaves it untyped
        own = torch.arange(counts.shape[1], device=chosen.device).repeat(self._ranks)
        experts_R = own.repeat_interleave(from_others.reshape(-1), output_size=sum(received))
        # a row of zeros, which is dropped again: a rank to whose experts no row goes takes part in the backward pass too
        rows_RH = torch.cat([rows_RH, rows_RH.new_zeros(1, rows_RH.shape[1])])
        experts_R = torch.cat([experts_R, experts_R.new_zeros(1)])
        return rows_RH, experts_R[:, None].to(chosen.dtype), shares_TK.new_ones(len(experts_R), 1)

    def _bring_back(self, _experts: nn.Module, _inputs: object, output_RH: Tensor) -> Tensor:
        assert self._sent is not None, "rows come back that were not sent"
        sent, self._sent = self._sent, None
        back: Tensor = _ExchangeRows.apply(output_RH[:-1], sent.received, sent.sent, self._group)  # type: ignore[no-untyped-call] # as above
        weighted = back * sent.shares.reshape(-1)[sent.order, None]
        tokens = sent.order // sent.shares.shape[1]
        return torch.zeros_like(sent.hidden).index_add(0, tokens, weighted.to(sent.hidden.dtype))


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
