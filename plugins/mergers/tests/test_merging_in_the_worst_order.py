"""Merging of a thousand ranks in the worst order, by the work of `tests/benchmarks/merging.py`, which measures what it costs."""

import numpy as np
import pytest
from merging import MERGERS, TOKENS, outputs_of


@pytest.mark.parametrize("tokens", [pytest.param(count, marks=pytest.mark.nightly) if count > 16 else count for count in TOKENS])
@pytest.mark.parametrize("name", MERGERS)
def test_samples_are_in_the_order_of_the_batch(name: str, tokens: int) -> None:
    """Without per-token outputs, and with short, middle and long samples."""
    outputs, plan, whole = outputs_of(tokens)
    merged = MERGERS[name].merge(outputs, plan)
    for field, ragged in whole.fields.items():
        np.testing.assert_array_equal(merged.fields[field].values, ragged.values, strict=True)
    assert merged.sample_ids.tolist() == whole.sample_ids.tolist()
    assert merged.metrics == whole.metrics
