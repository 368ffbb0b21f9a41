"""Seeds of many places at once are those that NumPy gives for each."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.rollout.seeds import FEW, derive_seeds

WORD = st.integers(0, 2**32 - 1)


@given(st.integers(0, 2**130), st.integers(1, 6), st.data())
def test_seeds_are_those_of_numpy(seed: int, length: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.tuples(*[WORD] * length), max_size=3 * FEW))
    due = [int(np.random.SeedSequence([seed, *place]).generate_state(1, np.uint64)[0]) for place in places]
    assert derive_seeds(seed, places) == due
