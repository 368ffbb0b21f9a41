"""Indexes and wheels are read from files, by https, and by http from this machine alone."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from skyrl_engine.catalogue import download
from skyrl_engine.catalogue.download import IndexPlace
from skyrl_engine.errors import PluginIndexError


class Routes(BaseHTTPRequestHandler):
    """Answers `/files/NAME` with its content, and `/to/ADDRESS` with a redirect there."""

    content = b"a wheel"

    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path.startswith("/files/"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.content)
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server on this machine."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://acme.example/index.json", "whoever is on the way could change what http brings"),
        ("http://127.0.0.1.acme.example/index.json", "whoever is on the way"),
        ("http://localhost@acme.example/index.json", "a user or a password"),
        ("https://ada:secret@acme.example/index.json", "a user or a password"),
        ("ftp://acme.example/index.json", "whoever is on the way"),
        ("data://text/plain", "whoever is on the way"),
        ("https:///index.json", "is no address"),
        ("https://acme.example/a b", "is no address"),
        ("https://acme.example:port/", "is no address"),
        ("https://[::1", "is no address"),
        ("file://acme.example/index.json", "names another machine"),
    ],
)
def test_an_address_that_cannot_be_trusted_is_refused(text: str, words: str) -> None:
    with pytest.raises(PluginIndexError, match=words) as caught:
        IndexPlace.of(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["https://acme.example/i.json", "http://localhost:8000/i.json", "http://[::1]/i.json", "http://127.8.0.1/"]
)
def test_https_and_this_machine_are_taken(text: str) -> None:
    assert IndexPlace.of(text).file is None


def test_a_path_and_a_file_address_are_one(tmp_path: Path) -> None:
    index = tmp_path / "an index.json"
    index.write_text("{}")
    assert IndexPlace.of(str(index)).read_index() == IndexPlace.of(index.as_uri()).read_index() == b"{}"


def test_a_wheel_is_copied_from_beside_the_index(server: str, tmp_path: Path) -> None:
    place = IndexPlace.of(f"{server}/files/index.json?token=1")
    assert place.read_index() == Routes.content
    place.copy_wheel("acme-1.0+cpu-py3-none-any.whl", len(Routes.content), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == Routes.content


@pytest.mark.parametrize("size", [3, 6, 8, 2**30])
def test_a_wheel_of_another_size_is_refused(server: str, tmp_path: Path, size: int) -> None:
    with pytest.raises(PluginIndexError, match=f"and {size} were verified"):
        IndexPlace.of(f"{server}/files/index.json").copy_wheel("a.whl", size, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size <= size + 1


@pytest.mark.parametrize(
    "target", ["http://acme.example/index.json", "https://acme.example/index.json", "ftp://acme.example/", "file:///etc/passwd"]
)
def test_a_redirect_to_elsewhere_is_not_followed(server: str, target: str) -> None:
    with pytest.raises(PluginIndexError):
        IndexPlace.of(f"{server}/to/{target}").read_index()


def test_a_redirect_on_the_same_terms_is_followed(server: str) -> None:
    assert IndexPlace.of(f"{server}/to/{server}/files/index.json").read_index() == Routes.content


def test_what_is_not_there_or_too_large_is_said(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginIndexError, match="answers with 404"):
        IndexPlace.of(f"{server}/index.json").read_index()
    with pytest.raises(PluginIndexError, match="No such file"):
        IndexPlace.of(str(tmp_path / "index.json")).read_index()
    with pytest.raises(PluginIndexError, match="directory"):
        IndexPlace.of(str(tmp_path)).read_index()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PluginIndexError, match="is no file"):
        IndexPlace.of(str(tmp_path / "pipe")).read_index()
    monkeypatch.setattr(download, "LARGEST_INDEX", 3)
    with pytest.raises(PluginIndexError, match="more than 3 bytes"):
        IndexPlace.of(f"{server}/files/index.json").read_index()
