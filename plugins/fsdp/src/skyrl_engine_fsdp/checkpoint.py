"""Training state through torch.distributed.checkpoint: every rank writes its shards, and its random states in a file of their own.

Any layout of ranks can read it. Resuming is exact, random states included, on the layout that wrote it. No file is read in a way that could
run code.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.checkpoint import api, state_dict_loader, state_dict_saver

from skyrl_engine import CheckpointError
from skyrl_engine.contracts import OptimizerSettings, Topology
from skyrl_engine.modeling import random_states
from skyrl_engine.modeling.host_copies import HostCopies
from skyrl_engine.modeling.optimizer import make_zero_state
from skyrl_engine.modeling.unpickling import UNREADABLE, failure, load_pickled
from skyrl_engine.modeling.weight_averages import AVERAGE, WeightAverages, no_averages_error
from skyrl_engine_fsdp.pieces import PiecesReader, PiecesWriter, list_written

logger = logging.getLogger(__name__)


@frozen(eq=False)
class ShardedTrainingState:
    """The state that a checkpoint holds, keyed by parameter names, so that nothing depends on the order of optimizer groups.

    `optimizer` and its `settings` are None for a backend that only scores, whose checkpoints hold weights alone. `topology` and `seed`
    are this run's.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer | None
    averages: WeightAverages
    settings: OptimizerSettings | None
    device: torch.device
    topology: Topology
    seed: int

    def _weights(self) -> dict[str, Any]:
        return {f"model.{name}": tensor.detach() for name, tensor in [*self.parameters.items(), *self.buffers.items()]}

    def _moments(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> dict[str, Any]:
        return {
            f"optimizer.{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in state.get(parameter, {}).items()
        }

    def _name_averages(self, values: Mapping[Tensor, Tensor]) -> dict[str, Any]:
        return {f"{AVERAGE}.{name}": values[parameter] for name, parameter in self.parameters.items() if parameter in values}

    def save(self, directory: Path, steps_done: int) -> None:
        """Write this rank's part into `directory`. Raises CheckpointError."""
        self._write(directory, self._collect(steps_done), random_states.capture(self.device), None)

    def stage(
        self, directory: Path, steps_done: int, copies: HostCopies, group: dist.ProcessGroup
    ) -> Callable[[], Collection[str]]:
        """Copy to host memory what `save` would write now; return what writes it, with collectives of `group` alone, which is gloo's."""
        tensors, random = copies.copy_all(self._collect(steps_done)), random_states.capture(self.device)
        copies.wait(self.device)
        return lambda: self._write(directory, tensors, random, group)

    def _collect(self, steps_done: int) -> dict[str, Any]:
        moments = {} if self.optimizer is None else self._moments(self.optimizer.state)
        facts = {"steps_done": torch.tensor(steps_done), "layout": self._layout()}
        return {**self._weights(), **moments, **self._name_averages(self.averages.values), **facts}

    def _write(
        self, directory: Path, tensors: dict[str, Any], random: dict[str, Any], group: dist.ProcessGroup | None
    ) -> list[str]:
        """Write tensors and random states with collectives of a group (None: the default one); return the names of this rank's files."""
        rank = dist.get_rank()
        try:
            state_dict_saver.save(tensors, storage_writer=PiecesWriter(directory), process_group=group)
            with _random_file(directory, rank).open("wb") as file:
                torch.save(random, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError, api.CheckpointException) as error:
            raise CheckpointError(
                f"rank {rank} cannot write its part of the checkpoint to {directory}: {_reason(error)}",
                remedy="Make room there or choose another run.directory",
            ) from error
        return [_random_file(directory, rank).name, *list_written(directory, rank)]

    def load(self, directory: Path) -> int:
        """Restore weights, moments and random states in place and return the number of optimizer steps taken.

        Weights and moments can be read on any layout of ranks. Random states belong to ranks: if another layout wrote the checkpoint, they
        are seeded again from the run's seed, the step and the data-parallel rank. A backend that only scores restores the weights alone.
        Raises CheckpointError.
        """
        rank = dist.get_rank()
        try:
            saved = PiecesReader(directory).read_metadata().state_dict_metadata
            state = self._make_zero_moments(saved)
            facts = {"steps_done": torch.tensor(0), "layout": self._make_zero_layout(saved)}
            averages = self._make_zero_averages(saved)
            wanted = {**self._weights(), **self._moments(state), **self._name_averages(averages)}
            _refuse_differences(directory, {*wanted, *facts}, self._leave_out_frozen(saved), moments=self.optimizer is not None)
            state_dict_loader.load(facts, storage_reader=PiecesReader(directory))
            if int(facts["steps_done"]):
                self._refuse_no_moments(directory, saved)
            state_dict_loader.load(wanted, storage_reader=PiecesReader(directory))
            if self.optimizer is not None:
                self.optimizer.state.clear()
                self.optimizer.state.update(state)
                self.averages.clear()
                self.averages.values.update(averages)
                self.averages.began = bool(averages)
                self._continue_random_states(directory, rank, facts["layout"], int(facts["steps_done"]))
        except (*UNREADABLE, api.CheckpointException) as error:
            raise _unreadable_error(directory, error) from error
        return int(facts["steps_done"])

    def load_averages(self, directory: Path) -> None:
        """Restore in place the averages of the weights that have one, and the weights that have none. Raises CheckpointError."""
        try:
            saved = PiecesReader(directory).read_metadata().state_dict_metadata
            named = {name: f"{AVERAGE}.{name.removeprefix('model.')}" for name in self._weights()}
            if not any(average in saved for average in named.values()):
                raise no_averages_error(directory)
            wanted = {named[name] if named[name] in saved else name: tensor for name, tensor in self._weights().items()}
            _refuse_differences(directory, {*self._weights(), "steps_done", "layout"}, set(saved), moments=False)
            state_dict_loader.load(wanted, storage_reader=PiecesReader(directory))
        except (*UNREADABLE, api.CheckpointException) as error:
            raise _unreadable_error(directory, error) from error

    def _layout(self) -> Tensor:
        """Return the sizes that random states depend on, int64[3]: data-parallel, tensor-parallel and context-parallel ranks."""
        return torch.tensor([self.topology.dp, self.topology.tp, self.topology.cp])

    def _make_zero_layout(self, saved: Mapping[str, Any]) -> Tensor:
        """Return zeros in the place of the sizes of the layout that wrote a checkpoint; older ones had no context-parallel ranks."""
        return torch.zeros(getattr(saved.get("layout"), "size", self._layout().shape), dtype=torch.int64)

    def _continue_random_states(self, directory: Path, rank: int, layout: Tensor, steps_done: int) -> None:
        layout = nn.functional.pad(layout, (0, len(self._layout()) - len(layout)), value=1)
        if torch.equal(layout, self._layout()):
            random_states.restore(load_pickled(_random_file(directory, rank)), self.device)
            return
        if rank == 0:
            logger.warning(
                "the checkpoint in %s is of %d data-parallel x %d tensor-parallel x %d context-parallel ranks, this run has %d x %d x %d: "
                "weights and optimizer state go on, random states (dropout) start anew",
                directory,
                *layout.tolist(),
                *self._layout().tolist(),
            )
        random_states.start_anew(self.seed, steps_done, self.topology.coords(rank))

    def _refuse_no_moments(self, directory: Path, saved: Collection[str]) -> None:
        """Raise CheckpointError where the optimizer keeps moments, and a checkpoint that was made after a step has none."""
        if self.settings is None or any(key.startswith("optimizer.") for key in saved):
            return
        if any(make_zero_state(self.settings, name, parameter) for name, parameter in self.parameters.items()):
            raise _other_optimizer_error(directory, f"{self.settings.use} keeps moments, and it holds none")

    def _leave_out_frozen(self, saved: Collection[str]) -> set[str]:
        """Return the saved keys without moments of parameters that this run freezes."""
        frozen_moments = tuple(f"optimizer.{name}." for name, parameter in self.parameters.items() if not parameter.requires_grad)
        return {key for key in saved if not key.startswith(frozen_moments)}

    def _make_zero_averages(self, saved: Collection[str]) -> dict[Tensor, Tensor]:
        """Return zeros in the place of the averages that a checkpoint has, where this run keeps any, for loading to fill."""
        if self.averages.decay is None:
            return {}
        return {
            parameter: torch.zeros_like(parameter)
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and f"{AVERAGE}.{name}" in saved
        }

    def _make_zero_moments(self, saved: Collection[str]) -> dict[Tensor, dict[str, Tensor]]:
        """Return zeros in the place of what the optimizer keeps of every parameter that the checkpoint has moments of, for loading to fill."""
        if self.settings is None:
            return {}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            zeros = make_zero_state(self.settings, name, parameter)
            if any(f"optimizer.{name}.{key}" in saved for key in zeros):
                state[parameter] = zeros
        return state


def _refuse_differences(directory: Path, wanted: set[str], saved: set[str], *, moments: bool) -> None:
    left_out = (f"{AVERAGE}.",) if moments else (f"{AVERAGE}.", "optimizer.")
    wanted, compared = ({key for key in keys if not key.startswith(left_out)} for keys in (wanted, saved))
    different = sorted(wanted ^ compared)
    if different and all(key.startswith("optimizer.") for key in different):
        raise _other_optimizer_error(directory, f"{different[0]} is not in both ({len(different)} such entries)")
    if different:
        raise CheckpointError(
            f"the checkpoint in {directory} is of another model: {different[0]} is not in both ({len(different)} such entries)",
            remedy="Resume with the model the run was started with",
        )


def _unreadable_error(directory: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"rank {dist.get_rank()} cannot read the checkpoint in {directory}: {_reason(error)}",
        remedy="Resume from an older checkpoint of the run",
    )


def _other_optimizer_error(directory: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint in {directory} is of another optimizer: {reason}",
        remedy="Set optimizer.use to that of the run that wrote it",
    )


def _random_file(directory: Path, rank: int) -> Path:
    return directory / f"random-{rank}.pt"


def _reason(error: BaseException) -> str:
    """Return the first underlying cause in a few words; torch's exception wraps the causes of all ranks, with their tracebacks."""
    if isinstance(error, api.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return failure(error)
