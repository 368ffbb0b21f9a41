"""Every command of README runs as it is written, in the order of the page, on what a demo of few steps left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
LINES = [
    line
    for block in re.findall(r"(?ms)^```sh\n(.*?)^```", README)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]
SLOW = re.compile(r"skyrl-engine (prove|diff-backends|plugins verify|.* --backend megatron)")
"""Commands of proofs, a minute each, and a run on ranks of Ray: by day tests of their own hold what they do."""
DRY = {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}
"""Environment of pip: it builds what the line names and installs nothing into the environment of these tests. "0" is pip's way to say yes."""

pytestmark = [pytest.mark.example, pytest.mark.timeout(280)]


def case(line):
    command = line.partition("#")[0].strip()
    return pytest.param(command, id=command[:60], marks=[pytest.mark.nightly] if SLOW.match(command) else [])


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks as the clone does after `nox -s demo`: an environment, and a demo of few steps in runs/."""
    pytest.importorskip("reasoning_gym")
    folder = tmp_path_factory.mktemp("clone")
    (folder / ".venv").symlink_to(sys.prefix)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "skyrl_engine", "plugins"):
        (folder / name).symlink_to(ROOT / name)
    subprocess.run(["bash", "-ec", "source .venv/bin/activate && skyrl-engine demo --steps 12 --quiet"], cwd=folder, check=True)
    return folder


def test_there_are_commands():
    assert len(LINES) > 15
    assert sum(line.startswith("skyrl-engine ") for line in LINES) > 12


@pytest.mark.parametrize("command", [case(line) for line in LINES])
def test_a_command_runs(clone, command):
    if "nox -s" in command:
        pytest.skip("sessions are what this test stands on; conftest.py checks that they exist")
    in_clone = command.startswith(("source ", "python -m pip "))
    line = command if in_clone else f"source .venv/bin/activate && cd runs/demo && {command}"
    environment = {**os.environ, **DRY}
    if " serve " in command:
        serve(line.replace("skyrl-engine serve", "exec skyrl-engine serve"), clone, environment)
        return
    if "pip install" in line:
        line = f"source .venv/bin/activate && {line}"
    done = subprocess.run(["bash", "-ec", line], cwd=clone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def serve(line, clone, environment):
    """Start the server, wait until it listens, and end it as Ctrl-C does."""
    log = clone / "serve.log"
    with log.open("w") as output:
        server = subprocess.Popen(["bash", "-ec", line], cwd=clone, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + 120
            while not re.search(r"https?://", log.read_text()) and server.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
            assert server.poll() is None, log.read_text()
            assert re.search(r"https?://", log.read_text())
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0, log.read_text()
        finally:
            server.kill()
