"""Cost of merging, by the benchmark's own work: at most five times that of concatenating the same arrays, where nothing else runs."""

import numpy as np
import pytest
from merging import MERGERS, MOST, TOKENS, costs, outputs_of

MOST_ROUNDS = 20


@pytest.mark.proof
@pytest.mark.parametrize(
    "tokens", [pytest.param(count, marks=pytest.mark.nightly) if count == max(TOKENS) else count for count in TOKENS]
)
@pytest.mark.parametrize("name", MERGERS)
def test_merging_costs_a_small_multiple_of_concatenating(name: str, tokens: int) -> None:
    """Without per-token outputs, and with short, middle and long samples."""
    outputs, plan, whole = outputs_of(tokens)
    merged = MERGERS[name].merge(outputs, plan)
    for field, ragged in whole.fields.items():
        np.testing.assert_array_equal(merged.fields[field].values, ragged.values, strict=True)
    assert merged.sample_ids.tolist() == whole.sample_ids.tolist()
    assert merged.metrics == whole.metrics
    del merged, whole
    least = costs(
        MERGERS[name], outputs, plan, rounds=MOST_ROUNDS, enough=lambda least: least["merging"] <= MOST * least["concatenating"]
    )
    print(f"{tokens} tokens: {least['merging'] / least['concatenating']:.1f} times")
    assert least["merging"] <= MOST * least["concatenating"]
