"""The collator contract as an executable suite.

    class TestMine(CollatorConformance):
        def collator(self):
            return MyCollator()

and pytest runs everything below against it. Override `reference` to be held to your own plain definition bit for bit, and `layouts`
where the collator refuses some layouts by design. Samples have expert routes and images where the collator declares to carry them.
"""

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.collator import Collator, DenseBatch, carried_by
from skyrl_engine.contracts.values.buffers import ReusableBuffers
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout, MicroBatchPlan, SampleLengths
from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.testing.collators import checks, strategies

# One suite serves many subclasses, each of which is its own test: differing executors are meant.
SUITE = settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])


class CollatorConformance:
    """Subclass, name it `Test...`, and return the collator under test from `collator`."""

    @abstractmethod
    def collator(self) -> Collator:
        """A collator that accepts samples of any length."""

    def reference(self, columns: SampleColumns, micro_batch: MicroBatchPlan) -> Mapping[str, AnyArray] | None:  # noqa: ARG002 for overriding
        """Every field of these rows by the plain definition, or None to go without this comparison."""
        return None

    def layouts(self, lengths: SampleLengths) -> st.SearchStrategy[Layout]:
        """Layouts that the collator must be able to make for these samples."""
        return strategies.layouts(lengths)

    @SUITE
    @given(st.data())
    def test_plans_cover_every_sample_once_and_cut_nothing_that_belongs_together(self, data: st.DataObject) -> None:
        lengths = data.draw(strategies.sample_lengths())
        layout = data.draw(self.layouts(lengths))
        plan = self.collator().plan(lengths, layout)
        checks.check_plan(plan, lengths, layout)
        checks.check_declared_rows(self.collator().rows, plan)
        checks.check_declared_carries(self.collator())
        checks.check_same_plan(plan, self.collator().plan(lengths, layout))

    @SUITE
    @given(st.data())
    def test_builds_hold_their_samples_and_score_from_predecessors(self, data: st.DataObject) -> None:
        columns, layout = self._draw(data)
        for micro_batch in checks.micro_batches(self.collator().plan(columns.lengths, layout)):
            batch = self.collator().build(columns, micro_batch)
            checks.check_model_inputs(batch, columns, micro_batch)
            checks.check_gather(batch, columns, micro_batch)
            checks.check_cu_seqlens(batch, columns, micro_batch)

    @SUITE
    @given(st.data())
    def test_expert_routes_and_images_lie_at_their_samples(self, data: st.DataObject) -> None:
        """Of collators that declare to carry them; of others, that they make no such field."""
        columns, layout = self._draw(data)
        for micro_batch in checks.micro_batches(self.collator().plan(columns.lengths, layout)):
            batch = self.collator().build(columns, micro_batch)
            for name, extra in checks.FIELDS_OF_EXTRAS.items():
                assert (name in batch.fields) == (extra in columns.extras), (
                    f"{name} is there without {extra}, or the other way round"
                )
            checks.check_expert_routes(batch, columns, micro_batch)
            checks.check_images(batch, columns, micro_batch)

    @SUITE
    @given(st.data())
    def test_fields_equal_the_reference(self, data: st.DataObject) -> None:
        columns, layout = self._draw(data)
        for micro_batch in checks.micro_batches(self.collator().plan(columns.lengths, layout)):
            expected = self.reference(columns, micro_batch)
            if expected is not None:
                _check_fields(self.collator().build(columns, micro_batch), expected)

    @SUITE
    @given(st.data())
    def test_builds_of_one_width_make_up_collate(self, data: st.DataObject) -> None:
        """At the width of the batch, one rank's rows one after the other are `collate`, and rows with the same samples at the same
        alignment are equal however the batch is cut.
        """
        columns, layout = self._draw(data)
        collator = self.collator()
        whole = collator.collate(columns)
        plan = collator.plan(columns.lengths, Layout(width="batch"))
        parts = [collator.build(columns, micro_batch) for micro_batch in checks.micro_batches(plan)]
        joined = {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0].fields}
        _check_fields(whole, joined)
        rows = {samples: place for place, samples in enumerate(checks.rows(plan))}
        alignment = checks.micro_batches(plan)[0].alignment
        cut = collator.plan(columns.lengths, evolve(layout, width="batch"))
        for micro_batch in checks.micro_batches(cut):
            if micro_batch.alignment != alignment or micro_batch.width != whole["input_ids"].shape[1]:
                continue
            batch = collator.build(columns, micro_batch)
            for row, samples in enumerate(checks.row_samples(micro_batch)):
                if samples in rows:
                    for name in joined.keys() - batch.ragged_offsets.keys():
                        array = joined[name]
                        checks.check_same_field(name, batch[name][row].numpy(), array[rows[samples]])

    @SUITE
    @given(st.data())
    def test_reused_memory_changes_nothing(self, data: st.DataObject) -> None:
        columns, layout = self._draw(data)
        collator = self.collator()
        buffers = ReusableBuffers(generations=1)
        for micro_batch in checks.micro_batches(collator.plan(columns.lengths, layout)):
            fresh = collator.build(columns, micro_batch)
            reused = collator.build(columns, micro_batch, out=buffers)
            _check_fields(reused, {name: tensor.numpy() for name, tensor in fresh.fields.items()})
            for name in ("actions", "rows", "columns"):
                checks.check_same_field(f"gather.{name}", getattr(reused.gather, name), getattr(fresh.gather, name))

    @SUITE
    @given(st.data())
    def test_fields_are_built_when_asked_for_and_absent_columns_stay_absent(self, data: st.DataObject) -> None:
        columns, layout = self._draw(data)
        collator = self.collator()
        for micro_batch in checks.micro_batches(collator.plan(columns.lengths, layout)):
            everything = collator.build(columns, micro_batch)
            for name in strategies.COLUMN_NAMES:
                assert (name in everything.fields) == (name in columns.columns), f"column {name!r} is absent in one place only"
            asked = data.draw(st.lists(st.sampled_from(sorted(everything.fields)), unique=True))
            some = collator.build(columns, micro_batch, fields=[*asked, "a_field_nobody_has"])
            _check_fields(some, {name: everything[name].numpy() for name in asked})
            assert some.ragged_offsets.keys() == everything.ragged_offsets.keys() & set(asked), "ragged_offsets are of other fields"
            assert np.array_equal(some.gather.columns, everything.gather.columns), (
                "the gather index depends on the fields asked for"
            )

    def _draw(self, data: st.DataObject) -> tuple[SampleColumns, Layout]:
        columns = data.draw(strategies.sample_columns(carries=carried_by(self.collator())))
        return columns, data.draw(self.layouts(columns.lengths))


def _check_fields(batch: DenseBatch, expected: Mapping[str, AnyArray]) -> None:
    assert set(batch.fields) == set(expected), f"fields {sorted(batch.fields)} where {sorted(expected)} are due"
    for name, array in expected.items():
        assert batch[name].is_contiguous(), f"{name} is not contiguous"
        checks.check_same_field(name, batch[name].numpy(), array)
