"""Training state as whole tensors under Hugging Face's names, one file per part of the model, so that any layout of ranks can continue it.

The ranks of a pipeline stage write its parts in turns, one by one, and so none holds more than one; of what is staged, each holds those that it
writes. No random states are saved,
because nothing draws from them: the models that are built have no dropout, that of adapters is a function of seed, steps and tokens, and losses
have generators of their own. The files are JSON and safetensors, which hold no code.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from skyrl_engine import CheckpointError
from skyrl_engine.contracts import RankCoords, Topology
from skyrl_engine.modeling.host_copies import CopyTensor, copy_to_host
from skyrl_engine.modeling.weight_averages import AVERAGE, no_averages_error
from skyrl_engine_megatron.names import MegatronParameter
from skyrl_engine_megatron.state import Piece, ShardedState
from skyrl_engine_megatron.state_layout import count_writers

_FACTS: Final = "training.json"
_WEIGHT: Final = "model"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def save(state: ShardedState, directory: Path, topology: Topology, coords: RankCoords, steps_done: int) -> None:
    """Write this rank's parts into `directory`, one after the other; every rank takes part. Raises CheckpointError."""
    with _say_what_cannot_be_written(directory, coords):
        for part, tensors in _collect_parts(state, topology, coords, copy_to_host):
            _write_part(directory, part, tensors)
        if coords.rank == 0:
            _write_facts(directory, _collect_facts(state, steps_done))


def stage(
    state: ShardedState, directory: Path, topology: Topology, coords: RankCoords, steps_done: int, copy: CopyTensor
) -> Callable[[], Collection[str]]:
    """Copy this rank's parts by `copy`; every rank takes part. Returns what writes them into `directory`, which raises CheckpointError."""
    parts = list(_collect_parts(state, topology, coords, copy))
    facts = _collect_facts(state, steps_done)

    def write() -> list[str]:
        with _say_what_cannot_be_written(directory, coords):
            written = [_write_part(directory, part, tensors) for part, tensors in parts]
            return [*written, _write_facts(directory, facts)] if coords.rank == 0 else written

    return write


@contextmanager
def _say_what_cannot_be_written(directory: Path, coords: RankCoords) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"rank {coords.rank} cannot write its part of the checkpoint to {directory}: {error}",
            remedy="Make room there or choose another run.directory",
        ) from error


