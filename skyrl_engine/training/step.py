"""Drives one optimizer step: plan, weigh, dispatch, run, merge, apply. Shared by all trainers; it computes nothing itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from skyrl_engine.contracts.collator import Collator
from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.merger import Merger
from skyrl_engine.contracts.outputs import BatchOutput
from skyrl_engine.contracts.plan import BatchPlan, Layout
from skyrl_engine.contracts.reducer import Reducer
from skyrl_engine.spans import Spans
from skyrl_engine.workers.dispatch import batch_structure, cut, token_weights
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.worker import Pass, RankReply


@frozen(eq=False)
class StepResult:
    """Final metrics, the merged outputs in the order of the columns, and CPU seconds by span over controller and ranks."""

    metrics: dict[str, float]
    output: BatchOutput
    cpu_seconds: dict[str, float]


@frozen(eq=False)
class StepDriver:
    """Holds what every step shares. `needs` names the data columns the loss reads; only those travel to the ranks."""

    group: WorkerGroup
    collator: Collator
    reducer: Reducer
    merger: Merger
    layout: Layout
    max_sequence_length: int | None = None
    needs: Sequence[str] = ()
    reducer_name: str = "reducer"
    _spans: Spans = field(factory=Spans, init=False)

    def train(self, columns: SampleColumns, *, step: int, per_token_outputs: bool = True) -> StepResult:
        """One optimizer step on one mini-batch: all of `columns`."""
        plan = self._plan(columns)
        with self._spans("reduce"):
            weights = token_weights(
                self.reducer_name, self.reducer, batch_structure(columns, plan.mini_batches[0], self.max_sequence_length)
            )
        output = self._pass("forward_backward", columns, plan, weights, step, per_token_outputs=per_token_outputs)
        replies = self.group.optim_step()
        for reply in replies:
            self._spans.add(reply.cpu_seconds)
        applied = replies[0].step
        metrics = {name: metric.result for name, metric in output.metrics.items()}
        metrics |= {"grad_norm": applied.grad_norm, "learning_rate": applied.learning_rate, **_counts(columns, plan)}
        return StepResult(metrics, output, self._spans.drain())

    def evaluate(self, columns: SampleColumns, *, step: int, per_token_outputs: bool = True) -> StepResult:
        """Score `columns` without gradients. `loss` is the mean of the loss's terms over all loss weight, whatever the reducer."""
        plan = self._plan(columns)
        structure = batch_structure(columns, plan.mini_batches[0], self.max_sequence_length)
        weights = structure.loss_weight.astype(np.float64)
        output = self._pass("forward", columns, plan, weights, step, per_token_outputs=per_token_outputs)
        metrics = {name: metric.result for name, metric in output.metrics.items()}
        mass = float(weights.sum())
        metrics["loss"] = metrics["loss"] / mass if mass else float("nan")
        return StepResult(metrics | _counts(columns, plan), output, self._spans.drain())

    def _plan(self, columns: SampleColumns) -> BatchPlan:
        with self._spans("plan"):
            plan = self.collator.plan(columns.lengths, self.layout)
        assert len(plan.mini_batches) == 1, "one optimizer step is one mini-batch"
        return plan

    def _pass(
        self, mode: Pass, columns: SampleColumns, plan: BatchPlan, weights: Any, step: int, *, per_token_outputs: bool
    ) -> BatchOutput:
        with self._spans("dispatch"):
            shards = self.group.put(cut(columns, plan.mini_batches[0], weights, self.needs))
        replies: list[RankReply] = self.group.run(mode, shards, step=step, per_token_outputs=per_token_outputs)
        for reply in replies:
            self._spans.add(reply.cpu_seconds)
        with self._spans("merge"):
            return self.merger.merge([reply.output for reply in replies], plan)


def _counts(columns: SampleColumns, plan: BatchPlan) -> dict[str, float]:
    """What the step worked on: samples, real tokens, loss-carrying tokens, and the share of the dense batch that was padding."""
    micro_batches = [micro_batch for mini_batch in plan.mini_batches for rank in mini_batch.ranks for micro_batch in rank]
    dense = sum(micro_batch.rows * micro_batch.width for micro_batch in micro_batches)
    tokens = len(columns.input_ids)
    return {
        "samples": float(len(columns)),
        "tokens": float(tokens),
        "loss_tokens": float(np.count_nonzero(columns.loss_weight)),
        "padding_share": 1 - tokens / dense if dense else 0.0,
    }
