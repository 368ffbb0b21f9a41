"""This rank's weights, gradients and optimizer state, sharded over data-parallel ranks or not, and gathered on request."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from skyrl_engine.contracts import OptimizerSettings
from skyrl_engine.modeling.optimizer import build_optimizer, use_settings
from skyrl_engine.modeling.weight_averages import WeightAverages
from skyrl_engine_megatron.library import DistributedDataParallel, parallel_state
from skyrl_engine_megatron.names import EMBEDDING, HEAD, MegatronParameter


@frozen(eq=False)
class Piece:
    """The part of one parameter that this rank updates: elements `start` to `stop` of the flattened parameter.

    `master` holds them in float32 (float64 for a float64 model): the parameter's own memory if it has that dtype, a copy under bfloat16.
    A piece of a matrix has one row, so that weight decay, which goes by the number of dimensions, treats it as a matrix.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    master: nn.Parameter

    @classmethod
    def of(cls, parameter: nn.Parameter, start: int, stop: int) -> "Piece":
        flat = parameter.detach().view(-1)[start:stop]
        values = flat.float() if flat.dtype == torch.bfloat16 else flat
        return cls(parameter, start, stop, nn.Parameter(values[None] if parameter.ndim >= 2 else values))

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


def whole_pieces(parameters: dict[str, nn.Parameter]) -> dict[str, Piece]:
    """Return every parameter as one piece."""
    return {name: Piece.of(parameter, 0, parameter.numel()) for name, parameter in parameters.items()}


def list_sharded_pieces(parameters: dict[str, nn.Parameter], models: Sequence[DistributedDataParallel]) -> dict[str, Piece]:
    """Return the pieces whose summed gradients megatron-core's reduce-scatter leaves on this rank; some parameters have none here."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    pieces = {}
    for model in models:
        for buffer in model.buffers:
            ranks, rank = buffer.data_parallel_world_size, buffer.data_parallel_group.rank()
            for parameter, (first, last, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                share = bucket.grad_data.numel() // ranks
                low = bucket.offset + rank * share
                start, stop = max(first, low) - first, min(last, low + share) - first
                if start < stop:
                    pieces[names[id(parameter)]] = Piece.of(parameter, start, stop)
    return pieces


class ShardedState:
    """The weights, gradients and AdamW moments of this rank, by the names of entries."""

    def __init__(
        self,
        entries: Sequence[MegatronParameter],
        parameters: dict[str, nn.Parameter],
        pieces: dict[str, Piece],
        *,
        sharded: bool,
        optimizer: OptimizerSettings | None,
    ) -> None:
        self.entries = entries
        self.parameters = parameters
        self.pieces = pieces
        self.sharded = sharded
        self.averages = WeightAverages(None if optimizer is None else optimizer.ema_decay)
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            self.optimizer = build_optimizer({name: piece.master for name, piece in pieces.items()}, optimizer)

    @torch.no_grad()
    def fill(self, entry: MegatronParameter, whole: Sequence[Tensor]) -> None:
        """Set this rank's weight, and a tied head's copy, to its share of Hugging Face's tensors."""
        for name in self.local_names(entry):
            share = self.share(entry, whole)
            self.parameters[name].copy_(share)
            if name in self.pieces:
                self.pieces[name].master.copy_(self.pieces[name].cut(share))

    @torch.no_grad()
    def fill_moment(self, entry: MegatronParameter, key: str, whole: Sequence[Tensor], step: int) -> None:
        """Set AdamW's `exp_avg` or `exp_avg_sq` after `step` steps to this rank's share of Hugging Face's tensors."""
        assert self.optimizer is not None
        for name in self.local_names(entry):
            if name in self.pieces:
                piece = self.pieces[name]
                state = self.optimizer.state[piece.master]
                state["step"] = torch.tensor(float(step), device=piece.master.device)
                state[key] = piece.cut(self.share(entry, whole)).to(piece.master).clone()

    @torch.no_grad()
    def fill_average(self, entry: MegatronParameter, whole: Sequence[Tensor]) -> None:
        """Set the average of this rank's weight, and of a tied head's copy, to its share of Hugging Face's tensors."""
        for name in self.local_names(entry):
            if name in self.pieces:
                piece = self.pieces[name]
                self.averages.values[piece.master] = piece.cut(self.share(entry, whole)).to(piece.master).clone()

    def step(self, settings: OptimizerSettings) -> None:
        """Take one AdamW step over this rank's pieces with these settings, from their summed gradients."""
        assert self.optimizer is not None
        use_settings(self.optimizer, settings)
        for piece in self.pieces.values():
            piece.master.grad = piece.gradient
        self.optimizer.step()
        self.averages.update(piece.master for piece in self.pieces.values())
        for piece in self.pieces.values():
            piece.master.grad = None
            piece.publish()

    def local_names(self, entry: MegatronParameter) -> tuple[str, ...]:
        """Return the names under which this rank holds the entry: its own, and that of a tied head's copy, as far as they exist here."""
        tied = all(entry.name != HEAD for entry in self.entries)
        names = (entry.name, HEAD) if entry.name == EMBEDDING and tied else (entry.name,)
        return tuple(name for name in names if name in self.parameters)

    def share(self, entry: MegatronParameter, whole: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of Hugging Face's tensors, contiguous."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return entry.division.split(whole, ranks, parallel_state.get_tensor_model_parallel_rank()).contiguous()

    def whole(self, entry: MegatronParameter, values: Callable[[Piece], Tensor]) -> list[Tensor] | None:
        """Return Hugging Face's tensors with the values that `values` gives each piece, or None if this rank's stage lacks the entry.

        All data- and tensor-parallel ranks of the stage must call it.
        """
        if entry.name not in self.parameters:
            return None
        share = self._share_of(entry.name, values)
        if not entry.divided:
            return entry.division.join([share])
        shares = [torch.empty_like(share) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
        dist.all_gather(shares, share, group=parallel_state.get_tensor_model_parallel_group())
        return entry.division.join(shares)

    def _share_of(self, name: str, values: Callable[[Piece], Tensor]) -> Tensor:
        """Return this rank's tensor-parallel share, joined from the pieces of data-parallel ranks."""
        parameter, piece = self.parameters[name], self.pieces.get(name)
        if not self.sharded:
            assert piece is not None
            return values(piece).detach().reshape(parameter.shape).contiguous()
        kind = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        flat = torch.zeros(parameter.numel(), dtype=kind, device=parameter.device)
        if piece is not None:
            flat[piece.start : piece.stop] = values(piece).detach().reshape(-1)
        dist.all_reduce(flat, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return flat.view(parameter.shape)

    def everywhere(self, values: Callable[[Piece], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face's names and tensors with the values that `values` gives each piece, one at a time, on every rank's CPU."""
        group = parallel_state.get_pipeline_model_parallel_group()
        for entry in self.entries:
            tensors = self.whole(entry, values)
            for place, (name, shape) in enumerate(entry.sources):
                tensor = None if tensors is None else tensors[place].contiguous()
                if dist.get_world_size(group) > 1:
                    if tensor is None:
                        example = next(iter(self.pieces.values())).master
                        tensor = torch.empty(shape, dtype=example.dtype, device=example.device)
                    dist.broadcast(tensor, dist.get_global_rank(group, entry.stage), group=group)
                assert tensor is not None
                # copied, because on a CPU rank it may be the weight or the gradient itself
                yield name, tensor.to("cpu", copy=True)
