"""Drive one batch through every case and compare each with the objective by definition: plain transformers, one sample at a time."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
from attrs import define, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.needs import ROLE_NEED, asks_a_teacher, is_aligned
from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ComputeDtype
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.capability import check_reducer
from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.proof.cases import Case
from skyrl_engine.proof.comparison import Difference, Measurement, compare
from skyrl_engine.proof.definition import BatchDefinition
from skyrl_engine.proof.diagnosis import explain
from skyrl_engine.proof.passes import STEP, measure
from skyrl_engine.proof.plain_model import PlainModel
from skyrl_engine.proof.plants import Cut, PlannedCollator, Plant, PlantedMerger, PlantedReducer, PlantRows
from skyrl_engine.proof.ranks import CONTEXT, RankPool
from skyrl_engine.proof.rollouts import LONGEST, make_rollouts
from skyrl_engine.workers.dispatch import batch_structure, plan_batch
from skyrl_engine.workers.messages import UsePlugins

TOLERANCE: Mapping[ComputeDtype, float] = {"float32": 1e-5, "float64": 1e-10}
SHARED = 1e-6
"""In every precision, for samples that share prefixes: transformers' norms compute in float32, and round the sum of what several samples send
back through a shared token, where apart they round each."""
"""Largest relative difference of a loss, and of any parameter's gradient, that rounding explains."""


@frozen
class CaseResult:
    """One case's verdict. `difference` is None where the engine itself refused the pass; `excuse` says who declared that cuts matter."""

    case: Case
    difference: Difference | None
    holds: bool
    explanation: str = ""
    excuse: str = ""


