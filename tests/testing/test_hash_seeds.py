"""PYTHONHASHSEED changes nothing that plugins compute: a process hashes texts, and so orders sets, in its own way; ranks are processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_engine.registry.resolve import Registry

PROGRAM = Path(__file__).with_name("numbers_of_plugins.py")
KINDS = ("loss", "correction", "reducer", "advantage")
FROM_A_SET = """
from skyrl_engine import loss


@loss(needs=("logprobs",))
def mine(tokens, config):
    return -tokens.logprobs * (1 + list({"low", "high", "middle", "far"}).index("low"))
"""


def numbers(seed, plugins, folder):
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), *plugins]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.nightly
def test_no_plugin_of_this_repository_reads_the_order_of_a_set(tmp_path):
    records = [each for each in Registry.discover().records() if each.distribution.startswith("skyrl-engine-")]
    plugins = [f"{each.kind}:{each.name}" for each in records if each.kind in KINDS]
    assert len(plugins) > 30
    assert numbers(1, plugins, tmp_path) == numbers(2, plugins, tmp_path)


@pytest.mark.nightly
def test_one_that_does_is_seen(tmp_path):
    (tmp_path / "mine.py").write_text(FROM_A_SET)
    assert len({numbers(seed, ["loss:./mine.py:mine"], tmp_path) for seed in range(1, 5)}) > 1
