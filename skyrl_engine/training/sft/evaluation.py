"""One pass over held-out data without gradients."""

from collections.abc import Callable, Iterable
from typing import Literal

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import combine_metrics, results_of
from skyrl_engine.data.dataset import TokenizedDataset
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.errors import DataError
from skyrl_engine.objective.policy_metrics import Watched
from skyrl_engine.training.sft.order import SampleOrder
from skyrl_engine.training.source_metrics import name_losses_of_sources


def evaluate(
    engine: Engine,
    dataset: TokenizedDataset,
    *,
    batch_size: int,
    planned: Callable[[SampleColumns], Plan] | None = None,
    over: Literal["tokens", "sequences"] = "tokens",
    watch: Iterable[Watched] = (),
) -> dict[str, float]:
    """Give the metrics of `Engine.evaluate` over all of `dataset`, scored in mini-batches of `batch_size` samples, in their order.

    Samples that belong together come together, as in training. `planned` plans a mini-batch, `Engine.plan` where it is not given; `over` and
    `watch` as in `Engine.evaluate`. Of several datasets each has its own `loss/NAME`.

    Raises DataError when no token carries loss.
    """
    if not dataset.columns.loss_weight.any():
        raise DataError("no token of the evaluation data carries loss", remedy="Evaluate on data with responses to learn")
    order = SampleOrder.of(dataset.columns, batch_size=batch_size, shuffle=False)
    parts, position = [], order.start()
    while position.epoch == 0:
        chosen, position = order.mini_batch(position)
        plan = (planned or engine.plan)(dataset.batch(chosen))
        parts.append(engine.evaluate(plan, per_token_outputs=False, over=over, watch=watch).result().metrics)
    return results_of(name_losses_of_sources(combine_metrics(parts), dataset.source_names))
