"""One pass of a batch through ranks, measured: loss, gradients, outputs; afterwards the ranks are as they were."""

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import BatchOutput
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.pass_engine import PassEngine
from skyrl_engine.proof.comparison import Measurement
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.workers.dispatch import batch_structure, token_weights
from skyrl_engine.workers.launch import WorkerGroup

STEP = 1
"""The optimizer step that a pass says it is of."""


def measure(
    group: WorkerGroup, assembly: Assembly, columns: SampleColumns, layout: Layout, honest: BoundPlugin[Reducer] | None = None
) -> Measurement:
    """Measure loss, gradients and outputs of `columns` as one mini-batch; the gradient is cleared again, and no weight changes.

    `honest` makes the weights by which the magnitude is measured (None: the reducer of the pass).
    """
    engine = PassEngine(assembly, group, layout)
    plan = engine.plan(columns)
    try:
        output = engine.forward_backward(plan).result().output
        gradients = engine.gradients()
    finally:
        engine.discard()
    structure = batch_structure(columns, plan.cut.mini_batches[0], assembly.context.max_sequence_length, reducer=assembly.reducer)
    weights = np.abs(token_weights(honest or assembly.reducer, structure))
    carrying = np.where(structure.loss_weight != 0, weights, 0.0)
    return Measurement(output.metrics["loss"].result, _magnitude(output, structure.sample_ids, carrying), gradients, output)


def _magnitude(output: BatchOutput, sample_ids: IntArray, weights: npt.NDArray[np.float64]) -> float:
    """Sum of |weight * term|; `weights` are on the action axis of `sample_ids`."""
    place = {int(sample): row for row, sample in enumerate(output.sample_ids)}
    token_loss = output.on_actions("token_loss").take([place[int(sample)] for sample in sample_ids])
    return float((np.abs(token_loss.values) * weights).sum())
