"""Ranks that a proof runs on: started when the first pass asks for them, kept for all others, ended with the context."""

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import attrs
from attrs import define

from skyrl_engine.cleanup import close_after
from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.needs import TEACHER_MODEL
from skyrl_engine.contracts.kinds.optimizer_settings import AdamWSettings
from skyrl_engine.contracts.values.model import ComputeDtype, ModelConfig
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.modeling.tiny import PAD_TOKEN_ID
from skyrl_engine.proof.rollouts import LONGEST
from skyrl_engine.workers.launch import WorkerGroup, launch_workers
from skyrl_engine.workers.spec import WorkerSpec

CONTEXT = FactoryContext(seed=0, pad_token_id=PAD_TOKEN_ID, max_sequence_length=LONGEST)


@define(eq=False)
class RankPool:
    """Groups of ranks with one model. `plugins` are those of any run: every pass chooses its own collator and objective.

    `alone` is the backend for a single rank where the one in `plugins` divides the world, `reference` the one of float64 passes; None: the
    backend in `plugins`. `teacher` is the frozen model that losses compare with, None where none does. `rows` as in `RankEnvironment`;
    `shown` are model scores that outputs hold in addition to those that the losses read.
    """

    model: ModelConfig
    plugins: Mapping[str, SelectedPlugin]
    alone: SelectedPlugin | None = None
    reference: SelectedPlugin | None = None
    context: FactoryContext = CONTEXT
    rows: RowKind = "packed"
    shown: frozenset[str] = frozenset()
    teacher: ModelConfig | None = None
    _stack: ExitStack = attrs.field(factory=ExitStack, init=False)
    _groups: dict[tuple[int, str], WorkerGroup] = attrs.field(factory=dict, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close_after(error, self._stack.close)

    def backend(self, ranks: int, dtype: ComputeDtype) -> SelectedPlugin:
        """The backend that computes in `dtype` on so many ranks."""
        if dtype == "float64" and self.reference is not None:
            return self.reference
        return self.alone if ranks == 1 and self.alone is not None else self.plugins["backend"]

    def topology(self, ranks: int, dtype: ComputeDtype) -> Topology:
        """Describe how these ranks are laid out. Raises UnsupportedError where the backend cannot lay out so many."""
        backend = self.backend(ranks, dtype)
        return backend.loaded.describe_backend(backend.options, ranks).topology

    def group(self, ranks: int, dtype: ComputeDtype, *, taught: bool = False) -> WorkerGroup:
        """One rank in this process, several by Ray; `taught` has the teacher on them. Raises what starting them raises."""
        if (ranks, dtype) not in self._groups:
            plugins = {**self.plugins, "backend": self.backend(ranks, dtype)}
            locks: dict[str, dict[str, Any]] = {place: selected.to_lock_entry() for place, selected in plugins.items()}
            model = attrs.evolve(self.model, dtype=dtype)
            spec = WorkerSpec(
                locks, self.context, model, AdamWSettings(), self.topology(ranks, dtype), "cpu", self.shown, self.rows
            )
            group = launch_workers(spec, launch="inline" if ranks == 1 else "ray")
            self._groups[ranks, dtype] = self._stack.enter_context(group)
        group = self._groups[ranks, dtype]
        if taught and TEACHER_MODEL not in group.frozen:
            assert self.teacher is not None, "whoever makes the ranks gives them a teacher"
            group.add_frozen(TEACHER_MODEL, attrs.evolve(self.teacher, dtype=dtype))
        return group
