"""Two tiny models of different families, random columns, and what a group of workers needs to know."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.optimizer_settings import AdamWSettings
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.workers.spec import WorkerSpec

VOCABULARY = 96


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of a tied Qwen3 and an untied Llama, two layers each."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "max_position_embeddings": 64}
    directory = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "llama"):
        write_model(directory / family, family, **sizes)
    return {family: directory / family for family in ("qwen3", "llama")}


@pytest.fixture(scope="session")
def columns() -> SampleColumns:
    """Eleven samples of 2 to 20 tokens; some tokens carry no loss, one sample carries none at all."""
    numbers = np.random.default_rng(3)
    lengths = numbers.integers(2, 21, 11)
    actions = np.maximum(1, lengths - numbers.integers(0, 8, 11))
    weight = (numbers.random(actions.sum()) < 0.8).astype(np.uint8)
    offsets = offsets_of(actions)
    weight[offsets[4] : offsets[5]] = 0
    return SampleColumns.create(
        input_ids=numbers.integers(0, VOCABULARY, lengths.sum()),
        token_offsets=offsets_of(lengths),
        action_offsets=offsets,
        loss_weight=weight,
    )


@pytest.fixture(scope="session")
def worker_spec() -> Callable[..., WorkerSpec]:
    """`worker_spec(model_directory, ranks)`: the default plugins, AdamW, one data-parallel dimension."""

    def make(model: Path, ranks: int, dtype: str = "float32") -> WorkerSpec:
        tables = {"model": {"path": str(model)}, "data": {"train": "unused.jsonl"}, "collator": {"use": "padded"}}
        resolved = resolve(from_dict(tables, "test"))
        return WorkerSpec(
            plugins={kind: resolved.plugins[kind].to_lock_entry() for kind in ("collator", "loss", "backend")},
            context=FactoryContext(seed=1),
            model=ModelConfig(str(model), dtype=dtype),
            optimizer=AdamWSettings(learning_rate=1e-3),
            topology=Topology(dp=ranks),
            device="cpu",
        )

    return make
