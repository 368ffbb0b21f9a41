"""Metrics of each source of a run over several datasets: passes number the sources, and reports name them."""

from collections.abc import Mapping, Sequence

import numpy as np

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.contracts.values.source_names import SOURCE


def name_losses_of_sources(metrics: Mapping[str, Metric], names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics with `loss/NAME` in the place of `loss/NUMBER`; without those of a source whose weights add up to 0."""
    numbered = {f"loss/{number}": name for number, name in enumerate(names)}
    named = {f"loss/{numbered[key]}": metrics[key] for key in numbered.keys() & metrics.keys() if metrics[key].count}
    return {**{key: metric for key, metric in metrics.items() if key not in numbered}, **dict(sorted(named.items()))}


def shares_of_sources(columns: SampleColumns, names: Sequence[str]) -> dict[str, float]:
    """Return `sample_share/NAME` for each source: its part of the samples, 0 to 1. None where there is one source."""
    if SOURCE not in columns.sample_values:
        return {}
    counts = np.bincount(columns.sample_values[SOURCE], minlength=len(names))
    return {f"sample_share/{name}": float(count) / len(columns) for name, count in zip(names, counts, strict=True)}
