"""Exact training state: every rank writes, by name, the parts of parameters that its optimizer owns.

Any ZeRO stage on any number of ranks can read it. Resuming is exact, random states included, on the number of ranks that wrote it.
No file is read in a way that could run code.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from skyrl_engine import CheckpointError
from skyrl_engine.contracts import RankCoords
from skyrl_engine.modeling import random_states
from skyrl_engine.modeling.host_copies import CopyTensor, copy_to_host
from skyrl_engine.modeling.unpickling import UNREADABLE, failure, load_pickled
from skyrl_engine.modeling.weight_averages import AVERAGE, WeightAverages, no_averages_error
from skyrl_engine_deepspeed.fragments import adopt_weights, flats, fragments, moments

_WEIGHT = "weight"
_MOMENTS = ("exp_avg", "exp_avg_sq")

logger = logging.getLogger(__name__)


@frozen(eq=False)
class ZeroState:
    """The state that a checkpoint holds: weights, trained `parameters` and `frozen` ones, buffers, moments, averages and random states.

    `engine` is None for a backend that scores with whole weights; an engine without an optimizer scores with divided weights. `coords` and
    `seed` are this run's.
    """

    engine: Any | None
    parameters: Mapping[str, nn.Parameter]
    frozen: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    averages: WeightAverages
    device: torch.device
    coords: RankCoords
    seed: int

    def save(self, directory: Path, steps_done: int) -> None:
        """Write this rank's part into `directory`. Raises CheckpointError."""
        self.stage(directory, steps_done, copy_to_host)()

    def stage(self, directory: Path, steps_done: int, copy: CopyTensor) -> Callable[[], Collection[str]]:
        """Copy this rank's part by `copy`, under names of its own; return what writes it into `directory`, which raises CheckpointError."""
        state = {
            "steps_done": steps_done,
            "updates": self._updates(),
            "world_size": dist.get_world_size(),
            "parameters": dict([*self._parts(copy), *self._frozen_parts(copy)]),
            "frozen": sorted(self.frozen),
            "buffers": {name: copy(f"buffer.{name}", buffer) for name, buffer in self.buffers.items()},
            "random": random_states.capture(self.device),
        }
        return partial(_write, directory, dist.get_rank(), state)

    def load(self, directory: Path) -> int:
        """Restore weights, moments and random states in place and return the number of optimizer steps taken.

        Any number of ranks may have written them. Random states belong to ranks: if another number wrote the checkpoint, they are seeded
        again from the run's seed, the step and the rank. A backend that only scores restores the weights alone. Raises CheckpointError on all
        ranks if one rank fails.
        """
        return self._load_together(partial(self._load, directory))

    def load_averages(self, directory: Path) -> None:
        """Restore the averages of weights in place of the weights. Raises CheckpointError on all ranks if one rank fails."""
        self._load_together(partial(self._load, directory, weight=AVERAGE))

    def _load_together(self, read: Callable[[], int]) -> int:
        steps_done, problem = 0, None
        try:
            steps_done = read()
        except CheckpointError as error:
            problem = error
        problems: list[CheckpointError | None] = [problem] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        for problem_of_rank in problems:
            if problem_of_rank is not None:
                raise problem_of_rank
        if self._learns:
            adopt_weights(self.engine, self.parameters)
        return steps_done

    def _load(self, directory: Path, weight: str = _WEIGHT) -> int:
        rank = dist.get_rank()
        try:
            saved = _Saved.read(directory)
            saved.refuse_other_parameters(
                directory, {name: _shape(each) for name, each in {**self.parameters, **self.frozen}.items()}
            )
            if self._learns:
                saved.refuse_other_frozen(directory, self.frozen)
            if weight == AVERAGE and not saved.has(AVERAGE):
                raise no_averages_error(directory)
            with torch.no_grad():
                self._fill(saved, weight)
            if self._learns:
                self._continue_random_states(directory, rank, saved)
            return int(saved.states[0]["steps_done"])
        except UNREADABLE as error:
            raise CheckpointError(
                f"rank {rank} cannot read the checkpoint in {directory}: {failure(error)}",
                remedy="Resume from an older checkpoint of the run",
            ) from error

    def _continue_random_states(self, directory: Path, rank: int, saved: "_Saved") -> None:
        if saved.world_size == dist.get_world_size():
            random_states.restore(saved.states[rank]["random"], self.device)
            return
        if rank == 0:
            logger.warning(
                "the checkpoint in %s is of %d ranks, this run has %d: weights and optimizer state go on, random states (dropout) start anew",
                directory,
                saved.world_size,
                dist.get_world_size(),
            )
        random_states.start_anew(self.seed, int(saved.states[0]["steps_done"]), self.coords)

    @property
    def _learns(self) -> bool:
        return self.engine is not None and self.engine.basic_optimizer is not None

    def _updates(self) -> int:
        """Return AdamW's own step counter, which its bias correction uses."""
        assert self.engine is not None, "a backend that only scores has no state to save"
        states = [moments(self.engine, flat) for flat in flats(self.engine)]
        return int(states[0]["step"]) if states and states[0] else 0

    def _parts(self, copy: CopyTensor) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.engine is None or (self.engine.zero_optimization_stage() == 0 and dist.get_rank() > 0):
            # replicated: rank 0's copy is enough
            return
        for name, own in fragments(self.engine, self.parameters):
            state = moments(self.engine, own.key)
            kept = {_WEIGHT: own.weight, **{name: own.within(state[name]) for name in _MOMENTS if name in state}}
            if own.key in self.averages.values:
                kept[AVERAGE] = own.within(self.averages.values[own.key])
            # copied: saving a view would write everything it is a view of
            parts = {kind: copy(f"{kind}.{name}", part) for kind, part in kept.items()}
            yield name, {"shape": tuple(_shape(self.parameters[name])), "start": own.start, **parts}

    def _frozen_parts(self, copy: CopyTensor) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield this rank's parts of frozen parameters; rank 0 writes those that every rank holds whole."""
        for name, parameter in self.frozen.items():
            start, part = _held_part(parameter)
            if dist.get_rank() == 0 or hasattr(parameter, "ds_tensor"):
                yield name, {"shape": tuple(_shape(parameter)), "start": start, _WEIGHT: copy(f"{_WEIGHT}.{name}", part)}

    def _fill(self, saved: "_Saved", weight: str) -> None:
        for name, buffer in self.buffers.items():
            buffer.copy_(saved.states[0]["buffers"][name])
        if self.engine is not None and self.engine.zero_optimization_stage() == 3:
            # gathered copies that DeepSpeed keeps between uses hold the old weights
            self.engine.empty_partition_cache()
        for name, parameter in self.frozen.items():
            saved.copy(name, _WEIGHT, *_held_part(parameter))
        if not self._learns:
            for name, parameter in self.parameters.items():
                saved.copy(name, weight, *_held_part(parameter))
            return
        assert self.engine is not None, "what learns has an engine"
        _prepare_moments(self.engine, int(saved.states[0]["updates"]))
        self.averages.clear()
        if self.averages.decay is not None and saved.has(AVERAGE):
            self.averages.update(flats(self.engine))
        for name, own in fragments(self.engine, self.parameters):
            saved.copy(name, weight, own.start, own.weight)
            state = moments(self.engine, own.key)
            for moment in _MOMENTS if state else ():
                saved.copy(name, moment, own.start, own.within(state[moment]))
            if own.key in self.averages.values:
                saved.copy(name, AVERAGE, own.start, own.within(self.averages.values[own.key]))


