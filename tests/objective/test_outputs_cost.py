"""Per-token outputs as columns cost at least 20 times less CPU than a list of dicts of Python floats, by the benchmark's own work."""

import pytest
from outputs_columnar import in_order, make_outputs, ratios, sent

MOST_ROUNDS = 60


@pytest.mark.proof
def test_columns_cost_a_twentieth_of_dicts_at_1024_by_2048() -> None:
    """On the rank, and on the whole way between processes into the caller's order.

    The least of the rounds counts, and they end when the bound is seen: columns wait for memory, dicts for the processor, and what other
    processes do to the memory only ever adds. Not asserted, because it is not true: that putting samples in order within one process, where
    dicts only swap pointers, is as much cheaper.
    """
    outputs = make_outputs()
    merged = outputs.merged(sent(outputs.as_columns()))
    assert merged.to_list() == in_order(outputs.as_dicts()), "both ways hold the same numbers"
    measured = {name: dicts / columns for name, (columns, dicts) in ratios(outputs, rounds=MOST_ROUNDS, enough=20).items()}
    print({name: round(ratio, 1) for name, ratio in measured.items()})
    assert measured["on the rank"] >= 20
    assert measured["to the caller's order, between processes"] >= 20
