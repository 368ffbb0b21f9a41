"""A run that this user made goes on, and is evaluated, without a question; and who changes what it names is noticed.

Each test copies one real run, whose reward is in a file that imports another file of its folder.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.cli import options
from skyrl_engine.cli.app import main
from skyrl_engine.config import load, resolve
from skyrl_engine.config.trust.consent import Consent
from skyrl_engine.config.trust.user_key import VARIABLE
from skyrl_engine.errors import PluginBlockedError, UntrustedCodeError

REWARD = "import worth_of_rewards\n\ndef score(text, task):\n    return worth_of_rewards.WORTH\n"


@pytest.fixture(scope="module")
def project(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run/`, `code/reward.py` and `code/worth_of_rewards.py`."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "code").mkdir()
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"go {number}"}) + "\n" for number in range(4)))
    (folder / "code" / "worth_of_rewards.py").write_text("WORTH = 0.25\n")
    (folder / "code" / "reward.py").write_text(REWARD)
    arguments = ["--model", f"{world}/model", "--reward", f"{folder}/code/reward.py:score", "--data", f"{folder}/tasks.jsonl"]
    sizes = ["--steps", "1", "--groups", "2", "--group-size", "2", "--max-tokens", "24", "rl.max_prompt_tokens=64"]
    more = ["run.device=cpu", "rollouts.workers=1", "rl.entropy_metric=false"]
    assert main(["rl", *arguments, *sizes, *more, "--output", str(folder / "run")]) == 0
    return folder


@pytest.fixture
def own(project: Path, tmp_path: Path) -> Path:
    """The run, copied to another place: its code stays where it was."""
    run = tmp_path / "moved" / "run"
    shutil.copytree(project / "run", run)
    before = {file: file.read_text() for file in (project / "code").glob("*.py")}
    yield run
    for file, text in before.items():
        file.write_text(text)
    for file in set((project / "code").glob("*.py")) - before.keys():
        file.unlink()


def evaluate_run(run: Path, *arguments: str) -> int:
    return main(["evaluate", str(run), "--split", "train", "--tasks", "2", *arguments])


def resume_run(run: Path, *more: str) -> Any:
    """Resolve the run's own configuration, as a resume does first of all."""
    return resolve(load(run / "config.toml", [f"run.directory={run}", "checkpoint.resume=true", "rl.steps=2", *more]))


def test_it_is_evaluated_and_goes_on_without_a_question(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "_ask", lambda _lines: pytest.fail("nobody may be asked"))
    assert evaluate_run(own, "--json") == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["metrics"]["evaluation/avg@1"] == 0.25
    assert main(["run", f"{own}/config.toml", f"run.directory={own}", "checkpoint.resume=true", "rl.steps=2"]) == 0
    assert evaluate_run(own) == 0
    # who changes what names no code is not bothered either
    config = own / "config.toml"
    config.write_text(config.read_text().replace("max_tokens = 24", "max_tokens = 20"))
    assert evaluate_run(own) == 0


def test_its_seal_says_which_files_ran(own: Path, project: Path) -> None:
    seal = json.loads((own / "run.json").read_text())["seal"]
    assert set(seal["files"]) == {str(project / "code" / name) for name in ("reward.py", "worth_of_rewards.py")}


def _replace(file: Path, before: str, after: str) -> None:
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))


def _name_reward(run: Path, code: Path, name: str) -> None:
    (code / name).write_text(REWARD)
    _replace(run / "config.toml", "reward.py", name)


