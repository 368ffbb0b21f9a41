"""Files that configurations name: rewards, tools, tasks, and a gymnasium environment."""

import sys
from pathlib import Path

import pytest

MATERIAL = Path(__file__).with_name("material")
sys.path.append(str(MATERIAL))


@pytest.fixture
def material() -> Path:
    return MATERIAL
