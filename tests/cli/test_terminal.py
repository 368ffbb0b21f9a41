"""Data, models, files and plugins do nothing to a terminal or a log: an attack on every command, from every side."""

import ast
import json
import logging
import re
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

import click
import pytest
from rl_runs import write_world

from skyrl_engine.cli.app import app, main
from skyrl_engine.cli.command import every_command
from skyrl_engine.cli.render import show_facts, show_heading, show_lines, show_progress, show_table
from skyrl_engine.cli.terminal import echo, echo_json
from skyrl_engine.run.log import logging_to
from skyrl_engine.visible import in_quotes, visible, visible_line

NASTY = "x\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202egnp\u2066\r\b\x00y"
"""Renames the window, clears the screen, colours by an escape and by C1, turns the order of letters, goes back, ends a text."""

CONTROLS = {character for character in NASTY if unicodedata.category(character) in ("Cc", "Cf")}
WORDS = NASTY.replace("\x00", "")  # what a file's name and an argument can hold


def controls_in(text: str) -> set[str]:
    return {
        character
        for character in text
        if character not in "\n\t" and (unicodedata.category(character) in ("Cc", "Cs") or character in CONTROLS)
    }


def test_every_control_character_is_written_out_and_nothing_else_is() -> None:
    for number in range(0x110000):
        character = chr(number)
        wanted = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(character) in (
            *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"),
        )
        wanted = (wanted or number in (0x61C, 0x200E, 0x200F)) and character not in "\n\t"
        assert (visible(character) != character) == wanted, hex(number)
        assert visible(character).isascii() or visible(character) == character
    assert visible("a\n\tb ü 漢字 👩\u200d🔬") == "a\n\tb ü 漢字 👩\u200d🔬"
    assert visible_line("a\nb\tc") == r"a\nb\tc"


def test_json_and_toml_read_back_to_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for ascii_alone in (True, False):
        echo_json({NASTY: [NASTY, "\udc9b"]}, ensure_ascii=ascii_alone)
        output = capsys.readouterr().out
        assert controls_in(output) == set()
        assert json.loads(output) == {NASTY: [NASTY, "\udc9b"]}
    from skyrl_engine.config.report import to_toml

    text = in_quotes(to_toml({"table": {NASTY: NASTY}}))
    assert controls_in(text) == set()
    assert tomllib.loads(text) == {"table": {NASTY: NASTY}}


