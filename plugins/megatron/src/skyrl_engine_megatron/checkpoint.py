"""Training state as whole tensors under Hugging Face's names, one file per part of the model, so that any layout of ranks can continue it.

The first rank of each pipeline stage writes the parts of its stage one by one, and so never holds more than one. No random states are saved,
because nothing draws from them: the models that are built have no dropout, and losses have generators of their own. The files are JSON and
safetensors, which hold no code.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from skyrl_engine import CheckpointError
from skyrl_engine.contracts import RankCoords
from skyrl_engine.modeling.weight_averages import AVERAGE, no_averages_error
from skyrl_engine_megatron.names import MegatronParameter
from skyrl_engine_megatron.state import Piece, ShardedState

_FACTS: Final = "training.json"
_WEIGHT: Final = "model"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def save(state: ShardedState, directory: Path, coords: RankCoords, steps_done: int) -> None:
    """Write the parts of this rank's stage into `directory`; every rank takes part. Raises CheckpointError."""
    writes = coords.tp == coords.cp == coords.dp == 0
    try:
        for part, entries in groupby(state.entries, key=lambda entry: entry.part):
            tensors = _part(state, list(entries), keep=writes)
            if tensors and writes:
                save_file(tensors, _file(directory, part))
        if coords.rank == 0:
            facts: dict[str, Any] = {
                "steps_done": steps_done,
                "learns": state.optimizer is not None,
                "averages": state.averages.began,
                "shapes": _shapes(state.entries),
            }
            (directory / _FACTS).write_text(json.dumps(facts))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"rank {coords.rank} cannot write its part of the checkpoint to {directory}: {error}",
            remedy="Make room there or choose another run.directory",
        ) from error


def _part(state: ShardedState, entries: Sequence[MegatronParameter], *, keep: bool) -> dict[str, Tensor]:
    """Gather the weights and moments of a part from all ranks of its stage; returned on the CPU of the ranks that `keep` them."""
    tensors: dict[str, Tensor] = {}
    kinds = (_WEIGHT, *(_MOMENTS if state.optimizer is not None else ()), *([AVERAGE] if state.averages.began else ()))
    for kind in kinds:
        for entry in entries:
            whole = state.whole(entry, partial(_value, state, kind))
            if whole is not None and keep:
                for (name, _), tensor in zip(entry.sources, whole, strict=True):
                    tensors[f"{kind}.{name}"] = tensor.contiguous().cpu()
    return tensors


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
                    _restore(state, own_entries, file, steps_done, weight)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(
            f"rank {coords.rank} cannot read the checkpoint in {directory}: {str(error).rstrip('.')}",
            remedy="Resume from an older checkpoint of the run",
        ) from error
    return steps_done


def _restore(state: ShardedState, entries: Sequence[MegatronParameter], file: Any, steps_done: int, weight: str) -> None:
    for entry in entries:

        def read_tensors(kind: str, entry: MegatronParameter = entry) -> list[Tensor]:
            return [file.get_tensor(f"{kind}.{name}") for name, _ in entry.sources]

        state.fill(entry, read_tensors(weight))
        if state.averages.began:
            state.fill_average(entry, read_tensors(AVERAGE))
        if state.optimizer is not None and steps_done:
            for moment in _MOMENTS:
                state.fill_moment(entry, moment, read_tensors(moment), steps_done)


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
