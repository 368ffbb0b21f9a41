"""Drives one optimizer step: plan, weigh, dispatch, run, merge, apply. Shared by all trainers; it computes nothing itself."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from attrs import evolve, field, frozen

from skyrl_engine.contracts.kinds.backend import OptimStep
from skyrl_engine.contracts.kinds.collator import Collator
from skyrl_engine.contracts.kinds.merger import Merger
from skyrl_engine.contracts.kinds.reducer import PerSequence, Reducer, TokenWeights
from skyrl_engine.contracts.values.buffers import ReusableJoin
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import BatchOutput, Metric, RankOutput
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MiniBatchPlan
from skyrl_engine.errors import ModelError
from skyrl_engine.spans import Spans
from skyrl_engine.workers.dispatch import PlacedShard, batch_structure, compact_weights, cut, merged, planned
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.worker import Pass, RankReply


@frozen(eq=False)
class StepResult:
    """One pass over a batch.

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
    _join: ReusableJoin = field(factory=ReusableJoin, init=False)

    def train(self, columns: SampleColumns, *, step: int, per_token_outputs: bool = True, staged: bool = False) -> StepResult:
        """One optimizer step on each mini-batch of `columns`: one mini-batch, or as many as `layout.mini_batch_size` makes; `step` is the
        first. `loss` is the objective, the sum of weight times term; over several mini-batches sums become their mean.

        `staged` places the shards of all mini-batches before the first step, for passes that must not wait for the controller; otherwise
        each mini-batch is cut and placed when its turn comes. Outputs take the same way in both.
        Raises ModelError, before the weights change, where the loss or the gradient of a mini-batch is not finite.
        """
        plan = self._plan(columns, self.layout)
        shards = self._shards(columns, plan)
        if staged:
            shards = iter(list(shards))
        outputs: list[RankOutput] = []
        applied: list[OptimStep] = []
        for number, placed in enumerate(shards):
            own = self._pass("forward_backward", placed, step + number, per_token_outputs=per_token_outputs)
            _refuse_not_finite(own, step + number)
            outputs += own
            replies = self.group.optim_step()
            for reply in replies:
                self._spans.add(reply.cpu_seconds)
            applied.append(replies[0].step)
        output = self._merged(outputs, plan)
        count = len(plan.mini_batches)
        reported = {
            "grad_norm": Metric.mean(sum(each.grad_norm for each in applied), count),
            "learning_rate": Metric.mean(sum(each.learning_rate for each in applied), count),
        }
        return StepResult({**_over(output.metrics, count), **reported, **_counts(columns, plan)}, output, self._spans.drain())

    def accumulate(self, columns: SampleColumns, *, step: int, per_token_outputs: bool = True) -> BatchOutput:
        """The first half of `train`, for one mini-batch: its gradient is added up on the ranks, and no step is taken."""
        plan = self._plan(columns, evolve(self.layout, mini_batch_size=None))
        (placed,) = self._shards(columns, plan)
        return self._merged(self._pass("forward_backward", placed, step, per_token_outputs=per_token_outputs), plan)

    def evaluate(self, columns: SampleColumns, *, step: int, per_token_outputs: bool = True) -> StepResult:
        """Score `columns` without gradients.

        `loss`, and each part's contribution to it, is the mean over loss weights, whatever reducer the training uses: the sum of each term
        times its loss weight, over the sum of the loss weights, divided once however many passes are combined.
        """
        plan = self._plan(columns, evolve(self.layout, mini_batch_size=None))
        (mini_batch,) = plan.mini_batches
        placed = self._placed(columns, mini_batch, PerSequence(np.ones(len(columns))))  # every token weighs its loss weight
        total = columns.loss_weight.sum(dtype=np.float64)
        output = self._merged(self._pass("forward", placed, step, per_token_outputs=per_token_outputs), plan)
        means = {
            name: Metric.mean(metric.value, total)
            for name, metric in output.metrics.items()
            if name == "loss" or name.startswith("objective/")
        }
        return StepResult({**output.metrics, **means, **_counts(columns, plan)}, output, self._spans.drain())

    def _plan(self, columns: SampleColumns, layout: Layout) -> BatchPlan:
        with self._spans("plan"):
            return planned(self.labels["collator"], self.collator, columns, layout)

    def _shards(self, columns: SampleColumns, plan: BatchPlan) -> Iterator[list[PlacedShard]]:
        """Of every mini-batch, references to its shards by data-parallel rank, made when they are asked for."""
        for mini_batch in plan.mini_batches:
            with self._spans("reduce"):
                structure = batch_structure(columns, mini_batch, self.max_sequence_length, self._join)
                weights = compact_weights(self.labels["reducer"], self.reducer, structure)
            yield self._placed(columns, mini_batch, weights)

    def _placed(self, columns: SampleColumns, mini_batch: MiniBatchPlan, weights: TokenWeights) -> list[PlacedShard]:
        with self._spans("dispatch"):
            return self.group.put(cut(columns, mini_batch, weights, self.needs, self._join))

    def _pass(self, mode: Pass, placed: Sequence[PlacedShard], step: int, *, per_token_outputs: bool) -> list[RankOutput]:
        replies: list[RankReply] = self.group.run(mode, placed, step=step, per_token_outputs=per_token_outputs)
        for reply in replies:
            self._spans.add(reply.cpu_seconds)
        return [reply.output for reply in replies]

    def _merged(self, outputs: Sequence[RankOutput], plan: BatchPlan) -> BatchOutput:
        with self._spans("merge"):
            return merged(self.labels["merger"], self.merger, outputs, plan)


def _refuse_not_finite(outputs: Sequence[RankOutput], step: int) -> None:
    """A term that is NaN can still have a finite gradient."""
    losses = [output.metrics["loss"].value for output in outputs if "loss" in output.metrics]
    if not all(map(math.isfinite, losses)):
        raise ModelError(
            f"the loss of optimizer step {step} is not finite ({sum(losses)})",
            remedy="Lower optimizer.learning_rate or inspect this step's samples and the loss; "
            "the weights are those of the step before",
        )


def _over(metrics: Mapping[str, Metric], mini_batches: int) -> dict[str, Metric]:
    """Sums over several mini-batches as their mean; what declares another reduction is combined already."""
    return {
        name: Metric.sum(metric.value / mini_batches) if metric.reduction == "sum" else metric for name, metric in metrics.items()
    }


def _counts(columns: SampleColumns, plan: BatchPlan) -> dict[str, Metric]:
    """What the step worked on: samples, real tokens, loss-carrying tokens, and the share of the dense batch that was padding."""
    tokens, dense = len(columns.input_ids), plan.dense_tokens
    return {
        "samples": Metric.sum(len(columns)),
        "tokens": Metric.sum(tokens),
        "loss_tokens": Metric.sum(int(np.count_nonzero(columns.loss_weight))),
        "padding_share": Metric.mean(dense - tokens, dense),
    }
