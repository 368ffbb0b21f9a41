"""Tests of several folders share a tiny vision-language model and rows with images, made in this process."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from skyrl_engine.testing.ranks.world import preload

preload("skyrl_engine_fsdp.backend", "skyrl_engine_deepspeed.backend", "skyrl_engine_megatron.backend")


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` (a tiny Qwen3-VL, tokenizer and image processor), three pictures and, about them, `train.jsonl` of 12 rows."""
    import transformers

    if Version(transformers.__version__) < Version("5.18") and find_spec("torchvision") is None:
        pytest.skip("NOT TESTED HERE: transformers below 5.18 has no image processors without torchvision")
    from seeing_model import write_seeing_model  # needs image processors

    folder = tmp_path_factory.mktemp("seeing")
    write_seeing_model(folder)
    return folder
