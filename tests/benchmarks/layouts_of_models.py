"""The layouts that `skyrl-engine plan --fit` searches, for models that are trained often on machines that are used often.

    python tests/benchmarks/layouts_of_models.py docs/reference/layouts.md

No weight is needed: `models_to_train.toml` has the shapes of models, with their sources. It takes some minutes.
"""

import json
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl_engine.config import SelectedPlugin, from_dict, resolve
from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.contracts import LoraConfig, ModelConfig
from skyrl_engine.engine.layout_search import FREE_SHARE, ProposedLayout, StepSize, search_layouts
from skyrl_engine.engine.model_shape import read_model_shape
from skyrl_engine.model_facts.parameter_shapes import count_numbers
from skyrl_engine.model_facts.rank_memory import ModelShape
from skyrl_engine.registry.known import list_first_party

MODELS = Path(__file__).with_name("models_to_train.toml")
GIB = 2**30
STEP = StepSize(tokens=64 * 4096, longest=4096)


@frozen
class Machine:
    """Devices of `gib` GiB each; `lora` is the rank of adapters, None where the whole model is trained."""

    ranks: int
    gib: int
    lora: int | None = None

    def __str__(self) -> str:
        return f"{self.ranks} × {self.gib} GiB" + (f", LoRA of rank {self.lora}" if self.lora else "")


SIZES = {
    "backend.tensor_parallel": "tp",
    "backend.pipeline_parallel": "pp",
    "backend.context_parallel": "cp",
    "backend.expert_parallel": "ep",
}
MACHINES = (Machine(1, 24, lora=16), Machine(1, 80, lora=16), Machine(8, 80), Machine(32, 80))

INTRODUCTION = """\
# Which layout for which model on which machine

The best layout that [`skyrl-engine plan --fit`](../how-to/plan-a-run.md#find-a-layout-that-fits) finds for a supervised step of 64 samples of
4,096 tokens, trained in bfloat16 with AdamW: the backend, its sizes, and the tensors that a GPU holds. A tenth of every GPU stays free.
"recomputes" is `model.activation_checkpointing = true`, "offloads" the option that keeps optimizer state in host memory, and "stage" ZeRO's;
"misses" is what the layout that needs least takes beyond nine tenths of a GPU. Among layouts that fit and compute equally little, the one that
sends least comes first, so that a machine with a fast network may do as well with another one, such as fsdp: `--fit` lists five.

They are computed, not measured: `python tests/benchmarks/layouts_of_models.py docs/reference/layouts.md` makes this page from the shapes in
`tests/benchmarks/models_to_train.toml`, which name their sources. Other data and optimizers take more or less: run `plan --fit` on your file.
"""


def list_models() -> list[dict[str, Any]]:
    """Return the models of the file: name, source, date and configuration."""
    models: list[dict[str, Any]] = tomllib.loads(MODELS.read_text())["models"]
    return models


def make_row(model: dict[str, Any], machines: Sequence[Machine] = MACHINES) -> list[str]:
    """Return the cells of a model: its name, its parameters, and a layout per machine."""
    table = {"backend": {"use": "fsdp"}, "model": {"path": "none"}, "data": {"train": "none"}}
    registry = resolve(from_dict(table, "the page"), need=()).registry
    records = [record for record in registry.records("backend") if record.name in list_first_party("backend")]
    backends = [SelectedPlugin.of(record, {}, "the page") for record in records]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model["config"]))
        shapes = {rank: _read_shape(folder, rank) for rank in {machine.lora for machine in machines}}
    cells = []
    for machine in machines:
        shape, memory = shapes[machine.lora], machine.gib * GIB
        found = search_layouts(shape, backends, machine.ranks, STEP, optimizer=OptimizerConfig(), table="training", memory=memory)
        cells.append(describe(found[0], int(memory * (1 - FREE_SHARE))))
    rank, shape = next(iter(shapes.items()))
    count = count_numbers(each for each in shape.parameters if not each.is_trained or rank is None)
    return [model["name"], f"{count / 1e9:.2f} G", *cells]


def _read_shape(folder: str, rank: int | None) -> ModelShape:
    shape = read_model_shape(ModelConfig(folder, dtype="bfloat16", lora=None if rank is None else LoraConfig(rank)))
    assert shape is not None, "the model can be made"
    return shape


def describe(layout: ProposedLayout, room: int) -> str:
    """Say in words what a layout is, and what it takes."""
    if layout.memory.total > room:
        return f"misses {(layout.memory.total - room) / GIB:,.1f} GiB"
    keys = layout.keys
    words = [keys["backend.use"]]
    words += [f"{name} {keys[key]}" for key, name in SIZES.items() if keys.get(key, 1) > 1]
    if (stage := keys.get("backend.zero_stage")) is not None:
        words.append(f"stage {stage}")
    if keys["model.activation_checkpointing"]:
        words.append("recomputes")
    if layout.offloads:
        words.append("offloads")
    return f"{', '.join(words)}: {layout.memory.total / GIB:,.0f} GiB"


def make_page() -> str:
    """Return the page."""
    lines = [INTRODUCTION, f"| model | parameters | {' | '.join(map(str, MACHINES))} |", f"|---|--:{'|---' * len(MACHINES)}|"]
    for model in list_models():
        print(model["name"], file=sys.stderr)
        lines.append(f"| {' | '.join(make_row(model))} |")
    lines += ["", "## Sources of the shapes", "", "| model | source | date |", "|---|---|---|"]
    lines += [f"| {model['name']} | {model['source']} | {model['date']} |" for model in list_models()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_page())
