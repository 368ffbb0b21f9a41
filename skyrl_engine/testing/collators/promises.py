"""All promises of a collator."""

from typing import Any

from skyrl_engine.testing.collators.build_promises import BUILD_PROMISES
from skyrl_engine.testing.collators.extras_promises import EXTRAS_PROMISES
from skyrl_engine.testing.collators.plan_promises import PLAN_PROMISES
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.promise import Promise

COLLATOR_PROMISES: tuple[Promise[Any, Any], ...] = (*PLAN_PROMISES, *BUILD_PROMISES, *EXTRAS_PROMISES, *PLUGIN_PROMISES)
