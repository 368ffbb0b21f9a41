"""The peer that collation is compared with: a module that offers `make_batch`, `Case`, `bound_call` and `first_fit_decreasing`.

The environment variable SKYRL_ENGINE_PEER_COLLATORS names it by its path.
"""

import importlib.util
import os
import sys
from typing import Any

from skyrl_engine.contracts.values.columns import SampleColumns

VARIABLE = "SKYRL_ENGINE_PEER_COLLATORS"


def peer_module() -> Any:
    """The module, or None, after a line that says so, where the variable names none."""
    path = os.environ.get(VARIABLE)
    if not path:
        print(f"no comparison with a peer: {VARIABLE} does not name its module")
        return None
    spec = importlib.util.spec_from_file_location("peer_collators", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes look themselves up here
    spec.loader.exec_module(module)
    return module


def columns_of(kind: str, batch: Any) -> SampleColumns:
    """Columns of the peer's `make_batch`, by the public constructors as they are."""
    if kind == "trajectory":
        return SampleColumns.from_rollouts(**batch)
    return SampleColumns.from_lists(
        input_ids=[example["input_ids"] for example in batch],
        num_actions=[example["num_actions"] for example in batch],
        loss_mask=[example["loss_mask"] for example in batch],
    )