def test_whatever_is_shown_is_made_visible(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (False, True):
        monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
        echo(NASTY)
        echo(NASTY, err=True)
        show_table([NASTY], [[NASTY]])
        show_facts({NASTY: NASTY})
        show_heading(NASTY)
        show_lines([NASTY])
        with show_progress(quiet=True) as display:
            display.warning(NASTY)
        output = capsys.readouterr()
        # rich's own colours stay
        assert controls_in(re.sub(r"\x1b\[[0-9;]*m", "", output.out + output.err)) == set()
        assert ("\x1b[1m" in output.out) == terminal
        assert output.out.count("owned") == 7
        assert output.err.count("owned") == 2


def test_a_name_on_several_lines_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_heading("name\nerror: forged")
    show_table(["a"], [["name\nerror: forged"]])
    assert not any(line.startswith("error") for line in capsys.readouterr().out.splitlines())


def test_a_log_and_a_warning_without_one_are_visible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("skyrl_engine.test")
    with logging_to(tmp_path / "run.log"):
        try:
            raise ValueError(NASTY)
        except ValueError:
            logger.exception("failed with %s", NASTY)
    text = (tmp_path / "run.log").read_text()
    assert text.count("owned") == 3 - 1
    assert controls_in(text) == set()


def test_commands_write_by_one_function_alone() -> None:
    """By `terminal.py`, or by `render.py`, whose console makes everything visible."""
    folder = Path(click.__file__).parent, Path(app.callback.__code__.co_filename).parent  # type: ignore[union-attr]
    writers = {}
    for file in folder[1].rglob("*.py"):
        calls = {
            node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
        }
        used = {name for name in ("print", "secho", "pprint", "echo_via_pager") if name in calls}
        text = file.read_text()
        used |= {"click.echo"} if "click.echo(" in text else set()
        used |= {"write"} if "sys.stdout.write" in text or "sys.stderr.write" in text else set()
        writers[file.relative_to(folder[1]).as_posix()] = used
    assert {file: used for file, used in writers.items() if used} == {"terminal.py": {"click.echo"}, "render.py": {"print"}}


# --- every command ------------------------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, list[list[str]]] = {
    "demo": [["--model", WORDS], ["--output", WORDS]],
    "init": [[f"{WORDS}.toml", "--trainer", "sft", "--model", WORDS, "--data", WORDS], [WORDS], ["a.toml", "--trainer", WORDS]],
    "run": [["{file}"], [f"{WORDS}.toml"], ["{file}", f"{WORDS}.b=1"], ["{file}", "--locked"], ["--from", WORDS]],
    "lock": [["{file}"], [f"{WORDS}.toml"], ["{file}", f"{WORDS}.b=1"]],
    "plan": [["{file}"], [f"{WORDS}.toml"], ["{file}", "--json"], ["{file}", "--gpu-memory", WORDS]],
    "sft": [["--model", WORDS, "--data", WORDS], [f"--{WORDS}"]],
    "preference": [["--model", WORDS, "--data", WORDS], ["--model", WORDS, "--data", "tasks.jsonl", f"data.{WORDS}=1"]],
    "reward-model": [["--model", WORDS, "--data", WORDS]],
    "distill": [["--model", WORDS, "--teacher", WORDS, "--data", WORDS]],
    "rl": [["--model", WORDS, "--env", WORDS], ["--model", WORDS, "--reward", f"{WORDS}.py:f", "--data", WORDS]],
    "prove": [["--loss", WORDS], ["--plant", WORDS], ["{file}", f"loss.{WORDS}=1"], [WORDS]],
    "diff-backends": [["--b", WORDS], ["{file}", "--b", "fsdp"]],
    "plugins index": [[WORDS], [".", "--options", WORDS]],
    "plugins install": [[WORDS, "--index", WORDS], [WORDS, "--index", f"https://{WORDS}"], [WORDS]],
    "plugins list": [["--kind", WORDS]],
    "plugins new": [[WORDS, WORDS], ["loss", WORDS]],
    "plugins search": [[WORDS, "--index", WORDS], [WORDS, "--index", "{file}"], [WORDS]],
    "plugins show": [[WORDS], [f"loss:{WORDS}"], ["{plugin}"]],
    "plugins verify": [[WORDS], ["{plugin}"], ["{broken}"]],
    "config check": [["{file}"], [WORDS]],
    "config show": [["{file}"], [f"model.path={WORDS}", "--json"], [f"model.path={WORDS}"]],
    "config migrate": [[WORDS], ["{yaml}", "--trainer", "sft"], ["{yaml}", WORDS], ["{file}"]],
    "config schema": [[WORDS]],
    "data preview": [
        ["--model", "{model}", "--data", "{rows}"],
        ["--model", "{model}", "--data", "{rows}", "--json"],
        ["--model", WORDS],
    ],
    "env list": [[WORDS]],
    "env show": [[WORDS], ["{env}"], ["{env}", "--json"], ["{broken}"]],
    "env try": [[WORDS], ["{env}", "--answer", WORDS], ["{env}", "--answer", WORDS, "--json"], ["{env}", "--answer", "raise"]],
    "rollouts list": [["{run}"], ["{run}", "--json"], [WORDS]],
    "rollouts show": [["{run}"], ["{run}", "--failed"], ["{run}", "--tokens"], ["{run}", "--best"], [WORDS]],
    "rollouts report": [["{run}"], [WORDS]],
    "rollouts diff": [["{run}", "--steps", "1", "2"], [WORDS, "--steps", "1", "2"]],
    "rollouts export": [["{run}", "--to", "jsonl", "--out", f"{WORDS}.jsonl"], [WORDS, "--to", "jsonl", "--out", "x"]],
    "rollouts check": [["{run}"], [WORDS]],
    "chat": [[WORDS], ["{model}", "--prompt", WORDS], ["{model}", "--template", "none", "--prompt", WORDS, "--max-tokens", "8"]],
    "evaluate": [[WORDS], ["{run}", "--split", "train", "--tasks", "2"], ["{run}", "--set", WORDS]],
    "export": [["{run}", WORDS], [WORDS, "out"]],
    "push": [["{run}", WORDS], [WORDS, "ada/words"], ["{run}", "ada/words", "--model", WORDS]],
    "runs list": [["{run}"], ["{run}", "--json"], [WORDS]],
    "runs show": [["{run}"], ["{run}", "--json"], [WORDS]],
    "runs diff": [["{run}", "{run}"], ["{run}", WORDS, "--json"]],
    "runs watch": [["{run}"], [WORDS], ["{run}", "--metric", WORDS]],
    "runs fetch": [[WORDS, "out"], [f"memory://{WORDS}", WORDS]],
    "runs prune": [
        ["{run}", "--keep-last", "1", "--yes"],
        ["{run}", "--keep-best", "1", "--metric", WORDS],
        [WORDS, "--older-than", WORDS],
    ],
    "doctor": [["--no-self-test", "--report", WORDS, "--run", "{run}"], ["--report", "--run", WORDS]],
    "report": [["{run}"], [WORDS], ["{run}", "--output", WORDS], ["{run}", "--script", WORDS]],
    "compare-objectives": [["{run}", "--step", "1", "--loss", WORDS], [WORDS, "--step", "1", "--loss", "clip"]],
    "serve": [[WORDS], ["{file}"]],
}
"""Command lines by command. What is in braces is a file whose content attacks."""

