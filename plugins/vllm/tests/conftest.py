"""One real vLLM server per session, on the kit's model: in the environment that SKYRL_ENGINE_VLLM_VENV names, as `nox -s vllm` has it.

VLLM_URL names one that runs already, on the model that VLLM_MODEL holds; for work on these tests.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked_servers
import pytest
from forked_servers import parent_of_servers
from vllm_clients import Opens, Running, serve
from vllm_clients import start_of as start_on_weights

from skyrl_engine.contracts import GeneratorStart, ModelConfig
from skyrl_engine.testing.generators import bench
from skyrl_engine.testing.generators.bench import TinyWeights
from skyrl_engine_vllm.client import ServerClient
from skyrl_engine_vllm.generator import VllmGenerator
from skyrl_engine_vllm.options import VllmOptions
from skyrl_engine_vllm.process import ServerProcess
from skyrl_engine_vllm.transfer import free_port

VENV = os.environ.get("SKYRL_ENGINE_VLLM_VENV")
ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
SMALL = ("--enforce-eager", "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(1 << 26))

PORT = free_port()
ADDRESS = os.environ.setdefault("SKYRL_ENGINE_VLLM_URL", os.environ.get("VLLM_URL") or f"http://127.0.0.1:{PORT}")
"""Known before the server is started, so that options of test classes can name it."""

if VENV is not None:
    # vLLM's attention on a CPU knows no heads of the kit's usual width; this session tests no other generator
    bench.ODD_SIZES["head_dim"] = 32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a real server where there is no vLLM."""
    if VENV is None:
        for item in items:
            if item.path.parent == Path(__file__).parent and item.path.name.startswith("test_real_"):
                item.add_marker(pytest.mark.skip(reason="needs an environment with vLLM: nox -s vllm"))


@pytest.fixture(scope="session")
def routes_forked() -> Iterator[None]:
    """Let `forked_servers.py` stand for a server of `vllm_routes.py`."""
    with parent_of_servers(Path(forked_servers.__file__).with_name("vllm_routes.py")):
        yield


def options_of(**more: object) -> VllmOptions:
    """Options of servers that this machine can run."""
    assert VENV is not None
    return VllmOptions(venv=VENV, arguments=SMALL, environment=ON_CPU, **more)  # type: ignore[arg-type]


def start_of(form: str = "tensors", **more: object) -> GeneratorStart:
    """The start of a generator on the kit's model."""
    model = ModelConfig(str(bench.model_folder()))
    return GeneratorStart(model, "cpu", (), bench.TinyWeights(form), longest=bench.POSITIONS, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server on the kit's model."""
    if os.environ.get("VLLM_URL"):
        shutil.copytree(bench.model_folder(), os.environ["VLLM_MODEL"], dirs_exist_ok=True)
        yield ADDRESS
        return
    process = ServerProcess(0, options_of(port=PORT), start_of(), "tensors", tmp_path_factory.mktemp("logs"), None)
    process.launch()
    client = ServerClient(process.url, None, seconds=30.0)
    try:
        process.wait_until_healthy(client)
        yield process.url
    finally:
        client.close()
        process.end()


@pytest.fixture(scope="session")
def own_servers() -> Callable[..., VllmOptions]:
    """`own_servers(servers=2, ...)`: options of servers that the generator starts."""
    return options_of


@pytest.fixture(scope="session")
def starts() -> Callable[..., GeneratorStart]:
    """`starts(form, folder=...)`: starts on the kit's model."""
    return start_of


@pytest.fixture(scope="module")
def url(routes_forked: None) -> Iterator[str]:
    """A server for all tests that leave it well."""
    address, process = serve()
    yield address
    process.kill()
    process.wait()


@pytest.fixture
def opens(url: str) -> Iterator[Opens]:
    """`opens(urls=..., form=..., **options)`: a started generator and its weights, closed in the end."""
    opened: list[VllmGenerator] = []

    def open_one(*, form: str = "tensors", start: dict[str, Any] | None = None, **options: Any) -> Running:
        where = {} if {"urls", "command"} & options.keys() else {"urls": (url,)}
        generator = VllmGenerator(VllmOptions(**where, **options))
        opened.append(generator)
        weights = TinyWeights(form)  # type: ignore[arg-type]
        generator.start(start_on_weights(weights, **(start or {})))
        return generator, weights

    yield open_one
    for generator in opened:
        generator.close()
