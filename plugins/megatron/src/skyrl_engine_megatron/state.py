"""This rank's weights, gradients and optimizer state, sharded over data-parallel ranks or not, and gathered on request."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from skyrl_engine.contracts import AdamWSettings, OptimizerSettings, ParameterGroup
from skyrl_engine.modeling.optimizer import build_adamw, find_group, use_settings
from skyrl_engine.modeling.weight_averages import WeightAverages
from skyrl_engine_megatron.library import DistributedDataParallel, parallel_state
from skyrl_engine_megatron.names import EMBEDDING, HEAD, MegatronParameter


@frozen(eq=False)
class Piece:
    """A part of one parameter that this rank updates: elements `start` to `stop` of the flattened parameter.

    `source` is the name of the Hugging Face tensor that they belong to, or of the first one where several lie there and learn alike.
    `master` holds the elements in float32 (float64 for a float64 model): the parameter's own memory if it has that dtype, a copy under
    bfloat16. A piece of a matrix has one row, so that weight decay, which goes by the number of dimensions, treats it as a matrix.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    source: str
    master: nn.Parameter

    @classmethod
    def of(cls, parameter: nn.Parameter, start: int, stop: int, source: str) -> "Piece":
        flat = parameter.detach().view(-1)[start:stop]
        values = flat.float() if flat.dtype == torch.bfloat16 else flat
        return cls(parameter, start, stop, source, nn.Parameter(values[None] if parameter.ndim >= 2 else values))

    def cut(self, values: Tensor) -> Tensor:
        """Return this piece of a tensor of the parameter's shape, in the shape of `master`."""
        return values.reshape(-1)[self.start : self.stop].view_as(self.master)

    @property
    def gradient(self) -> Tensor:
        """The view of this piece in the accumulated gradient."""
        main: Tensor = self.parameter.main_grad  # type: ignore[attr-defined] # megatron-core's accumulated gradient
        return self.cut(main)

    def publish(self) -> None:
        """Round `master` into the parameter, if it is a copy."""
        if self.parameter.dtype != self.master.dtype:
            self.parameter.detach().view(-1)[self.start : self.stop].copy_(self.master.detach().view(-1))


def is_spread(parameter: nn.Parameter) -> bool:
    """Say whether ranks with different tokens hold different parts of this parameter, of experts."""
    return not getattr(parameter, "allreduce", True)


def list_buffers(model: DistributedDataParallel) -> list[Any]:
    """Return megatron-core's buffers of gradients: those of all parameters but experts', and those of experts that are spread."""
    return [*model.buffers, *model.expert_parallel_buffers]