ENVIRONMENT = f"""
import skyrl_engine
from skyrl_engine import hookimpl
from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task

NASTY = {NASTY!r}


class Episode:
    def begin(self):
        return ()

    def step(self, action):
        if action.text == "raise":
            raise ValueError(NASTY)
        return StepResult(0.5, parts={{NASTY: 0.5}}, info={{"answer": NASTY}})

    def close(self):
        pass


class World:
    claims = EnvironmentClaims(version=NASTY)

    def tasks(self, split):
        return [Task(f"{{number}} {{NASTY}}", ({{"role": "user", "content": f"go {{NASTY}}"}},), data={{NASTY: NASTY}}) for number in range(4)]

    def open(self, task, seed):
        return Episode()


class Plugin:
    def __init__(self, works):
        self.works = works

    @hookimpl
    def skyrl_engine_make_environment(self):
        if not self.works:
            raise RuntimeError(NASTY)
        return World()


world, broken = Plugin(True), Plugin(False)


@skyrl_engine.loss(needs=("logprobs",))
def likelihood(tokens, config):
    raise ValueError(NASTY)
"""

SCORE = f"""
from skyrl_engine.contracts import StepResult

NASTY = {NASTY!r}
calls = 0


def score(text, task):
    if task.key.startswith("0"):
        raise ValueError(NASTY)
    return StepResult(len(text) / 50, parts={{NASTY: 1.0}}, info={{"answer": NASTY}})
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files that attack, and a run of two steps whose tasks and rewards do."""
    folder = tmp_path_factory.mktemp("terminal")
    write_world(folder)
    (folder / "env.py").write_text(ENVIRONMENT)
    (folder / "score.py").write_text(SCORE)
    rows = [{"key": f"{number} {NASTY}", "prompt": "go 1"} for number in range(6)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": f"a {NASTY}", "completion": NASTY}) + "\n")
    (folder / "nasty.toml").write_text(f'"{json.dumps(NASTY)[1:-1]}" = 1\n[model]\npath = "{json.dumps(NASTY)[1:-1]}"\n')
    (folder / "nasty.yaml").write_text(json.dumps({"model_name_or_path": NASTY, NASTY: NASTY, "lora_r": {NASTY: 1}}))
    run = folder / f"run {WORDS}".replace("/", "")
    sizes = ["--steps", "2", "--groups", "3", "--group-size", "2", "--max-tokens", "24", "rl.max_prompt_tokens=64"]
    more = ["run.device=cpu", "rollouts.workers=1", "rollouts.retries=0", "rollouts.max_failure_share=1", "rl.entropy_metric=false"]
    tasks = ["--reward", f"{folder}/score.py:score", "--data", f"{folder}/tasks.jsonl"]
    assert main(["rl", "--model", f"{folder}/model", *tasks, *sizes, *more, "--output", str(run)]) == 0
    named = {name: str(folder / name) for name in ("model",)}
    return {
        **named,
        "run": str(run),
        "rows": str(folder / "rows.jsonl"),
        "file": str(folder / "nasty.toml"),
        "yaml": str(folder / "nasty.yaml"),
        "env": f"{folder}/env.py:world",
        "broken": f"{folder}/env.py:broken",
        "plugin": f"loss:{folder}/env.py:likelihood",
    }


def test_every_command_has_its_attacks() -> None:
    names = {
        " ".join(name[1:]) for name, subcommand in every_command(app, ("skyrl-engine",)) if not isinstance(subcommand, click.Group)
    }
    assert set(ARGUMENTS) == names


def test_a_run_leaves_a_log_without_control_characters(material: dict[str, str]) -> None:
    text = (Path(material["run"]) / "run.log").read_text()
    assert "owned" in text
    assert controls_in(text) == set()


@pytest.mark.parametrize("command", ARGUMENTS)
def test_no_command_lets_a_control_character_through(
    command: str,
    material: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_log_path", lambda *_: tmp_path / "logs")
    # what exists is refused as an output
    (tmp_path / WORDS).mkdir(parents=True)
    (tmp_path / WORDS / "file").touch()
    told_anything = False
    for arguments in ARGUMENTS[command]:
        line = [argument.format(**material) if argument.startswith("{") else argument for argument in arguments]
        for debug in ([], ["--debug"]) if arguments is ARGUMENTS[command][0] else ([],):
            main([*command.split(), *line, *debug])
            output = capsys.readouterr()
            assert controls_in(output.out + output.err) == set(), (line, output)
            told_anything |= "owned" in output.out + output.err
            if "--json" in line and output.out:
                json.loads(output.out)
    assert told_anything or command in (
        "env list",
        "plugins new",
        "export",
        "rollouts list",
        "rollouts check",
        "rollouts report",
    ), command


def test_help_of_other_distributions_is_visible(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from skyrl_engine.cli.extension_commands import ExtensionCommands

    monkeypatch.setattr(ExtensionCommands, "rows", lambda _: [("acme", NASTY)])
    assert main(["--help"]) == 0
    output: Any = capsys.readouterr()
    assert "owned" in output.out
    assert controls_in(output.out) == set()
