"""A run directory may come from anywhere: exporting it and resuming it run no code that it holds. Each test plants an attack."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_engine.config import ResolvedConfig, load, resolve
from skyrl_engine.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    ModelError,
    PluginBlockedError,
    PluginIncompatibleError,
    PluginNotFoundError,
)
from skyrl_engine.training.export import ExportChoices, export_checkpoint
from skyrl_engine.training.sft.trainer import run_sft
from skyrl_engine.workers.listing import list_files

Configure = Callable[..., ResolvedConfig]

LOSS = """
import skyrl_engine


@skyrl_engine.loss(needs=("logprobs",))
def likelihood(tokens, config):
    return -tokens.logprobs
"""

BACKEND = """
from skyrl_engine_fsdp.plugin import fsdp as mine
"""


class Code:
    """Makes a directory when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Planted code leaves this when it runs."""
    return tmp_path / "code-has-run"


@pytest.fixture
def run(configure: Configure) -> Path:
    return run_sft(configure(training={"steps": 2}), resume=True).directory


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()


def seal(run: Path) -> None:
    """List the checkpoint's files as they are now: who plants something also corrects the sums."""
    checkpoint = checkpoint_of(run)
    (checkpoint / "files.json").unlink()
    (checkpoint / "files.json").write_text(json.dumps(list_files(checkpoint)))


def edit(run: Path, name: str, change: Callable[[Any], None]) -> None:
    path = checkpoint_of(run) / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    seal(run)


def test_no_file_of_a_checkpoint_runs_code_as_a_pickle(configure: Configure, run: Path, trace: Path, tmp_path: Path) -> None:
    """Every file in turn, by an export and by a resume; whatever is refused is refused in the engine's words.

    State of the other backends: their suites hold the promise `no_code_in_checkpoints`.
    """
    checkpoint = checkpoint_of(run)
    resumed = configure(training={"steps": 3}, checkpoint={"at_end": False})
    ran = []
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "files.json"]
    for path in files:
        before = path.read_bytes()
        path.write_bytes(pickle.dumps(Code(trace)))
        seal(run)
        for attempt in (lambda: export_checkpoint(run, tmp_path / "exported"), lambda: run_sft(resumed, resume=True)):
            try:
                attempt()
            except EngineError as error:
                assert "weights_only=False" not in str(error)  # noqa: PT017 - not all files are read by both
        ran += [path] if trace.exists() else []
        path.write_bytes(before)
    assert ran == []
    assert len(files) > 8


def test_the_pickled_listing_of_torch_is_not_even_opened(run: Path, trace: Path, tmp_path: Path) -> None:
    (checkpoint_of(run) / "state" / ".metadata").write_bytes(pickle.dumps(Code(trace)))
    seal(run)
    export_checkpoint(run, tmp_path / "exported")
    assert not trace.exists()


def plant(trace: Path, text: str) -> Callable[[Any], None]:
    """A change of a plugin's lock: its text makes `trace`, and the hash is that of the text."""

    def change(record: dict[str, Any]) -> None:
        record["source_text"] = f"import os\nos.mkdir({str(trace)!r})\n{text}"
        record["sha256"] = hashlib.sha256(record["source_text"].encode()).hexdigest()

    return change


def test_the_text_of_a_loss_in_a_checkpoint_is_run_by_nobody(configure: Configure, trace: Path, tmp_path: Path) -> None:
    """An export needs no loss; a resume takes the file that its own configuration names, and notices that it is another one."""
    loss = tmp_path / "mine.py"
    loss.write_text(LOSS)
    use = {"loss": {"use": f"{loss}:likelihood"}}
    run = run_sft(configure(training={"steps": 2}, **use)).directory
    edit(run, "plugins.lock", lambda locks: plant(trace, LOSS)(locks["loss"]["record"]))
    export_checkpoint(run, tmp_path / "exported")
    assert not trace.exists()
    with pytest.raises(CheckpointError, match="made with other plugins"):
        run_sft(configure(training={"steps": 3}, **use), resume=True)
    assert not trace.exists()


