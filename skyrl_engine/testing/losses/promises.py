"""What must hold of every loss."""

from typing import Any

from skyrl_engine.testing.losses.conduct_promises import CONDUCT_PROMISES, FIRST_PROMISES
from skyrl_engine.testing.losses.cut_promises import CUT_PROMISES
from skyrl_engine.testing.losses.number_promises import NUMBER_PROMISES
from skyrl_engine.testing.losses.value_promises import VALUE_PROMISES
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.promise import Promise

LOSS_PROMISES: tuple[Promise[Any, Any], ...] = (
    *FIRST_PROMISES,
    *VALUE_PROMISES,
    *CUT_PROMISES,
    *NUMBER_PROMISES,
    *CONDUCT_PROMISES,
    *PLUGIN_PROMISES,
)
