"""All promises of a backend, on every layout that it claims."""

from typing import Any

from skyrl_engine.testing.backends.adapter_set_promises import ADAPTER_SET_PROMISES
from skyrl_engine.testing.backends.average_promises import AVERAGE_PROMISES
from skyrl_engine.testing.backends.description_promises import DESCRIPTION_PROMISES
from skyrl_engine.testing.backends.device_promises import DEVICE_PROMISES
from skyrl_engine.testing.backends.freeze_promises import FREEZE_PROMISES
from skyrl_engine.testing.backends.gradient_promises import GRADIENT_PROMISES
from skyrl_engine.testing.backends.lora_promises import LORA_PROMISES
from skyrl_engine.testing.backends.memory_promises import MEMORY_PROMISES
from skyrl_engine.testing.backends.noise_promises import NOISE_PROMISES
from skyrl_engine.testing.backends.placement_promises import PLACEMENT_PROMISES
from skyrl_engine.testing.backends.score_promises import SCORE_PROMISES
from skyrl_engine.testing.backends.second_model_promises import SECOND_MODEL_PROMISES
from skyrl_engine.testing.backends.speed_promises import SPEED_PROMISES
from skyrl_engine.testing.backends.staged_save_promises import STAGED_SAVE_PROMISES
from skyrl_engine.testing.backends.state_promises import STATE_PROMISES
from skyrl_engine.testing.backends.step_promises import STEP_PROMISES
from skyrl_engine.testing.backends.vision_promises import VISION_PROMISES
from skyrl_engine.testing.plugin_promises import config_round_trip, light_import
from skyrl_engine.testing.promise import Promise

BACKEND_PROMISES: tuple[Promise[Any, Any], ...] = (
    *DESCRIPTION_PROMISES,
    *SCORE_PROMISES,
    *GRADIENT_PROMISES,
    *STEP_PROMISES,
    *STATE_PROMISES,
    *PLACEMENT_PROMISES,
    *VISION_PROMISES,
    *LORA_PROMISES,
    *ADAPTER_SET_PROMISES,
    *SECOND_MODEL_PROMISES,
    *DEVICE_PROMISES,
    *SPEED_PROMISES,
    *NOISE_PROMISES,
    *MEMORY_PROMISES,
    *AVERAGE_PROMISES,
    *FREEZE_PROMISES,
    *STAGED_SAVE_PROMISES,
    config_round_trip,
    light_import,
)
