"""A server with a tiny model, on a port of its own."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine_tinker.app import application
from skyrl_engine_tinker.settings import Settings

KEY = "tml-test"


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A configuration file with one tiny model, `tiny`."""
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "model")
    write_tokenizer(folder / "model", ["a few words"])
    (folder / "serve.toml").write_text(
        '[serve]\nhole_seconds = 0.5\nlongest = 160\nbody_bytes = 1000000\n\n[serve.models]\ntiny = "model"\n'
    )
    return Settings.read(folder / "serve.toml")


@pytest.fixture(scope="session")
def address(settings: Settings) -> Iterator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(application(settings, KEY), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)