def _collect_parts(
    state: ShardedState, topology: Topology, coords: RankCoords, copy: CopyTensor
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the parts that this rank writes, with copies of their tensors: the ranks of a stage take its parts in turns.

    All of them gather every part, and so none holds more than one besides those that it writes.
    """
    ranks, own = count_writers(topology), (coords.dp * topology.cp + coords.cp) * topology.tp + coords.tp
    held = [entry for entry in state.entries if entry.name in state.parameters]
    for number, (part, entries) in enumerate(groupby(held, key=lambda entry: entry.part)):
        writes = number % ranks == own
        tensors = _gather_part(state, list(entries), copy if writes else None)
        if tensors:
            yield part, tensors


def _gather_part(state: ShardedState, entries: Sequence[MegatronParameter], copy: CopyTensor | None) -> dict[str, Tensor]:
    """Gather the weights and moments of a part from all ranks of its stage; returned as copies by `copy`, and not at all without."""
    tensors: dict[str, Tensor] = {}
    kinds = (_WEIGHT, *(_MOMENTS if state.optimizer is not None else ()), *([AVERAGE] if state.averages.began else ()))
    for kind in kinds:
        for entry in entries:
            held = entry.names if kind == _WEIGHT else entry.trainable_names
            if not held:
                continue
            whole = state.whole(entry, partial(_value, state, kind))
            if whole is not None and copy is not None:
                for name, tensor in zip(entry.names, whole, strict=True):
                    if name in held:
                        tensors[f"{kind}.{name}"] = copy(f"{kind}.{name}", tensor)
    return tensors


def _write_part(directory: Path, part: str, tensors: dict[str, Tensor]) -> str:
    """Write a part to the disk; return the name of its file."""
    file = _file(directory, part)
    save_file(tensors, file)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return file.name


def _collect_facts(state: ShardedState, steps_done: int) -> dict[str, Any]:
    return {
        "steps_done": steps_done,
        "learns": state.optimizer is not None,
        "averages": state.averages.began,
        "shapes": _shapes(state.entries),
        "frozen": _list_frozen(state.entries),
    }


def _write_facts(directory: Path, facts: Mapping[str, Any]) -> str:
    (directory / _FACTS).write_text(json.dumps(facts))
    return _FACTS


def _value(state: ShardedState, kind: str, piece: Piece) -> Tensor:
    """Return the weight, its average or a moment of a piece; moments are 0 before the first step."""
    if kind == _WEIGHT:
        return piece.master
    if kind == AVERAGE:
        return state.averages.values[piece.master]
    assert state.optimizer is not None
    moments: Mapping[str, Tensor] = state.optimizer.state.get(piece.master, {})
    return moments[kind] if kind in moments else torch.zeros_like(piece.master)


def load(state: ShardedState, directory: Path, coords: RankCoords, *, weight: str = _WEIGHT) -> int:
    """Restore weights, moments and averages in place under any layout of ranks, and return the number of optimizer steps taken.

    A backend that only scores restores the weights alone, or by `weight` their averages in their place. Raises CheckpointError.
    """
    try:
        facts: dict[str, Any] = json.loads((directory / _FACTS).read_text())
        _refuse_another_model(directory, facts["shapes"], _shapes(state.entries))
        steps_done = int(facts["steps_done"])
        if state.optimizer is not None:
            if not facts["learns"]:
                raise CheckpointError(
                    f"the checkpoint in {directory} was written by a run that did not learn",
                    remedy="Resume from another checkpoint",
                )
            _refuse_other_frozen(directory, facts.get("frozen", ()), _list_frozen(state.entries))
            state.optimizer.state.clear()
        averaged = bool(facts.get("averages"))
        if weight == AVERAGE and not averaged:
            raise no_averages_error(directory)
        state.averages.clear()
        state.averages.began = averaged and state.averages.decay is not None
        for part, entries in groupby(state.entries, key=lambda entry: entry.part):
            own_entries = [entry for entry in entries if state.local_names(entry)]
            if own_entries:
                with safe_open(_file(directory, part), framework="pt") as file:
                    _restore(state, own_entries, file, steps_done, weight, frozenset(facts.get("frozen", ())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(
            f"rank {coords.rank} cannot read the checkpoint in {directory}: {str(error).rstrip('.')}",
            remedy="Resume from an older checkpoint of the run",
        ) from error
    return steps_done


def _restore(
    state: ShardedState, entries: Sequence[MegatronParameter], file: Any, steps_done: int, weight: str, frozen: frozenset[str]
) -> None:
    for entry in entries:

        def read_tensors(kind: str, entry: MegatronParameter = entry) -> list[Tensor]:
            """Read the tensors of a kind: of what is `frozen`, as of buffers, a checkpoint has the weights alone."""
            return [file.get_tensor(f"{_WEIGHT if entry.buffer or name in frozen else kind}.{name}") for name in entry.names]

        state.fill(entry, read_tensors(weight))
        if not entry.trainable_names:
            continue
        if state.averages.began:
            state.fill_average(entry, read_tensors(AVERAGE))
        if state.optimizer is not None and steps_done:
            for moment in _MOMENTS:
                state.fill_moment(entry, moment, read_tensors(moment), steps_done)


def _refuse_other_frozen(directory: Path, saved: Sequence[str], wanted: Sequence[str]) -> None:
    if different := sorted(set(saved) ^ set(wanted)):
        raise CheckpointError(
            f"the checkpoint in {directory} is of a run with another model.freeze: {different[0]} is frozen in one of the two",
            remedy="Resume with its model.freeze, start a new run from its export, or use backend fsdp, which goes on with another",
        )


def _list_frozen(entries: Sequence[MegatronParameter]) -> list[str]:
    return sorted(name for entry in entries for name in entry.frozen)


def _refuse_another_model(directory: Path, saved: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> None:
    different = sorted(name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name))
    if different:
        raise CheckpointError(
            f"the checkpoint in {directory} is of another model: {different[0]} is not the same in both ({len(different)} such weights)",
            remedy="Resume with the model the run was started with",
        )


def _shapes(entries: Sequence[MegatronParameter]) -> dict[str, list[int]]:
    return {name: list(shape) for entry in entries for name, shape in entry.sources}


def _file(directory: Path, part: str) -> Path:
    return directory / f"{part}.safetensors"
