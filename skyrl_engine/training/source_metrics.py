"""Metrics of each source of a run over several datasets: passes number the sources, and reports name them."""

from collections.abc import Mapping, Sequence

import numpy as np

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.contracts.values.source_names import BY_SOURCE, SOURCE


def name_losses_of_sources(metrics: Mapping[str, Metric], names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics with `loss/NAME` in the place of `loss/NUMBER`, without those of a source whose weights add up to 0, and
    `METRIC/NAME` in the place of `by_source/NUMBER/METRIC`.
    """
    numbered = {f"loss/{number}": name for number, name in enumerate(names)}
    named = {f"loss/{numbered[key]}": metrics[key] for key in numbered.keys() & metrics.keys() if metrics[key].count}
    others: dict[str, Metric] = {}
    for key, metric in metrics.items():
        if key.startswith(BY_SOURCE):
            number, _, metric_name = key.removeprefix(BY_SOURCE).partition("/")
            named[f"{metric_name}/{names[int(number)]}"] = metric
        elif key not in numbered:
            others[key] = metric
    return {**others, **dict(sorted(named.items()))}


def shares_of_sources(columns: SampleColumns, names: Sequence[str]) -> dict[str, float]:
    """Return for each source `sample_share/NAME`, its part of the samples, and `token_share/NAME`, its part of the tokens that carry loss, 0 to
    1. None where there is one source.
    """
    if SOURCE not in columns.sample_values:
        return {}
    of_samples = columns.sample_values[SOURCE]
    of_actions = np.repeat(of_samples, np.diff(columns.action_offsets))
    counts = np.bincount(of_samples, minlength=len(names))
    tokens = np.bincount(of_actions[columns.loss_weight != 0], minlength=len(names))
    return {
        **{f"sample_share/{name}": float(count) / len(columns) for name, count in zip(names, counts, strict=True)},
        **{f"token_share/{name}": float(count) / max(1, int(tokens.sum())) for name, count in zip(names, tokens, strict=True)},
    }
