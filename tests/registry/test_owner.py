"""An owner says who answers for plugin code, and what to do about it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_engine.contracts.kinds.reducer import BatchStructure
from skyrl_engine.errors import PluginBrokenError
from skyrl_engine.registry.owner import Owner, blame
from skyrl_engine.registry.record import PluginRecord

OF_A_DISTRIBUTION = PluginRecord("loss", "focal", "acme:focal", distribution="acme-losses", version="2.0.0")
OF_A_FILE = PluginRecord.of_file("loss", Path("my_loss.py"), "focal", b"")


@pytest.mark.parametrize(
    ("owner", "remedy"),
    [
        (Owner.of(OF_A_DISTRIBUTION), "Upgrade acme-losses, or choose another loss"),
        (Owner.of(OF_A_FILE), "Correct my_loss.py, or choose another loss"),
        (Owner.of_unrecorded("loss 'x'", "loss"), "Correct it, or choose another loss"),
        (Owner.of_unrecorded("correction 'x'", "correction"), "Correct it, or leave it out"),
        (Owner.of_unrecorded("observer 'x'", "observer"), "Correct it, or take it out of run.observers"),
    ],
)
def test_the_remedy_is_built_from_the_kind(owner: Owner, remedy: str) -> None:
    with pytest.raises(PluginBrokenError) as caught, blame(owner, "its call"):
        raise ValueError("no")
    assert caught.value.cause == f"{owner.label} failed in its call: ValueError: no"
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda structure: structure.action_offset, "; did you mean 'action_offsets'?"),
        (lambda structure: structure.masses, "; did you mean 'mass'?"),
        (lambda structure: structure.temperature, ""),
    ],
)
def test_a_misspelt_attribute_of_what_a_plugin_is_given_is_answered_with_the_right_one(
    read: Callable[[BatchStructure], Any], message: str
) -> None:
    nothing = np.zeros(0, np.int64)
    structure = BatchStructure(nothing, np.zeros(1, np.int64), nothing, nothing, nothing)
    with pytest.raises(PluginBrokenError) as caught, blame(Owner.of_unrecorded("reducer 'x'", "reducer"), "its call"):
        read(structure)
    assert caught.value.cause.endswith(message)
    assert ("did you mean" in caught.value.cause) == bool(message)