def find_owned_ranges(
    parameters: Mapping[str, nn.Parameter], models: Sequence[DistributedDataParallel]
) -> dict[str, tuple[int, int]]:
    """Return the elements of parameters whose summed gradients megatron-core's reduce-scatter leaves on this rank; of some there are none."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    owned = {}
    for model in models:
        for buffer in list_buffers(model):
            ranks, rank = buffer.data_parallel_world_size, buffer.data_parallel_group.rank()
            for parameter, (first, last, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                share = bucket.grad_data.numel() // ranks
                low = bucket.offset + rank * share
                start, stop = max(first, low) - first, min(last, low + share) - first
                if start < stop:
                    owned[names[id(parameter)]] = (start, stop)
    return owned


def freeze(entries: Sequence[MegatronParameter], parameters: Mapping[str, nn.Parameter]) -> None:
    """Let parameters of which nothing learns have no gradient; call it before gradients get their memory."""
    frozen = {entry.name for entry in entries if entry.frozen and not entry.trainable_names}
    # a tied head's copy is frozen with its embedding
    names = frozen | ({HEAD} if EMBEDDING in frozen and all(entry.name != HEAD for entry in entries) else set())
    for name in names & parameters.keys():
        parameters[name].requires_grad_(False)


class ShardedState:
    """The weights, gradients and AdamW moments of this rank, by the names of entries.

    `pieces` are the parts of parameters that this rank updates: one of a parameter, or, where Hugging Face's tensors in it learn unlike each
    other (some are frozen, or in another group), one of each run of alike rows. What is frozen has none, and its weights are read from the
    parameter. Without an optimizer there are no pieces, but where `exact` values are exported: of adapters, which no export rounds. `dtype` is
    that of the computation, in which the parameters are, but for buffers.
    """

    def __init__(
        self,
        entries: Sequence[MegatronParameter],
        parameters: dict[str, nn.Parameter],
        *,
        dtype: torch.dtype,
        optimizer: AdamWSettings | None,
        sharded_over: Sequence[DistributedDataParallel] = (),
        exact: bool = False,
    ) -> None:
        self.entries = entries
        self.parameters = parameters
        self.sharded = bool(sharded_over)
        self.averages = WeightAverages(None if optimizer is None else optimizer.ema_decay)
        self.optimizer: torch.optim.Optimizer | None = None
        self.pieces: dict[str, list[Piece]] = {}
        self._frozen_ranges: dict[str, list[tuple[int, int]]] = {}
        self._has_masters = exact or optimizer is not None
        # of whole tensors: that of masters where there are some
        self.dtype = torch.promote_types(dtype, torch.float32) if self._has_masters else dtype
        if self._has_masters:
            owned = find_owned_ranges(parameters, sharded_over) if self.sharded else None
            self._cut_pieces(() if optimizer is None else optimizer.groups, owned)
        if optimizer is not None:
            named = [(piece.source, piece.master) for piece in self.list_pieces()]
            self.optimizer = build_adamw(named, optimizer)

    def _cut_pieces(self, groups: Sequence[ParameterGroup], owned: Mapping[str, tuple[int, int]] | None) -> None:
        """Cut what this rank owns (None: all) of the parameters that learn into pieces."""
        entry_of = {name: entry for entry in self.entries for name in self.local_names(entry)}
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            low, high = (0, parameter.numel()) if owned is None else owned.get(name, (0, 0))
            for start, stop, source in self._list_ranges(entry_of[name], parameter, groups):
                if source is None:
                    self._frozen_ranges.setdefault(name, []).append((start, stop))
                elif max(start, low) < min(stop, high):
                    piece = Piece.of(parameter, max(start, low), min(stop, high), source)
                    self.pieces.setdefault(name, []).append(piece)

    def _list_ranges(
        self, entry: MegatronParameter, parameter: nn.Parameter, groups: Sequence[ParameterGroup]
    ) -> list[tuple[int, int, str | None]]:
        """Return the runs of this rank's elements of tensors that learn alike, each with the name of one of these tensors; None: frozen."""
        names = entry.names
        kinds = [(name in entry.frozen, find_group(name, groups)) for name in names]
        if all(kind == kinds[0] for kind in kinds):
            return [(0, parameter.numel(), None if kinds[0][0] else names[0])]
        # a kind is known by the first tensor that is of it
        firsts = [kinds.index(kind) for kind in kinds]
        rows = [torch.full((shape[0],), first) for first, (_, shape) in zip(firsts, entry.sources, strict=True)]
        numbers, counts = torch.unique_consecutive(self.share(entry, rows), return_counts=True)
        size, ranges, start = parameter.numel() // parameter.shape[0], list[tuple[int, int, str | None]](), 0
        for first, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            ranges.append((start * size, (start + count) * size, None if kinds[first][0] else names[first]))
            start += count
        return ranges

    def list_pieces(self) -> list[Piece]:
        """Return all pieces."""
        return [piece for pieces in self.pieces.values() for piece in pieces]

    @torch.no_grad()
    def fill(self, entry: MegatronParameter, whole: Sequence[Tensor]) -> None:
        """Set this rank's weight, and a tied head's copy, to its share of Hugging Face's tensors."""
        for name in self.local_names(entry):
            share = self.share(entry, whole)
            self.parameters[name].copy_(share)
            for piece in self.pieces.get(name, ()):
                piece.master.copy_(piece.cut(share))

    @torch.no_grad()
    def fill_moment(self, entry: MegatronParameter, key: str, whole: Sequence[Tensor], step: int) -> None:
        """Set AdamW's `exp_avg` or `exp_avg_sq` after `step` steps to this rank's share of Hugging Face's tensors."""
        assert self.optimizer is not None
        for name in self.local_names(entry):
            for piece in self.pieces.get(name, ()):
                state = self.optimizer.state[piece.master]
                state["step"] = torch.tensor(float(step), device=piece.master.device)
                state[key] = piece.cut(self.share(entry, whole)).to(piece.master).clone()

    @torch.no_grad()
    def fill_average(self, entry: MegatronParameter, whole: Sequence[Tensor]) -> None:
        """Set the average of this rank's weight, and of a tied head's copy, to its share of Hugging Face's tensors."""
        for name in self.local_names(entry):
            for piece in self.pieces.get(name, ()):
                self.averages.values[piece.master] = piece.cut(self.share(entry, whole)).to(piece.master).clone()

    def step(self, settings: OptimizerSettings) -> None:
        """Take one AdamW step over this rank's pieces with these settings, from their summed gradients."""
        assert self.optimizer is not None
        use_settings(self.optimizer, settings)
        pieces = self.list_pieces()
        for piece in pieces:
            piece.master.grad = piece.gradient
        self.optimizer.step()
        self.averages.update(piece.master for piece in pieces)
        for piece in pieces:
            piece.master.grad = None
            piece.publish()

    def local_names(self, entry: MegatronParameter) -> tuple[str, ...]:
        """Return the names under which this rank holds the entry: its own, and that of a tied head's copy, as far as they exist here."""
        tied = all(entry.name != HEAD for entry in self.entries)
        names = (entry.name, HEAD) if entry.name == EMBEDDING and tied else (entry.name,)
        return tuple(name for name in names if name in self.parameters)

    def share(self, entry: MegatronParameter, whole: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of Hugging Face's tensors, contiguous."""
        group = _ranks_of(entry)
        return entry.division.split(whole, group.size(), group.rank()).contiguous()

    def whole(self, entry: MegatronParameter, values: Callable[[Piece], Tensor] | None) -> list[Tensor] | None:
        """Return Hugging Face's tensors with the values that `values` gives each piece, or None if this rank's stage lacks the entry.

        Without `values` they are the parameters that compute, into which masters are rounded: nothing goes over replicas. What is frozen has
        the values of its weights. All ranks of the stage must call it.
        """
        if entry.name not in self.parameters:
            return None
        if entry.buffer:
            return entry.division.join([self.parameters[entry.name].detach()])
        share = self.parameters[entry.name].detach().contiguous() if values is None else self._share_of(entry.name, values)
        if not entry.divided:
            return entry.division.join([share])
        group = _ranks_of(entry)
        shares = [torch.empty_like(share) for _ in range(group.size())]
        dist.all_gather(shares, share, group=group)
        return entry.division.join(shares)

    def _share_of(self, name: str, values: Callable[[Piece], Tensor]) -> Tensor:
        """Return this rank's share in `dtype`, joined from the pieces of the ranks that have the same one."""
        parameter, pieces = self.parameters[name], self.pieces.get(name, [])
        if not self._has_masters or not parameter.requires_grad:
            return parameter.detach().to(self.dtype).contiguous()
        if not self.sharded and name not in self._frozen_ranges and len(pieces) == 1:
            return values(pieces[0]).detach().reshape(parameter.shape).contiguous()
        flat = torch.zeros(parameter.numel(), dtype=self.dtype, device=parameter.device)
        for piece in pieces:
            flat[piece.start : piece.stop] = values(piece).detach().reshape(-1)
        if self.sharded:
            if is_spread(parameter):
                dist.all_reduce(flat, group=parallel_state.get_expert_data_parallel_group())
            else:
                dist.all_reduce(flat, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        for start, stop in self._frozen_ranges.get(name, ()):
            flat[start:stop] = parameter.detach().view(-1)[start:stop]
        return flat.view(parameter.shape)

    def everywhere(
        self,
        values: Callable[[Piece], Tensor] | None,
        *,
        kind: Literal["parameters", "learned", "buffers"] = "parameters",
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face's names and tensors with the values that `values` gives each piece, one at a time, on every rank's CPU.

        `values` are as of `whole`, `dtype` (None: that of whole tensors) is what they are rounded to. `kind` chooses all parameters, those that
        are not frozen, or buffers.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        dtype = torch.promote_types(self.dtype, torch.float32) if kind == "buffers" else dtype or self.dtype
        device = next(iter(self.parameters.values())).device
        for entry in self.entries:
            chosen = entry.trainable_names if kind == "learned" else entry.names
            if entry.buffer != (kind == "buffers") or not chosen:
                continue
            tensors = self.whole(entry, values)
            for place, (name, shape) in enumerate(entry.sources):
                if name not in chosen:
                    continue
                tensor = None if tensors is None else tensors[place].to(dtype).contiguous()
                if dist.get_world_size(group) > 1:
                    if tensor is None:
                        tensor = torch.empty(shape, dtype=dtype, device=device)
                    dist.broadcast(tensor, dist.get_global_rank(group, entry.stage), group=group)
                assert tensor is not None
                # copied, because on a CPU rank it may be the weight or the gradient itself
                yield name, tensor.to("cpu", copy=True)


def _ranks_of(entry: MegatronParameter) -> dist.ProcessGroup:
    """Return the group of the ranks that have different shares of an entry."""
    group: dist.ProcessGroup
    group = parallel_state.get_expert_model_parallel_group() if entry.spread else parallel_state.get_tensor_model_parallel_group()
    return group
