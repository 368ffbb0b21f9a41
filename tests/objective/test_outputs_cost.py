"""Per-token outputs as columns cost at least 20 times less CPU than a list of dicts of Python floats, by the benchmark's own work."""

import pytest
from outputs_columnar import BARS, ELSEWHERE, make_outputs, ratios, send, sort_by_id

MOST_ROUNDS = 7


@pytest.mark.proof
def test_columns_cost_a_twentieth_of_dicts_at_1024_by_2048() -> None:
    """On the rank, where they are made. On the way to the caller columns wait for memory, and dicts for the processor: how much less they
    cost there differs between machines, and the benchmark prints it; here they must cost a small part.

    The least of the rounds counts, and they end when the bound is seen: what other processes do to the memory only ever adds.
    """
    outputs = make_outputs()
    merged = outputs.merged(send(outputs.as_columns()))
    assert merged.to_list() == sort_by_id(outputs.as_dicts()), "both ways hold the same numbers"
    measured = {
        name: dicts / columns for name, (columns, dicts) in ratios(outputs, rounds=MOST_ROUNDS, enough=BARS["on the rank"]).items()
    }
    print({name: round(ratio, 1) for name, ratio in measured.items()})
    assert measured["on the rank"] >= BARS["on the rank"]
    assert min(measured.values()) >= ELSEWHERE