@define(eq=False)
class Prover:
    """Passes over one batch with one objective. `resolved` has one configuration per collator, alike in all else."""

    resolved: Mapping[str, ResolvedConfig]
    ranks: RankPool
    plant: Plant | None = None
    dtype: ComputeDtype = "float32"

    def rows(self, cases: Sequence[Case]) -> Iterator[CaseResult]:
        """One row per case, each when it is done."""
        first = next(iter(self.resolved.values()))
        parts = ObjectiveParts.make(first.plugins, CONTEXT)
        for term in parts.losses:
            check_reducer(term.label, term.product, first.plugins["reducer"].loaded.record.name)
        reducer: Reducer = first.plugins["reducer"].make(CONTEXT)
        columns = make_rollouts((*parts.reads, *getattr(reducer, "needs", ())))
        if any(map(is_aligned, parts.scores)):
            raise UnsupportedError(
                f"{parts.main.label} aligns the texts of two tokenizers, and the recorded rollouts are tokens without a text",
                remedy="Prove another loss; tests/training/sft/test_other_tokenizer.py compares this one with its definition",
            )
        model = PlainModel.load(self.ranks.model.path, value_head=self.ranks.model.value_head)
        teacher = None
        if asks_a_teacher(parts.scores):
            assert self.ranks.teacher is not None, "whoever makes the ranks gives them a teacher"
            teacher = PlainModel.load(self.ranks.teacher.path)
        definition = BatchDefinition.of(
            model, columns, parts, reducer, longest=LONGEST, seed=CONTEXT.seed, step=STEP, teacher=teacher
        )
        reference = definition.measured
        if not any(gradient.any() for gradient in reference.gradients.values()):
            raise UnsupportedError(
                f"{parts.main.label} with these options has no gradient on the recorded rollouts, so there is nothing to prove",
                remedy="Widen the bounds that leave no token between them, or choose another loss",
            )
        for case in cases:
            yield self._row(case, columns, parts, reference, definition)

    def _row(
        self, case: Case, columns: SampleColumns, parts: ObjectiveParts, reference: Measurement, definition: BatchDefinition
    ) -> CaseResult:
        cut = self._cut(case, columns, self.dtype)
        excuse = _excuse(self.resolved[case.collator], parts)
        try:
            measured = self._measure(case, columns, self.dtype, self.plant)
        except EngineError as error:
            return CaseResult(case, None, holds=False, explanation=str(error), excuse=excuse)
        difference = compare(measured, reference)
        shares = self._assembly(case, self.dtype).collator.product.rows == "tree"
        tolerance = max(TOLERANCE[self.dtype], SHARED if shares else 0.0)
        ordered = difference.tokens <= 100 * tolerance * max(1.0, _largest(reference))
        if difference.is_within(tolerance) and ordered:
            return CaseResult(case, difference, holds=True)
        if difference.is_within(tolerance):
            explanation = "token losses came back under other samples"
        else:
            explanation = explain(measured.gradients, definition.by_part, definition.by_sample, cut, 100 * tolerance)
        return CaseResult(case, difference, holds=False, explanation=explanation, excuse=excuse)

    def _cut(self, case: Case, columns: SampleColumns, dtype: ComputeDtype) -> Cut:
        chosen = _in_order(case, columns)
        plan = plan_batch(self._assembly(case, dtype).collator, chosen, self._layout(case, dtype))
        return Cut.of(batch_structure(chosen, plan.mini_batches[0], LONGEST), plan)

    def _measure(self, case: Case, columns: SampleColumns, dtype: ComputeDtype, plant: Plant | None) -> Measurement:
        chosen = _in_order(case, columns)
        assembly = self._assembly(case, dtype)
        collator = PlannedCollator(assembly.collator.product)
        honest = assembly.reducer
        assembly = attrs.evolve(assembly, collator=attrs.evolve(assembly.collator, product=collator))
        if plant is not None:
            assembly = attrs.evolve(
                assembly,
                reducer=attrs.evolve(honest, product=PlantedReducer(honest.product, plant, collator)),
                merger=attrs.evolve(assembly.merger, product=PlantedMerger(assembly.merger.product, plant)),
            )
        group = self.ranks.group(case.ranks, dtype, taught=asks_a_teacher(assembly.objective.scores))
        group.ask(UsePlugins(self._locks(case, columns, plant, dtype)))
        if plant is not None and plant.rows is not None:
            group.ask(PlantRows(plant.rows))
        return measure(group, assembly, chosen, self._layout(case, dtype), honest)

    def _layout(self, case: Case, dtype: ComputeDtype) -> Layout:
        """The case's cut, in which samples of preferences count in pairs: no cut parts a pair."""
        assembly = self._assembly(case, dtype)
        size = 2 if ROLE_NEED in assembly.objective.reads else 1
        rows, tokens = (None if limit is None else size * limit for limit in (case.micro_batch_rows, case.micro_batch_tokens))
        return assembly.layout(micro_batch_rows=rows, micro_batch_tokens=tokens)

    def _locks(self, case: Case, columns: SampleColumns, plant: Plant | None, dtype: ComputeDtype) -> dict[str, dict[str, object]]:
        plugins = self.resolved[case.collator].plugins
        if plant is not None:
            cut = self._cut(case, columns, dtype)
            plugins = {
                place: selected
                if selected.coefficient is None
                else attrs.evolve(selected, coefficient=plant.coefficient(cut, place) * selected.coefficient)
                for place, selected in plugins.items()
            }
        return {place: selected.to_lock_entry() for place, selected in plugins.items()}

    def _assembly(self, case: Case, dtype: ComputeDtype) -> Assembly:
        """The parts of the case's configuration on its ranks, each checked against its contract when it is made."""
        plugins = {**self.resolved[case.collator].plugins, "backend": self.ranks.backend(case.ranks, dtype)}
        return Assembly.of(plugins, CONTEXT, case.ranks)


def _in_order(case: Case, columns: SampleColumns) -> SampleColumns:
    """The samples as they are, or in another order; they keep their ids."""
    return columns.take(np.random.default_rng(1).permutation(len(columns))) if case.shuffled else columns


def _excuse(resolved: ResolvedConfig, parts: ObjectiveParts) -> str:
    """Name who declared to depend on the cut, if anybody."""
    labels = [term.label for term in parts.losses if term.product.batch_local]
    reducer = resolved.plugins["reducer"]
    if reducer.make(CONTEXT).batch_local:
        labels.append(str(reducer.loaded.record))
    return f"{' and '.join(labels)} {'declares' if len(labels) == 1 else 'declare'} batch_local" if labels else ""


def _largest(measured: Measurement) -> float:
    return float(np.abs(measured.output.fields["token_loss"].values).max(initial=0.0))