@frozen(eq=False)
class _Saved:
    """The files of all ranks, mapped into memory."""

    states: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, directory: Path) -> "_Saved":
        first = _read(directory, 0)
        return cls((first, *(_read(directory, rank) for rank in range(1, first["world_size"]))))

    @property
    def world_size(self) -> int:
        return len(self.states)

    def has(self, kind: str) -> bool:
        """Return True if the parts of parameters have values of this kind."""
        return any(kind in part for state in self.states for part in state["parameters"].values())

    def parts(self, name: str) -> list[dict[str, Any]]:
        return [state["parameters"][name] for state in self.states if name in state["parameters"]]

    def refuse_other_parameters(self, directory: Path, wanted: Mapping[str, torch.Size]) -> None:
        saved = {name for state in self.states for name in state["parameters"]}
        different = sorted(saved ^ wanted.keys())
        different += sorted(name for name in saved & wanted.keys() if self.parts(name)[0]["shape"] != tuple(wanted[name]))
        if different:
            raise CheckpointError(
                f"the checkpoint in {directory} is of another model: {different[0]} is not in both ({len(different)} such entries)",
                remedy="Resume with the model the run was started with",
            )

    def refuse_other_frozen(self, directory: Path, wanted: Collection[str]) -> None:
        """Raise CheckpointError where this run freezes other parameters: AdamW's count of steps is of all that are trained together."""
        if different := sorted(set(self.states[0].get("frozen", ())) ^ set(wanted)):
            raise CheckpointError(
                f"the checkpoint in {directory} is of a run with another model.freeze: {different[0]} is frozen in one of the two",
                remedy="Resume with its model.freeze, start a new run from its export, or use backend fsdp, which goes on with another",
            )

    def copy(self, name: str, kind: str, start: int, into: Tensor) -> None:
        """Fill `into` [size] with elements start, start + 1, ... of a flattened parameter. Raises ValueError if some were not saved."""
        stop, filled = start + into.numel(), 0
        for part in self.parts(name):
            values: Tensor = part[kind]
            first, last = max(start, part["start"]), min(stop, part["start"] + values.numel())
            if first < last:
                into[first - start : last - start].copy_(values[first - part["start"] : last - part["start"]])
                filled += last - first
        if filled != into.numel():
            raise ValueError(f"it holds {filled} of {into.numel()} elements of {name}")


