"""The kit's facade offers every name that it lists, and importing it brings nothing heavy."""

import subprocess
import sys

import pytest

import skyrl_engine.testing as kit


@pytest.mark.parametrize("name", kit.__all__)
def test_every_name_is_there(name):
    assert getattr(kit, name).__name__ == name


def test_it_lists_what_it_offers():
    assert kit.__all__ == dir(kit) == sorted(kit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Suite'"):
        kit.Suite  # noqa: B018 - looking it up is the test


def test_importing_it_brings_nothing_heavy():
    code = "import skyrl_engine.testing, sys; sys.exit(bool({'torch', 'hypothesis', 'pytest', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
