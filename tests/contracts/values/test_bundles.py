"""Bundles: what belongs together stays together, directly or through others."""

import numpy as np
from hypothesis import given, settings

from skyrl_engine.contracts.values.bundles import Bundles, inseparable
from skyrl_engine.testing.collators.strategies import sample_lengths


@settings(deadline=None)
@given(sample_lengths())
def test_inseparable_is_the_transitive_closure(lengths):
    """Against the definition: repeat joining sets that share a sample until nothing changes."""
    sets = [{i} for i in range(len(lengths))]
    for ids in (lengths.group_ids.tolist(), lengths.unit_ids.tolist()):
        sets += [{i for i in range(len(ids)) if ids[i] == label} for label in set(ids)]
    labels = inseparable(lengths.group_ids, lengths.unit_ids).tolist()
    for i in range(len(lengths)):
        reached = {i}
        while True:
            more = set().union(*(part for part in sets if part & reached))
            if more == reached:
                break
            reached = more
        assert labels[i] == min(reached)


def test_bundles_are_in_the_order_of_their_first_samples():
    bundles = Bundles.by_label(np.array([2, 4, 5, 7]), np.array([9, 1, 9, 0]))
    assert [bundles.members[i].tolist() for i in range(len(bundles))] == [[2, 5], [4], [7]]
    assert bundles.sizes.tolist() == [2, 1, 1]
    values = np.array([0, 0, 10, 0, 20, 30, 0, 40])
    assert bundles.sums(values).tolist() == [40, 20, 40]
    assert bundles.maxima(values).tolist() == [30, 20, 40]
