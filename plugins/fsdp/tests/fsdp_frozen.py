"""Tasks of ranks about models that nothing trains: importable by name, because ranks are spawned."""

from pathlib import Path

import torch
import torch.distributed as dist
from attrs import frozen
from fsdp_tasks import own_rows, start

from skyrl_engine.contracts import ModelConfig, RankEnvironment
from skyrl_engine.testing.backends.batches import Arrays, WeightedObjective, build_padded, documents
from skyrl_engine_fsdp.backend import FsdpBackend
from skyrl_engine_fsdp.gradients import local
from skyrl_engine_fsdp.options import FsdpConfig


@frozen
class FrozenScores:
    """Log-probabilities of this rank's documents by the trained model, by a frozen one of the same files, and by one of its export; the
    dtypes and the bytes of the frozen one's weights on this rank. Then the same of a step later, of which the frozen one loads the checkpoint.
    """

    trained: Arrays
    frozen: Arrays
    exported: Arrays
    dtypes: frozenset[torch.dtype]
    held_bytes: int
    stepped: Arrays
    loaded: Arrays


def score_frozen(directory: str, folder: Path, options: FsdpConfig, dtype: str) -> FrozenScores:
    def score(backend: FsdpBackend) -> Arrays:
        output = backend.forward(build_padded(own_rows(documents(), backend), 2), WeightedObjective())
        return {name: ragged.values.copy() for name, ragged in output.fields.items()}

    def start_frozen(path: str) -> FsdpBackend:
        backend = FsdpBackend(options)
        backend.setup(ModelConfig(path, dtype=dtype), None, RankEnvironment(dist.get_rank(), dist.get_world_size(), "cpu", 0))
        return backend

    trained, model = start(directory, options=options, dtype=dtype), start_frozen(directory)
    first, of_frozen = score(trained), score(model)
    trained.export(folder / "export")
    dist.barrier()
    exported = start_frozen(str(folder / "export"))
    of_export = score(exported)
    exported.close()
    weights = list(model._model.parameters())
    trained.forward_backward(build_padded(own_rows(documents(), trained), 2), WeightedObjective())
    trained.optim_step()
    trained.save(folder / "checkpoint")
    dist.barrier()
    model.load(folder / "checkpoint")
    result = FrozenScores(
        first,
        of_frozen,
        of_export,
        frozenset(weight.dtype for weight in weights),
        sum(local(weight).untyped_storage().nbytes() for weight in weights),
        score(trained),
        score(model),
    )
    trained.export(folder / "of trained")
    model.export(folder / "of loaded")
    model.close()
    trained.close()
    return result
