"""One pass of a batch through ranks, measured: loss, gradients, outputs; afterwards the ranks are as they were."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts.kinds.collator import Collator
from skyrl_engine.contracts.kinds.merger import Merger
from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import BatchOutput
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.engine.step import StepDriver
from skyrl_engine.errors import ModelError
from skyrl_engine.proof.comparison import Measured
from skyrl_engine.workers.dispatch import batch_structure, planned, token_weights
from skyrl_engine.workers.launch import WorkerGroup

STEP = 1
"""The optimizer step that a pass says it is of."""


@frozen(eq=False)
class Products:
    """What a pass needs on the controller. `labels` name the plugins in errors, by kind; `needs` are the columns that travel to the ranks."""

    collator: Collator
    reducer: Reducer
    merger: Merger
    labels: Mapping[str, str]
    needs: Sequence[str]
    max_sequence_length: int | None


def layout_of(topology: Topology, *, micro_batch_rows: int | None = None, micro_batch_tokens: int | None = None) -> Layout:
    """The cut for these ranks."""
    return Layout(
        dp=topology.dp,
        tp=topology.tp,
        cp=topology.cp,
        pp=topology.pp,
        micro_batch_rows=micro_batch_rows,
        micro_batch_tokens=micro_batch_tokens,
    )


def measure(
    group: WorkerGroup, products: Products, columns: SampleColumns, layout: Layout, honest: Reducer | None = None
) -> Measured:
    """Loss, gradients and outputs of `columns` as one mini-batch; the gradient is cleared again, and no weight changes.

    `honest` makes the weights by which the magnitude is measured (None: the reducer of the pass).
    """
    driver = StepDriver(
        group=group,
        collator=products.collator,
        reducer=products.reducer,
        merger=products.merger,
        labels=products.labels,
        layout=layout,
        max_sequence_length=products.max_sequence_length,
        needs=products.needs,
    )
    try:
        output = driver.accumulate(columns, step=STEP)
        gradients = group.gradients()
    finally:
        _clear(group)
    plan = planned(products.labels["collator"], products.collator, columns, layout)
    structure = batch_structure(columns, plan.mini_batches[0], products.max_sequence_length)
    weights = np.abs(token_weights(products.labels["reducer"], honest or products.reducer, structure))
    carrying = np.where(structure.loss_weight != 0, weights, 0.0)
    return Measured(output.metrics["loss"].result, _magnitude(output, structure.sample_ids, carrying), gradients, output)


def _clear(group: WorkerGroup) -> None:
    """Clear the gradient by a step that changes no weight. One that is not finite is refused and cleared all the same; the pass shows it."""
    with suppress(ModelError):
        group.optim_step()


def _magnitude(output: BatchOutput, sample_ids: IntArray, weights: npt.NDArray[np.float64]) -> float:
    """Sum of |weight * term|; `weights` are on the action axis of `sample_ids`."""
    place = {int(sample): row for row, sample in enumerate(output.sample_ids)}
    token_loss = output.on_actions("token_loss").take([place[int(sample)] for sample in sample_ids])
    return float((np.abs(token_loss.values) * weights).sum())