def _prepare_moments(engine: Any, updates: int) -> None:
    """Give AdamW the state that it has after `updates` steps, with moments of zeros for the checkpoint to fill."""
    states = engine.basic_optimizer.state
    for flat in flats(engine):
        if not updates:
            states.pop(flat, None)
            continue
        state = states[flat]
        if not state:
            state.update({"step": torch.zeros((), dtype=torch.float32, device=flat.device)})
            state.update({name: torch.zeros_like(flat) for name in _MOMENTS})
        state["step"].fill_(updates)


def _held_part(parameter: Any) -> tuple[int, Tensor]:
    """Return what this rank holds of a parameter that no optimizer owns: its first element's place, and the elements; stage 3 divides it."""
    if not hasattr(parameter, "ds_tensor"):
        return 0, parameter.detach().view(-1)
    # DeepSpeed's attributes: this rank's part, and the number of elements of the whole; the last ranks' parts are padded
    own: Tensor = parameter.ds_tensor.detach()
    start = dist.get_rank() * own.numel()
    return start, own.view(-1).narrow(0, 0, max(0, min(own.numel(), parameter.ds_numel - start)))


def _shape(parameter: Any) -> torch.Size:
    """Return the shape of the whole parameter; stage 3 leaves it in DeepSpeed's attribute."""
    return getattr(parameter, "ds_shape", parameter.shape)  # type: ignore[no-any-return] # the attribute is untyped


def _write(directory: Path, rank: int, state: Mapping[str, Any]) -> list[str]:
    """Write a rank's part to the disk; return the name of its file. Raises CheckpointError."""
    file = _file(directory, rank)
    try:
        with file.open("wb") as opened:
            torch.save(state, opened)
            opened.flush()
            os.fsync(opened.fileno())
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"rank {rank} cannot write its part of the checkpoint to {directory}: {failure(error)}",
            remedy="Make room there or choose another run.directory",
        ) from error
    return [file.name]


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.pt"


def _read(directory: Path, rank: int) -> dict[str, Any]:
    return load_pickled(_file(directory, rank))  # type: ignore[no-any-return] # what `save` wrote
