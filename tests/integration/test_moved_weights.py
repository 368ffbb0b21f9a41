"""Weights go from one backend to the next through the Hugging Face form: each trains what the one before has exported.

One rank each, float32. After every export the next backend, and transformers, give the log-probabilities that the exporting one gave. What
several ranks export is each backend's own test.
"""

from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from by_day import now

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts.kinds.backend import Backend, RankEnvironment
from skyrl_engine.contracts.kinds.optimizer_settings import AdamWSettings
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import PluginNotFoundError
from skyrl_engine.modeling.tiny import VOCABULARY, Family, write_model
from skyrl_engine.proof.ranks import CONTEXT
from skyrl_engine.testing.backends.batches import WeightedObjective, build_padded, definition, documents
from skyrl_engine.testing.ranks.world import alone

Scores = dict[int, npt.NDArray[np.float32]]

JOURNEY = ("fsdp", "megatron", "deepspeed", "fsdp")
ROUNDING = 1e-5
"""In nats: what other kernels make of the same weights. A step of AdamW here moves log-probabilities by more than a hundred times that."""


def start(name: str, directory: Path) -> Backend:
    try:
        chosen = resolve(from_dict({"backend": {"use": name}}, "test"), need=()).plugins["backend"]
    except PluginNotFoundError as error:
        pytest.skip(f"NOT PROVED HERE: {error.cause}")
    backend: Backend = chosen.make(CONTEXT)
    spec = AdamWSettings(learning_rate=1e-2)
    backend.setup(ModelConfig(str(directory)), spec, RankEnvironment(0, 1, "cpu", 0))
    return backend


def scores(backend: Backend) -> Scores:
    output = backend.forward(build_padded(documents(VOCABULARY), 4), WeightedObjective())
    return dict(zip(output.sample_ids.tolist(), output.fields["logprobs"], strict=True))


def measure_distance(one: Scores, other: Scores) -> float:
    """Documents without a scored token owe nothing."""
    assert {number for number, values in one.items() if len(values)} == {number for number, values in other.items() if len(values)}
    return max(float(np.abs(values - other[number]).max()) for number, values in one.items() if len(values))


@pytest.mark.parametrize("family", now(["qwen3", "llama"], "qwen3"))
def test_each_backend_goes_on_from_what_another_exported(tmp_path: Path, family: Family) -> None:
    directory = tmp_path / "start"
    write_model(directory, family)
    handed_over = definition(str(directory), documents(VOCABULARY)).logprobs
    with alone():
        for number, name in enumerate(JOURNEY):
            with closing(start(name, directory)) as backend:
                assert measure_distance(scores(backend), handed_over) <= ROUNDING, f"{name} loads other weights"
                backend.forward_backward(build_padded(documents(VOCABULARY), 4), WeightedObjective())
                backend.optim_step()
                reached = scores(backend)
                assert measure_distance(reached, handed_over) > 100 * ROUNDING
                directory = tmp_path / f"{number}-{name}"
                directory.mkdir()
                backend.export(directory)
            handed_over = definition(str(directory), documents(VOCABULARY)).logprobs
            assert measure_distance(reached, handed_over) <= ROUNDING, f"{name} exports other weights"