def _edit_manifest(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((run / "run.json").read_text())
    change(manifest["seal"])
    (run / "run.json").write_text(json.dumps(manifest))


def _reseal(run: Path, code: Path) -> None:
    """Change the file, and write its new hash into the seal, as an attacker without the key could."""
    import hashlib

    file = code / "reward.py"
    file.write_text(REWARD + "\n")
    _edit_manifest(run, lambda seal: seal["files"].update({str(file): hashlib.sha256(file.read_bytes()).hexdigest()}))


CHANGES: dict[str, Callable[[Path, Path], None]] = {
    "the file": lambda _run, code: (code / "reward.py").write_text(REWARD.replace("WORTH\n", "WORTH + 1\n")),
    "a file that it imports": lambda _run, code: (code / "worth_of_rewards.py").write_text("WORTH = 2.0\n"),
    "its configuration, to another file": lambda run, code: _name_reward(run, code, "other.py"),
    "its configuration, to another function": lambda run, _code: _replace(
        run / "config.toml", "reward.py:score", "reward.py:worth"
    ),
    "its configuration, to a module": lambda run, code: _replace(run / "config.toml", f"{code}/reward.py:score", "os:system"),
    "an option next to it": lambda run, _code: _replace(run / "config.toml", "pass_threshold = 1.0", "pass_threshold = 0.0"),
    "the seal, to another file": _reseal,
    "the seal's signature": lambda run, _code: _edit_manifest(run, lambda seal: seal.update(hmac="0" * 64)),
    "no seal": lambda run, _code: _edit_manifest(run, dict.clear),
    "no run.json": lambda run, _code: (run / "run.json").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(own: Path, project: Path, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    CHANGES[change](own, project / "code")
    assert evaluate_run(own) == 3
    err = capsys.readouterr().err
    assert "environments[0].reward = " in err
    assert "--trust-code" in err
    with pytest.raises(UntrustedCodeError):
        resume_run(own)


def test_a_link_that_leads_elsewhere_now_is_noticed(own: Path, project: Path) -> None:
    code = project / "code"
    (code / "other.py").write_text(REWARD)
    aside = (code / "reward.py").rename(code / "aside.py")
    (code / "reward.py").symlink_to("other.py")
    try:
        with pytest.raises(UntrustedCodeError, match=r"other.py was changed since you made the run"):
            resume_run(own)
    finally:
        (code / "reward.py").unlink()
        aside.rename(code / "reward.py")


@pytest.mark.nightly
def test_who_gives_the_code_again_or_says_so_is_not_asked(own: Path, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "code" / "worth_of_rewards.py").write_text("WORTH = 0.5\n")
    _edit_manifest(own, dict.clear)
    assert evaluate_run(own) == 3
    capsys.readouterr()
    assert evaluate_run(own, "--trust-code", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == 2
    reward = ("--reward", f"{project}/code/reward.py:score")
    # the run's own tasks, or others
    assert evaluate_run(own, *reward) == 0, capsys.readouterr().err
    assert evaluate_run(own, *reward, "--data", f"{project}/tasks.jsonl") == 0
    assert resume_run(own, f"environments.0.reward={project}/code/reward.py:score")


@pytest.mark.parametrize("answer", [True, False])
def test_on_a_terminal_one_plain_question_is_asked(own: Path, answer: bool) -> None:
    _edit_manifest(own, dict.clear)
    questions: list[Sequence[str]] = []

    def ask(lines: Sequence[str]) -> bool:
        questions.append(lines)
        return answer

    consent = Consent(ask=ask)
    for _ in range(2 if answer else 1):
        raw = load(own / "config.toml", [f"run.directory={own}", "checkpoint.resume=true"], consent=consent)
        if answer:
            resolve(raw)
        else:
            with pytest.raises(UntrustedCodeError):
                resolve(raw)
    (lines,) = questions
    assert str(own) in lines[0]
    assert "environments[0].reward = " in lines[1]


def test_another_user_or_machine_does_not_know_it(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "another-key"))
    with pytest.raises(UntrustedCodeError, match="was not made by you on this machine"):
        resume_run(own)
    (tmp_path / "another-key").write_text("x" * 64)
    (tmp_path / "another-key").chmod(0o600)
    with pytest.raises(UntrustedCodeError, match="was not made by you on this machine"):
        resume_run(own)


def test_what_runs_is_what_was_looked_at(own: Path, project: Path) -> None:
    """The file changes between the gate and its import."""
    from skyrl_engine.config import SelectedPlugin
    from skyrl_engine.contracts.kinds.context import FactoryContext

    selected = resume_run(own).plugins["environments[0]"]
    context = FactoryContext(0, 0, 64)
    assert selected.make(context)
    lock = json.loads(json.dumps(selected.to_lock_entry()))
    (project / "code" / "reward.py").write_text(REWARD + "\n")
    for plugin in (selected, SelectedPlugin.from_lock(lock)):
        with pytest.raises(PluginBlockedError, match="is not the one that this run began with"):
            plugin.make(context)
