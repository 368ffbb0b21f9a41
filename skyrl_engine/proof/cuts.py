"""A proof from its start to its end: a tiny model is written, ranks are started, and every cut of a batch is compared with its definition."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from skyrl_engine.config import ResolvedConfig, SelectedPlugin, resolve
from skyrl_engine.config.reading.sources import from_dict
from skyrl_engine.contracts.kinds.needs import asks_a_teacher
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.proof.cases import Case, cases
from skyrl_engine.proof.plants import Plant
from skyrl_engine.proof.prover import CaseResult, Prover
from skyrl_engine.proof.ranks import CONTEXT, RankPool
from skyrl_engine.scratch import scratch_folder

STANDARD = ("padded", "packed", "tree")
"""Collators that are proved without being asked for, where the backend supports their rows."""


def prove_cuts(
    resolved: Mapping[str, ResolvedConfig], plant: Plant | None, ranks: int, family: str, *, only: Sequence[Case] | None = None
) -> Iterator[CaseResult]:
    """Yield the verdict on every cut, each when it is done.

    `resolved` has one configuration per collator, alike in all else; `family` is "qwen3" or "llama". `only` are the cuts that are tried, None:
    all that layouts, backend and `ranks` have.
    """
    plugins = next(iter(resolved.values())).plugins
    scores = ObjectiveParts.make(plugins, CONTEXT).scores
    value_head = "values" in scores
    with scratch_folder("prove") as folder:
        directory = str(folder)
        write_model(folder, "llama" if family == "llama" else "qwen3", value_head=value_head)
        model = ModelConfig(directory, value_head=value_head)
        teacher = None
        if asks_a_teacher(scores):
            teacher = ModelConfig(f"{directory}/teacher")
            write_model(Path(teacher.path), "qwen3" if family == "llama" else "llama")
            make_parts_differ(Path(teacher.path))
        alone = plugins["backend"].on_one_rank()
        with RankPool(model, plugins, alone=alone, reference=_choose_backend("fsdp"), teacher=teacher) as pool:
            yield from Prover(resolved, pool, plant).rows(_list_cases(resolved, ranks) if only is None else only)


def _list_cases(resolved: Mapping[str, ResolvedConfig], ranks: int) -> Sequence[Case]:
    layouts = {name: config.plugins["collator"].make(CONTEXT).rows for name, config in resolved.items()}
    backend = next(iter(resolved.values())).plugins["backend"]
    declared = backend.loaded.describe_backend(backend.options, ranks).capabilities
    padding = [name for name, rows in layouts.items() if rows == "padded"]
    packing = [name for name, rows in layouts.items() if rows != "padded" and (rows in declared or name not in STANDARD)]
    return list(cases(padding, packing, ranks))


def _choose_backend(reference: str) -> SelectedPlugin:
    return resolve(from_dict({"backend": {"use": reference}}, "prove"), need=()).plugins["backend"]
