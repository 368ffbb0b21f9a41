"""A client sees the server from another machine: no path of the server reaches it, and what the server answers works without its folders."""

import json
import os
import re
import string
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from skyrl_engine import UnsupportedError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine_tinker.redaction import HIDDEN, ErrorRedactor
from skyrl_engine_tinker.settings import Settings

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "drive-it-from-your-own-loop.md"
NAME = "Qwen/Qwen3-0.6B"

ELSEWHERE = """
import os, sys

hidden = os.path.realpath(sys.argv[1])

def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes, os.PathLike)):
        if os.path.realpath(os.fsdecode(arguments[0])).startswith(hidden):
            raise OSError(f"this machine has no {arguments[0]}")

sys.addaudithook(refuse)
exec(compile(sys.stdin.read(), "example", "exec"))
print("done")
"""
"""A machine on which the server's folder is not there."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Settings of a server whose model is in a folder of its own, under a name of the hub."""
    folder = tmp_path_factory.mktemp("secret-server")
    write_model(folder / "models" / "small")
    write_tokenizer(folder / "models" / "small", [string.printable], size=128)
    (folder / "serve.toml").write_text(f'[serve]\nlongest = 160\n[serve.models]\n"{NAME}" = "models/small"\n')
    return Settings.read(folder / "serve.toml")


@pytest.mark.nightly
def test_the_examples_of_the_page_run_on_another_machine(served, serving_of, tmp_path):
    write_tokenizer(tmp_path / NAME, [string.printable], size=128)  # in the place of the hub
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    examples = "\n".join(blocks[:2]).replace("range(12)", "range(2)").replace("range(10)", "range(2)")
    assert "importance_sampling" in examples
    assert "cross_entropy" in examples
    with serving_of(served) as client:
        environment = {**os.environ, "TINKER_BASE_URL": client.address, "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}
        command = [sys.executable, "-c", ELSEWHERE, str(served.directory.parent)]
        process = subprocess.run(
            command, input=examples, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
    assert process.returncode == 0, process.stderr
    assert "done" in process.stdout


def test_get_info_names_the_hub(served, serving_of):
    with serving_of(served) as client:
        session = client.post("create_session", {})[1]["session_id"]
        client.complete("create_model", {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 2}})
        info = client.post("get_info", {"model_id": f"{session}:train:0"})[1]
        assert info["model_data"] == {"model_name": NAME, "tokenizer_id": NAME}
        saved = client.complete("save_weights_external", {"model_id": f"{session}:train:0", "seq_id": 1, "path": "out"})
        assert "path" in saved, saved
        client.finish(session)
    (written,) = served.directory.glob("*/external_weights/out/model/adapter_config.json")
    assert json.loads(written.read_text())["base_model_name_or_path"] == NAME


@pytest.mark.parametrize(
    ("line", "tokenizer"),
    [
        ('"org/name" = "org/other"', "org/other"),
        ('"org/name" = "here"', "org/name"),
        ('"org/name" = { path = "here", tokenizer = "org/tokenizer" }', "org/tokenizer"),
        ('"org/name" = { path = "org/other" }', "org/other"),
    ],
)
def test_a_client_loads_the_tokenizer_from_the_hub(tmp_path, line, tokenizer):
    (tmp_path / "here").mkdir()
    (tmp_path / "serve.toml").write_text(f"[serve.models]\n{line}\n")
    assert Settings.read(tmp_path / "serve.toml").tokenizer_of("org/name") == tokenizer


def test_an_old_key_is_read_with_a_warning_and_refused_beside_the_new_one(tmp_path, caplog):
    file = tmp_path / "serve.toml"
    file.write_text('[serve]\nhole_seconds = 2.5\n[serve.models]\na = "b"\n')
    assert Settings.read(file).serve.gap_timeout_s == 2.5
    assert "serve.hole_seconds is called serve.gap_timeout_s" in caplog.text
    file.write_text('[serve]\nhole_seconds = 2.5\ngap_timeout_s = 3\n[serve.models]\na = "b"\n')
    with pytest.raises(UnsupportedError, match=r"hole_seconds and gap_timeout_s.*Remove serve\.hole_seconds"):
        Settings.read(file)


@pytest.mark.parametrize("value", ["{ tokenizer = 'x' }", "{ path = 'x', tokeniser = 'y' }", "{ path = 'x', tokenizer = 1 }", "1"])
def test_a_model_that_is_described_wrongly_is_refused(tmp_path, value):
    (tmp_path / "serve.toml").write_text(f"[serve.models]\na = {value}\n")
    with pytest.raises(UnsupportedError, match=r"serve\.models\.a"):
        Settings.read(tmp_path / "serve.toml")


@pytest.mark.parametrize(
    ("words", "redacted"),
    [
        ("{model}/config.json is damaged", "{name} is damaged"),
        ("cannot read {model}: no such file", "cannot read {name}: no such file"),
        ("the checkpoint {directory}/a-train-0/weights/x is damaged", "the checkpoint [serve.directory] is damaged"),
        (
            "the adapter {directory}/{model_id}-train-0/weights/x/model is damaged",
            "the adapter tinker://{model_id}:train:0/weights/x is damaged",
        ),
        ("[Errno 2] No such file or directory: '/home/ann/my models/x.bin'", "[Errno 2] No such file or directory: '[]'"),
        ("see /usr/lib/python3/x.py, line 3", "see [], line 3"),
        ("file:///srv/x and ~/x", "[] and []"),
        ("tinker://a:train:0/weights/x is not there", "tinker://a:train:0/weights/x is not there"),
        ("1/2 and/or a /", "1/2 and/or a /"),
    ],
)
def test_paths_are_left_out_of_words(served, words, redacted):
    values = {"model": served.serve.models[NAME], "directory": served.directory, "name": NAME, "model_id": "5a" * 16}
    assert ErrorRedactor(served).redact(words.format(**values)) == redacted.format(**values).replace("[]", HIDDEN)


def test_errors_of_a_damaged_server_hold_no_path(served, serving_of, tmp_path):
    """The model's folder is gone, or damaged, when a client asks for it: by futures and at once."""
    secret = str(served.directory.parent)
    for what in ("nothing", "damaged"):
        folder = tmp_path / what
        write_model(folder / "small")
        settings = attrs.evolve(served, serve=attrs.evolve(served.serve, models={NAME: str(folder / "small")}))
        with serving_of(settings) as client:
            for file in (folder / "small").iterdir():
                file.unlink() if what == "nothing" else file.write_text("{")
            session = client.post("create_session", {})[1]["session_id"]
            request = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 2}}
            opening = client.complete("create_model", request)
            answers = [opening, client.post("get_info", {"model_id": f"{session}:train:0"})]
            answers.append(client.complete("optim_step", {"model_id": f"{session}:train:0", "seq_id": 1, "adam_params": {}}))
            path = f"tinker://{session}:train:0/weights/x"
            answers.append(client.post("weights_info", {"tinker_path": path}))
            answers.append(client.post("create_sampling_session", {"session_id": session, "model_path": path}))
            assert "error" in opening
            for text in map(json.dumps, answers):
                assert secret not in text
                assert str(tmp_path) not in text
            client.finish(session)
