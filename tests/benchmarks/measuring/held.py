"""Bytes of tensors that a rank holds at the highest point of its second training step, and those that are planned."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measuring.allocations import highest

from skyrl_engine.config import SelectedPlugin, from_dict, resolve
from skyrl_engine.contracts import AdamWSettings, FactoryContext, MicroBatch, ModelConfig, Ragged, RankEnvironment
from skyrl_engine.engine.model_shape import read_model_shape
from skyrl_engine.model_facts.rank_memory import RankWork, count_rank_memory
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.backends.batches import Document, WeightedObjective
from skyrl_engine.testing.backends.live_bytes import count_live_bytes
from skyrl_engine.testing.ranks.world import start_shared_world

BATCHES, ROWS, WIDTH = 3, 4, 128


def require_planned_bytes(
    backend: str,
    options: dict[str, Any],
    folder: Path,
    *,
    size: int,
    ranks: int = 2,
    family: str = "llama",
    layers: int = 4,
    sizes: Mapping[str, int] | None = None,
    stochastic_rounding: bool = False,
    **settings: Any,
) -> None:
    """Train a model of width `size` on so many ranks, and require that each holds what is planned, within 15 %.

    It is a Llama, or of another `family` of transformers with further `sizes`; `settings` are those of its `ModelConfig`. AdamW steps it, with
    `stochastic_rounding` without master weights.
    """
    model = ModelConfig(str(folder / "model"), **settings)
    write_model(
        folder / "model",
        family,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size // 4,
        vocab_size=16 * size,
        max_position_embeddings=WIDTH,
        **(sizes or {}),
    )
    shape = read_model_shape(model)
    assert shape is not None
    selected = _select(backend, options, model)
    description = selected.loaded.describe_backend(selected.options, ranks)
    optimizer = AdamWSettings(stochastic_rounding=stochastic_rounding)
    measured = start_shared_world(ranks).run(measure_step, backend, options, model, optimizer, str(folder))
    for rank, taken in enumerate(measured):
        stage = description.topology.coords(rank).pp
        work = RankWork(BATCHES, ROWS * WIDTH, ROWS * WIDTH)
        held = count_rank_memory(
            shape,
            description.describe_state(model),
            description.topology,
            work,
            optimizer=optimizer.use,
            stage=stage,
            stochastic_rounding=stochastic_rounding,
        )
        print(f"{backend} {options} {model.dtype}, width {size}, rank {rank}: planned {held.total:,}, measured {taken:,}")
        assert 0.85 < held.total / taken < 1.15, held.parts


def _select(backend: str, options: dict[str, Any], model: ModelConfig) -> SelectedPlugin:
    table = {"model": {"path": model.path}, "backend": {"use": backend, **options}, "data": {"train": "none"}}
    return resolve(from_dict(table, "test"), need=()).plugins["backend"]


def measure_step(backend: str, options: dict[str, Any], model: ModelConfig, optimizer: AdamWSettings, folder: str) -> int:
    """Train two steps of `BATCHES` micro-batches of `ROWS` x `WIDTH` tokens, and return the most bytes of this rank's tensors in the second."""
    before = count_live_bytes()
    selected = _select(backend, options, model)
    product: Any = selected.make(FactoryContext(0, 0, None))
    rank = dist.get_rank()
    product.setup(model, optimizer, RankEnvironment(rank, dist.get_world_size(), "cpu", 0, "padded"))
    # ranks that share a row get the same one
    generator = torch.Generator().manual_seed(product.coords.dp)
    batch = []
    for _ in range(BATCHES):
        ids = torch.randint(0, 128, (ROWS, WIDTH), generator=generator)
        tokens = ROWS * WIDTH
        lengths = Ragged.from_list([[WIDTH]] * ROWS, np.int64)
        whole = [Document(0, ids.flatten(), torch.ones(tokens))]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        batch.append(MicroBatch(inputs, torch.arange(tokens), ids.flatten().roll(-1), lengths, whole))

    objective = WeightedObjective(needs=("logprobs",), per_token_outputs=False)

    def step() -> None:
        product.forward_backward(batch, objective)
        product.optim_step()

    step()
    at_rest = count_live_bytes() - before
    most = at_rest + highest(step, Path(folder) / f"trace{rank}.json")
    product.close()
    return most
