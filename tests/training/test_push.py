"""`push`: the hub's own client against a server that speaks its routes; nothing leaves this machine."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from attrs import evolve

from skyrl_engine import __version__
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.errors import ConfigError, EngineError
from skyrl_engine.report.run_facts import read_run
from skyrl_engine.training.model_card import write_model_card
from skyrl_engine.training.push import find_model_to_push, push_model
from skyrl_engine.training.sft.trainer import run_sft

# the client's own use of httpx
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

TOKEN = "hf_aSecretOfThisTest"
REPOSITORY = "ada/sums"


class StandIn:
    """Repositories by name: whether they are private, and their files. A wrong token is refused."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[list[str]] = []
        self.large: dict[str, bytes] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._respond(b"")

            def do_POST(self) -> None:
                self._respond(self._body())

            def do_PUT(self) -> None:
                outer.large[self.path.rpartition("/")[2]] = self._body()
                self._send(200, {})

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def _respond(self, body: bytes) -> None:
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self._send(401, {"error": "Invalid username or password."})
                else:
                    self._send(*outer.answer(self.path.partition("?")[0], body))

            def _send(self, status: int, answer: Any) -> None:
                content = json.dumps(answer).encode()
                self.send_response(status)
                if status == 404:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.private[name] = asked.get("private", asked.get("visibility") == "private")
            self.files[name] = {}
            return 200, {"url": f"{self.address}/{name}"}
        if found := re.fullmatch(r"/(\w+/\w+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            upload = {each["oid"]: {"upload": {"href": f"{self.address}/large/{each['oid']}"}} for each in objects}
            return 200, {"objects": [{**each, "actions": upload[each["oid"]]} for each in objects], "transfer": "basic"}
        found = re.fullmatch(r"/api/models/(\w+/\w+)(/.*)?", path)
        assert found is not None, path
        name, route = found.groups()
        if name not in self.files:
            return 404, {"error": "Repository not found"}
        if route is None or route == "/revision/main":
            return 200, {"id": name, "siblings": [{"rfilename": each} for each in self.files[name]]}
        if route == "/tree/main":
            return 200, [{"type": "file", "path": each, "size": 1, "oid": "0"} for each in self.files[name]]
        if route == "/preupload/main":
            modes = {True: "lfs", False: "regular"}
            paths = [each["path"] for each in json.loads(body)["files"]]
            files = [{"path": each, "uploadMode": modes[each.endswith(".safetensors")], "shouldIgnore": False} for each in paths]
            return 200, {"files": files}
        assert route == "/commit/main", route
        self._commit(name, [json.loads(line) for line in body.splitlines()])
        return 200, {
            "commitUrl": f"{self.address}/{name}/commit/{len(self.commits):040x}",
            "commitOid": f"{len(self.commits):040x}",
        }

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                assert hashlib.sha256(self.large[value["oid"]]).hexdigest() == value["oid"]
                self.files[name][value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[name][value["path"]]
        self.commits.append([line["key"] for line in lines])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    thread = Thread(target=stand_in.server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", stand_in.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # the protocol of large files by HTTP; Xet's speaks to servers of its own
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def run(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps over a file and its model."""
    folder = tmp_path_factory.mktemp("pushed")
    tables = {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl"), "cache": str(folder / "cache")},
        "training": {"steps": 2, "batch_size": 4},
        "optimizer": {"learning_rate": 0.0125},
        "run": {"directory": str(folder / "sums"), "device": "cpu", "report": False},
    }
    run_sft(resolve(from_dict(tables, "test")))
    return folder / "sums"


def test_a_model_is_pushed_with_a_card_of_its_run(hub: StandIn, run: Path, material: Path) -> None:
    assert push_model(find_model_to_push(run), REPOSITORY) == f"{hub.address}/{REPOSITORY}"
    assert hub.private == {REPOSITORY: True}
    files = hub.files[REPOSITORY]
    card = files.pop("README.md").decode()
    assert files == {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    assert len(hub.commits) == 1

    head = yaml.safe_load(card.split("---")[1])
    assert (head["library_name"], head["pipeline_tag"]) == ("transformers", "text-generation")
    assert {"skyrl-engine", "sft"} <= set(head["tags"])
    for row in (
        *("- `train.jsonl`", "| `optimizer.learning_rate` | `0.0125` |", "2 of 2 optimizer steps"),
        *(f"`skyrl-engine-losses:cross_entropy {__version__}`", "| `loss` |"),
    ):
        assert row in card
    written = [path for path in run.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)
    assert not any(text in card for text in (TOKEN, str(material), str(run.parent), "run.directory"))


def test_a_card_of_adapters_names_their_library_and_their_base(run: Path) -> None:
    facts = read_run(run)
    config = {**facts.manifest["config"], "model": {**facts.manifest["config"]["model"], "path": "ada/base"}}
    card = write_model_card(evolve(facts, manifest={**facts.manifest, "config": config}), adapters=True)
    head = yaml.safe_load(card.split("---")[1])
    assert (head["library_name"], head["base_model"]) == ("peft", "ada/base")


def test_a_repository_is_written_over_only_when_asked(hub: StandIn, run: Path) -> None:
    found = find_model_to_push(run)
    push_model(found, REPOSITORY, public=True)
    assert hub.private == {REPOSITORY: False}
    hub.files[REPOSITORY] |= {"model-00001-of-00002.safetensors": b"old", "LICENSE": b"mine"}
    for options in ({}, {"public": True}, {"public": True, "update": True}):
        with pytest.raises(ConfigError, match="exists"):
            push_model(found, REPOSITORY, **options)
    assert len(hub.commits) == 1
    push_model(found, REPOSITORY, update=True)
    assert len(hub.commits) == 2
    # weights of another export would be loaded beside these; what people wrote stays
    assert set(hub.files[REPOSITORY]) == {"README.md", "LICENSE", *(path.name for path in (run / "model").iterdir())}


def test_what_cannot_be_pushed_is_refused(hub: StandIn, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no exported model"):
        find_model_to_push(run, tmp_path / "empty")
    (tmp_path / "empty" / "config.json").symlink_to(run / "model" / "config.json")
    with pytest.raises(ConfigError, match="is a link"):
        find_model_to_push(run, tmp_path / "empty")
    found = find_model_to_push(run)
    for name in ("sums", "a b/c", "a/b/c"):
        with pytest.raises(ConfigError, match="REPOSITORY"):
            push_model(found, name)
    monkeypatch.setenv("HF_TOKEN", "hf_another_token")
    with pytest.raises(EngineError, match="hub did not take") as caught:
        push_model(found, REPOSITORY)
    assert "HF_TOKEN" in caught.value.remedy
    assert "hf_another_token" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        push_model(found, REPOSITORY)
    assert hub.commits == []
