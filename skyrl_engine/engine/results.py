"""Results of passes: merged metrics and outputs, what a pass worked on, and a refusal of losses that are no numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import BatchOutput, Metric, RankOutput
from skyrl_engine.contracts.values.plan import BatchPlan
from skyrl_engine.contracts.values.ragged import IntArray, Ragged
from skyrl_engine.errors import ModelError

COUNTED: Final = ("samples", "tokens", "loss_tokens")
"""Metrics of `counts_of` that add up over passes."""


@frozen(eq=False)
class PassResult:
    """One pass over a batch, or over a part of one.

    `metrics` are the merged ones and the pass's own; they still combine with those of other passes. `output` holds the per-token outputs in
    the order of the columns, `cpu_seconds` the CPU time by span over controller and ranks since the result before.
    """

    metrics: Mapping[str, Metric]
    output: BatchOutput
    cpu_seconds: Mapping[str, float]


def refuse_not_finite(outputs: Sequence[RankOutput], step: int) -> None:
    """Raise ModelError where the loss of a pass is not finite: a term that is NaN can still have a finite gradient."""
    losses = [output.metrics["loss"].value for output in outputs if "loss" in output.metrics]
    if not all(map(math.isfinite, losses)):
        raise ModelError(
            f"the loss of optimizer step {step} is not finite ({sum(losses)})",
            remedy="Lower optimizer.learning_rate or inspect this step's samples and the loss; "
            "the weights are those of the step before",
        )


def means_over(metrics: Mapping[str, Metric], mini_batches: int) -> dict[str, Metric]:
    """Turn sums over several mini-batches into their mean; what declares another reduction is combined already."""
    return {
        name: Metric.sum(metric.value / mini_batches) if metric.reduction == "sum" else metric for name, metric in metrics.items()
    }


def counts_of(columns: SampleColumns, plan: BatchPlan) -> dict[str, Metric]:
    """Count what a pass worked on: samples, real tokens, loss-carrying tokens, and the share of the dense batch that was padding.

    In rows of trees also the share of the samples' tokens that were computed with those of another sample.
    """
    dense = plan.dense_tokens
    samples = np.concatenate([np.zeros(0, dtype=np.int64), *(batch.samples for batch in plan.micro_batches)])
    if len(samples) == len(columns):
        tokens, carrying = len(columns.input_ids), int(np.count_nonzero(columns.loss_weight))
    else:
        tokens = int(np.diff(columns.token_offsets)[samples].sum())
        running = np.concatenate([[0], np.cumsum(columns.loss_weight != 0)])
        carrying = int((running[columns.action_offsets[samples + 1]] - running[columns.action_offsets[samples]]).sum())
    shared = plan.shared_tokens
    return {
        "samples": Metric.sum(len(samples)),
        "tokens": Metric.sum(tokens),
        "loss_tokens": Metric.sum(carrying),
        "padding_share": Metric.mean(dense - (tokens - (shared or 0)), dense),
        **({} if shared is None else {"shared_share": Metric.mean(shared, tokens)}),
    }


def outputs_without_tokens(columns: SampleColumns, samples: IntArray, others: Sequence[RankOutput]) -> RankOutput:
    """Give the outputs of samples that no rank computed, as ranks give those of samples without a scored token; `others` are the ranks'."""
    filled = next(output for output in others if len(output.sample_ids) and output.coords.collects)
    offsets = np.zeros(len(samples) + 1, dtype=np.int64)
    return RankOutput(
        columns.sample_ids[samples],
        np.diff(columns.action_offsets)[samples],
        Ragged(np.zeros(0, dtype=np.int32), offsets),
        {name: Ragged(np.zeros(0, dtype=np.float32), offsets) for name in filled.fields},
        coords=filled.coords,
    )


def weight_per_sample(columns: SampleColumns) -> npt.NDArray[np.float64]:
    """Sum every sample's loss weights: float64[N]."""
    running = np.concatenate([[0.0], np.cumsum(columns.loss_weight, dtype=np.float64)])[columns.action_offsets]
    return np.diff(running)
