"""The generator keeps every promise that it claims, over a real server."""

import os
from typing import ClassVar

import pytest

from skyrl_engine.testing import GeneratorConformance


@pytest.mark.usefixtures("server_url")
class TestVllm(GeneratorConformance):
    plugin = "vllm"
    options: ClassVar = {"urls": [os.environ["SKYRL_ENGINE_VLLM_URL"]]}