def test_an_export_needs_no_plugin_but_the_backend(configure: Configure, tmp_path: Path) -> None:
    loss = tmp_path / "mine.py"
    loss.write_text(LOSS)
    run = run_sft(configure(training={"steps": 2}, loss={"use": f"{loss}:likelihood"})).directory
    loss.unlink()
    export_checkpoint(run, tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_a_backend_in_a_local_file_is_named_by_the_caller_and_unchanged(configure: Configure, trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "backend.py"
    file.write_text(BACKEND)
    run = run_sft(configure(training={"steps": 2}, backend={"use": f"{file}:mine"})).directory
    with pytest.raises(PluginNotFoundError, match="does not say which file is run") as caught:
        export_checkpoint(run, tmp_path / "exported")
    assert f"--backend {file}:mine" in caught.value.remedy
    export_checkpoint(run, tmp_path / "exported", choices=ExportChoices(backend=f"{file}:mine"))
    file.write_text(f"import os\nos.mkdir({str(trace)!r})\n{BACKEND}")
    with pytest.raises(PluginIncompatibleError, match="--backend names"):
        export_checkpoint(run, tmp_path / "again", choices=ExportChoices(backend=f"{file}:mine"))
    assert not trace.exists()


def test_a_lock_cannot_name_a_module_that_is_no_plugin(run: Path, tmp_path: Path) -> None:
    edit(run, "plugins.lock", lambda locks: locks["backend"]["record"].update(target="antigravity:geohash"))
    with pytest.raises(PluginIncompatibleError, match=r"antigravity:geohash, but points at skyrl_engine_fsdp"):
        export_checkpoint(run, tmp_path / "exported")


REMOTE = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.Odd"}


def test_code_of_a_model_in_a_checkpoint_is_run_only_when_the_caller_says_so(run: Path, trace: Path, tmp_path: Path) -> None:
    """The checkpoint says that its code is trusted, which is not for it to say."""
    (checkpoint_of(run) / "model" / "configuration_odd.py").write_text(f"import os\nos.mkdir({str(trace)!r})\n")
    edit(run, "model/config.json", lambda config: config.update(model_type="odd", auto_map=REMOTE))
    edit(run, "config.json", lambda config: config["model"].update(trust_remote_code=True))
    with pytest.raises(ModelError) as caught:
        export_checkpoint(run, tmp_path / "exported")
    assert "--trust-remote-code" in caught.value.remedy
    assert not trace.exists()
    with pytest.raises(Exception, match="OddConfig"):  # the planted module holds no such class; that it ran is what counts here
        export_checkpoint(run, tmp_path / "exported", choices=ExportChoices(trust_remote_code=True))
    assert trace.exists()


def test_a_resumed_run_directory_does_not_allow_itself_code_of_a_model(configure: Configure) -> None:
    run = run_sft(configure(training={"steps": 2}, model={"trust_remote_code": True})).directory
    again = ["run.directory=" + str(run), "checkpoint.resume=true", "training.steps=3"]
    with pytest.raises(ConfigError, match=r"config.toml:\d+: model.trust_remote_code: a run directory does not allow itself"):
        run_sft(resolve(load(run / "config.toml", again)))
    assert run_sft(resolve(load(run / "config.toml", [*again, "model.trust_remote_code=true"]))).step == 3


def test_a_run_directory_does_not_bring_its_own_plugins(run: Path, trace: Path) -> None:
    (run / "loss.py").write_text(f"import os\nos.mkdir({str(trace)!r})\n{LOSS}")
    config = run / "config.toml"
    config.write_text(config.read_text().replace('use = "cross_entropy"', 'use = "./loss.py:likelihood"'))
    assert "./loss.py" in config.read_text()
    with pytest.raises(PluginBlockedError, match="names code inside it"):
        resolve(load(config, []))
    with pytest.raises(PluginBlockedError, match="lies in the run directory") as caught:
        resolve(load(config, [f"loss.use={run}/loss.py:likelihood"]))
    assert "copy it to another place" in caught.value.remedy
    assert not trace.exists()
    copied = run.with_name("mine.py")
    copied.write_text((run / "loss.py").read_text())
    resolve(load(config, [f"loss.use={copied}:likelihood"]))
    assert trace.exists()


def test_weights_of_a_base_model_that_are_a_pickle_of_code_stop_a_run(
    configure: Configure, material: Path, trace: Path, tmp_path: Path
) -> None:
    import shutil

    base = tmp_path / "base"
    shutil.copytree(material / "model", base)
    (base / "model.safetensors").unlink()
    torch.save({"lm_head.weight": torch.zeros(2), "code": Code(trace)}, base / "pytorch_model.bin")
    with pytest.raises(ModelError, match="could run code while it is read") as caught:
        run_sft(configure(model={"path": str(base)}))
    assert "weights_only" not in str(caught.value)
    assert not trace.exists()
