"""One pass over held-out data without gradients."""

import numpy as np

from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.outputs import combine_metrics
from skyrl_engine.errors import DataError
from skyrl_engine.training.step import StepDriver


def evaluate(driver: StepDriver, columns: SampleColumns, *, batch_size: int, step: int) -> dict[str, float]:
    """Score `columns` in mini-batches of `batch_size` samples, in their order.

    `loss` is the token mean over the whole set: the sum of the loss's terms, each times its loss weight, over the sum of the loss weights,
    whatever reducer the training uses. The loss's own metrics combine as they declare. Raises DataError when no token carries loss.
    """
    mass = float(columns.loss_weight.sum(dtype=np.float64))
    if mass == 0:
        raise DataError("no token of the evaluation data carries loss", remedy="Evaluate on data with responses to learn")
    parts = []
    for start in range(0, len(columns), batch_size):
        chosen = np.arange(start, min(start + batch_size, len(columns)), dtype=np.int64)
        parts.append(driver.evaluate(columns.take(chosen), step=step, per_token_outputs=False).output.metrics)
    combined = combine_metrics(parts)
    metrics = {name: metric.result for name, metric in combined.items()}
    metrics["loss"] = combined["loss"].value / mass
    return metrics | {
        "samples": float(len(columns)),
        "tokens": float(len(columns.input_ids)),
        "loss_tokens": float(np.count_nonzero(columns.loss_weight)),
    }
