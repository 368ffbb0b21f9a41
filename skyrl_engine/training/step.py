"""Drives one optimizer step: plan, weigh, dispatch, run, merge, apply. Shared by all trainers; it computes nothing itself."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from skyrl_engine.contracts.collator import Collator
from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.merger import Merger
from skyrl_engine.contracts.outputs import BatchOutput, Metric
from skyrl_engine.contracts.plan import BatchPlan, Layout
from skyrl_engine.contracts.reducer import BatchStructure, Reducer
from skyrl_engine.errors import ModelError
from skyrl_engine.spans import Spans
from skyrl_engine.workers.dispatch import batch_structure, cut, merged, planned, token_weights
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.worker import Pass, RankReply


@frozen(eq=False)
class StepResult:
    """One pass over one mini-batch.

    `metrics` are the merged ones and the step's own; they still combine with those of other passes. `output` holds the per-token outputs in
    the order of the columns, `cpu_seconds` the CPU time by span over controller and ranks.
    """

    metrics: Mapping[str, Metric]
    output: BatchOutput
    cpu_seconds: Mapping[str, float]


@frozen(eq=False, kw_only=True)
class StepDriver:
    """Holds what every step shares.

    `needs` names the data columns the loss reads; only those travel to the ranks. `max_sequence_length` in tokens, if one is configured, is
    for reducers; `labels` name the plugins in errors, by kind.
    """

    group: WorkerGroup
    collator: Collator
    reducer: Reducer
    merger: Merger
    labels: Mapping[str, str]
    layout: Layout
    max_sequence_length: int | None
    needs: Sequence[str]
    _spans: Spans = field(factory=Spans, init=False)

    def train(self, columns: SampleColumns, *, step: int, per_token_outputs: bool = True) -> StepResult:
        """One optimizer step on one mini-batch: all of `columns`. `loss` is the objective, the sum of weight times term.

        Raises ModelError, before the weights change, where the loss or the gradient is not finite.
        """
        plan = self._plan(columns)
        with self._spans("reduce"):
            weights = token_weights(self.labels["reducer"], self.reducer, self._structure(columns, plan))
        output = self._pass("forward_backward", columns, plan, weights, step, per_token_outputs=per_token_outputs)
        if not math.isfinite(loss := output.metrics["loss"].result):  # a term that is NaN can still have a finite gradient
            raise ModelError(
                f"the loss of optimizer step {step} is not finite ({loss})",
                remedy="Lower optimizer.learning_rate or inspect this step's samples and the loss; "
                "the weights are those of the step before",
            )
        replies = self.group.optim_step()
        for reply in replies:
            self._spans.add(reply.cpu_seconds)
        applied = replies[0].step
        reported = {"grad_norm": Metric.mean(applied.grad_norm, 1), "learning_rate": Metric.mean(applied.learning_rate, 1)}
        return StepResult({**output.metrics, **reported, **_counts(columns, plan)}, output, self._spans.drain())

    def evaluate(self, columns: SampleColumns, *, step: int, per_token_outputs: bool = True) -> StepResult:
        """Score `columns` without gradients.

        `loss` is the mean over loss weights, whatever reducer the training uses: the sum of each term times its loss weight, over the sum of
        the loss weights, divided once however many passes are combined.
        """
        plan = self._plan(columns)
        weights = self._structure(columns, plan).loss_weight.astype(np.float64)
        output = self._pass("forward", columns, plan, weights, step, per_token_outputs=per_token_outputs)
        loss = Metric.mean(output.metrics["loss"].value, weights.sum())
        return StepResult({**output.metrics, "loss": loss, **_counts(columns, plan)}, output, self._spans.drain())

    def _plan(self, columns: SampleColumns) -> BatchPlan:
        with self._spans("plan"):
            return planned(self.labels["collator"], self.collator, columns, self.layout)

    def _structure(self, columns: SampleColumns, plan: BatchPlan) -> BatchStructure:
        return batch_structure(columns, plan.mini_batches[0], self.max_sequence_length)

    def _pass(
        self,
        mode: Pass,
        columns: SampleColumns,
        plan: BatchPlan,
        weights: npt.NDArray[np.float64],
        step: int,
        *,
        per_token_outputs: bool,
    ) -> BatchOutput:
        with self._spans("dispatch"):
            shards = self.group.put(cut(columns, plan.mini_batches[0], weights, self.needs))
        replies: list[RankReply] = self.group.run(mode, shards, step=step, per_token_outputs=per_token_outputs)
        for reply in replies:
            self._spans.add(reply.cpu_seconds)
        with self._spans("merge"):
            return merged(self.labels["merger"], self.merger, [reply.output for reply in replies], plan)


def _counts(columns: SampleColumns, plan: BatchPlan) -> dict[str, Metric]:
    """What the step worked on: samples, real tokens, loss-carrying tokens, and the share of the dense batch that was padding."""
    tokens, dense = len(columns.input_ids), plan.dense_tokens
    return {
        "samples": Metric.sum(len(columns)),
        "tokens": Metric.sum(tokens),
        "loss_tokens": Metric.sum(int(np.count_nonzero(columns.loss_weight))),
        "padding_share": Metric.mean(dense - tokens, dense),
    }
