"""One pass over held-out data without gradients."""

import numpy as np

from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.outputs import combine_metrics, results_of
from skyrl_engine.errors import DataError
from skyrl_engine.training.step import StepDriver


def evaluate(driver: StepDriver, columns: SampleColumns, *, batch_size: int, step: int) -> dict[str, float]:
    """Metrics of `StepDriver.evaluate` over all of `columns`, scored in mini-batches of `batch_size` samples, in their order.

    Raises DataError when no token carries loss.
    """
    if not columns.loss_weight.any():
        raise DataError("no token of the evaluation data carries loss", remedy="Evaluate on data with responses to learn")
    parts = []
    for start in range(0, len(columns), batch_size):
        chosen = np.arange(start, min(start + batch_size, len(columns)), dtype=np.int64)
        parts.append(driver.evaluate(columns.take(chosen), step=step, per_token_outputs=False).metrics)
    return results_of(combine_metrics(parts))
