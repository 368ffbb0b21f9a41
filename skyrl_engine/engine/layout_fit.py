"""Layouts that fit the devices of a run: the best of those that the arithmetic finds, each of which is planned as a run would be."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import frozen

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.config.automatic import find_sizes
from skyrl_engine.engine.layout_search import FREE_SHARE, ProposedLayout, StepSize, search_layouts
from skyrl_engine.engine.memory_plan import MemoryPlan
from skyrl_engine.errors import ConfigError, EngineError, Problem
from skyrl_engine.model_facts.memory import format_bytes
from skyrl_engine.registry.known import list_first_party

MOST_FOUND: Final = 5
_TRIED: Final = 20
_REFUSED: Final = 20
_MISSING: Final = 3

Replan = Callable[[ProposedLayout], MemoryPlan | None]
"""Plan the run with the keys of a layout. Raises EngineError for one that the run refuses."""


@frozen
class PlannedLayout:
    """A layout that a run takes, and its plan."""

    layout: ProposedLayout
    plan: MemoryPlan

    def to_values(self) -> dict[str, Any]:
        return {"keys": dict(self.layout.keys), "work": self.layout.work, "memory": self.plan.to_values()}


def fit_layouts(resolved: ResolvedConfig, plan: MemoryPlan, replan: Replan, *, of_backend: bool = False) -> list[PlannedLayout]:
    """Return up to `MOST_FOUND` layouts of the planned step that fit its devices, best first, each as `replan` plans it.

    Compared are those of the configured backend with its options, and of first-party backends that are installed; with `of_backend` of the
    configured one alone. `plan` knows the memory of its devices. Raises ConfigError where none fits, which says what misses least.
    """
    assert plan.device_bytes is not None, "the memory of devices is known"
    config = resolved.config
    layouts = search_layouts(
        plan.shape,
        [resolved.plugins["backend"], *([] if of_backend else _list_other_backends(resolved))],
        config.run.ranks,
        StepSize(plan.step.tokens, plan.step.longest),
        optimizer=config.optimizer,
        table=find_sizes(resolved)[0],
        beside=plan.beside,
        memory=plan.device_bytes,
    )
    room = int(plan.device_bytes * (1 - FREE_SHARE))
    found: list[PlannedLayout] = []
    least: tuple[int, ProposedLayout] | None = None
    refusals, tried = list[str](), 0
    fitting = [each for each in layouts if each.memory.total <= room]
    # the arithmetic knows no micro-batches of real samples, so that those that miss by little are tried too
    for layout in [*fitting, *layouts[len(fitting) :][:_MISSING]]:
        if len(found) == MOST_FOUND or (found and layout.memory.total > room):
            break
        if layout.memory.total <= room and (tried == _TRIED or len(refusals) == _REFUSED):
            continue
        try:
            planned = replan(layout)
        except EngineError as error:
            refusals.append(error.cause)
            continue
        tried += 1
        if planned is None:
            continue
        if planned.most.total <= room:
            found.append(PlannedLayout(layout, planned))
        elif least is None or planned.most.total < least[0]:
            least = planned.most.total, layout
    if found:
        return found
    devices = f"{config.run.ranks} ranks with {format_bytes(plan.device_bytes)} each, of which a tenth stays free"
    cause = f"holds no layout on {devices}"
    if least is not None:
        missed = f"{format_bytes(least[0] - room)} more than {format_bytes(room)}"
        cause += f"; {' '.join(least[1].list_overrides())} misses least and takes {missed}"
    elif refusals:
        cause += f"; those that would fit are refused: {refusals[-1]}"
    raise ConfigError([Problem("model", cause, "Give more ranks or memory, shorter samples (data.max_length), or model.lora.rank")])


def _list_other_backends(resolved: ResolvedConfig) -> Sequence[SelectedPlugin]:
    """Return the first-party backends that are installed and not configured, with the options that they have by default."""
    configured, known = resolved.plugins["backend"].loaded.record, list_first_party("backend")
    return [
        SelectedPlugin.of(record, {}, "--fit")
        for record in resolved.registry.records("backend")
        if record.name in known and record.name != configured.name
    ]
