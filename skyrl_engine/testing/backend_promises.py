"""What must hold of every backend, on every layout that it claims."""

from typing import Any

from skyrl_engine.testing.backend_description_promises import DESCRIPTION_PROMISES
from skyrl_engine.testing.backend_gradient_promises import GRADIENT_PROMISES
from skyrl_engine.testing.backend_score_promises import SCORE_PROMISES
from skyrl_engine.testing.backend_state_promises import STATE_PROMISES
from skyrl_engine.testing.backend_step_promises import STEP_PROMISES
from skyrl_engine.testing.backend_vision_promises import VISION_PROMISES
from skyrl_engine.testing.plugin_promises import config_round_trip, light_import
from skyrl_engine.testing.promise import Promise

BACKEND_PROMISES: tuple[Promise[Any, Any], ...] = (
    *DESCRIPTION_PROMISES,
    *SCORE_PROMISES,
    *GRADIENT_PROMISES,
    *STEP_PROMISES,
    *STATE_PROMISES,
    *VISION_PROMISES,
    config_round_trip,
    light_import,
)
