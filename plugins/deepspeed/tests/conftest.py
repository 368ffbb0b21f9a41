"""The tiny models that this folder's tests train, and what its ranks import before they start."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks are processes of their own and must import the tests' tasks by name

from deepspeed_tasks import save_models

from skyrl_engine.testing.ranks.world import preload

preload("skyrl_engine_deepspeed.backend")


@pytest.fixture(scope="session", autouse=True)
def _quick_collections() -> Iterator[None]:
    """DeepSpeed collects garbage whenever stage 3 starts; what pytest and all modules hold is none, and takes half a second to go through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny models by name."""
    return save_models(tmp_path_factory.mktemp("models"))
