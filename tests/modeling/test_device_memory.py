"""Memory of devices: the highest point between two questions."""

import sys

import numpy as np
import pytest

from skyrl_engine.modeling.device_memory import take_peak_bytes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells the highest resident set")
LARGE = 2**28


def test_the_highest_point_is_that_since_the_last_question() -> None:
    take_peak_bytes("cpu")
    before = take_peak_bytes("cpu")
    held = np.ones(LARGE, dtype=np.uint8)
    del held
    during, after = take_peak_bytes("cpu"), take_peak_bytes("cpu")
    assert before is not None
    assert during is not None
    assert after is not None
    assert during > before + 0.9 * LARGE
    assert after < during - 0.9 * LARGE
