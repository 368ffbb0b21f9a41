"""A run directory from anybody: whichever key names code, and whichever command reads it, the code does not run.

The keys are walked, not listed: one that is new needs a plant here, and a new text needs a mark or a place among those that name no code.
"""

import json
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import frozen

from skyrl_engine.cli.app import app, main
from skyrl_engine.cli.command import every_command
from skyrl_engine.config.report import to_toml
from skyrl_engine.config.sections import sections
from skyrl_engine.config.trust.marks import names_code
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.resolve import Registry

NO_CODE = {
    # data
    "data.train data.eval data.subset data.train_split data.eval_split data.map data.rating data.columns data.cache",
    "rl.rollouts rl.stop_strings",
    *(
        f"environment.{name}.{key}"
        for name in ("function", "prompts")
        for key in ("data", "eval_data", "subset", "train_split", "eval_split", "map")
    ),
    *(
        f"environment.{name}.{key}"
        for name in ("function", "prompts", "gymnasium", "reasoning_gym")
        for key in ("system_prompt", "prompt_template")
    ),
    # names of data sets of one library and their sizes; a pattern
    *(f"environment.reasoning_gym.{key}" for key in ("task", "weights", "config", "answer_pattern")),
    # models: safetensors and JSON, and templates in a sandbox; a model's own code has a key of its own, model.trust_remote_code
    "model.path model.tokenizer model.revision model.chat_template model.lora.targets model.lora.path",
    "reference.path reference.revision teacher.path teacher.revision",
    *(f"rl.reward_models.{key}" for key in ("path", "revision", "name", "tokenizer", "chat_template", "step_separator")),
    # the name of a metric, and patterns of parameters' names
    "evaluation.best optimizer.groups.match model.freeze",
    # names of the engine's own recipes
    "rl.preset preference.preset reward_model.preset",
    # what stands between the steps of an answer
    "reward_model.step_separator",
    # which of the installed plugins are left out, preferred or may differ
    "plugins.block plugins.pin checkpoint.allow_changed",
    # places to write into; devices to compute on
    "run.directory checkpoint.store generator.devices observer.tensorboard.directory",
    # names of a place at a tracker
    "observer.wandb.project observer.wandb.entity observer.mlflow.uri observer.mlflow.experiment",
    "observer.trackio.project observer.trackio.space",
    # a name that servers give their model
    "generator.vllm.model generator.openai.model teacher.model",
    # weights by the names of a reward's parts
    "advantage.gdpo.weights",
    # options of plugins, which their own schemas mark
    *(f"{name}.options" for name in ("collator", "loss", "loss.terms", "loss.corrections", "reducer", "backend", "merger")),
    *(f"{name}.options" for name in ("advantage", "generator", "environments", "group_filters")),
}
"""Keys that hold text and name no code."""


def parts_of(kind: Any) -> set[Any]:
    arguments = typing.get_args(kind)
    return set().union(*map(parts_of, arguments)) if arguments else {kind}


def keys_of(schema: type[Any], path: str) -> Iterator[tuple[str, "attrs.Attribute[Any]"]]:
    for attribute in attrs.fields(attrs.resolve_types(schema)):
        key = f"{path}.{attribute.alias or attribute.name}"
        yield key, attribute
        for kind in parts_of(attribute.type):
            if isinstance(kind, type) and attrs.has(kind):
                yield from keys_of(kind, key)


def every_key() -> dict[str, "attrs.Attribute[Any]"]:
    """All keys of the engine's tables, and all options of all first-party plugins."""
    attributes: dict[str, attrs.Attribute[Any]] = {}
    for name, section in sections().items():
        if isinstance(section.schema, type) and attrs.has(section.schema):
            attributes |= dict(keys_of(section.schema, name))
    for record in Registry.discover().records():
        schema = load(record).schema if (record.distribution or "").startswith("skyrl-engine") else None
        attributes |= {} if schema is None else dict(keys_of(schema, f"{record.kind}.{record.name}"))
    return attributes


def test_every_text_is_marked_as_code_or_known_to_be_none() -> None:
    texts = {
        name
        for name, attribute in every_key().items()
        if not names_code(attribute) and {str, Path, Any, object} & parts_of(attribute.type)
    }
    assert texts == {name for line in NO_CODE for name in line.split()}


def test_what_is_described_as_code_is_marked() -> None:
    forms = ("file.py:name", "package.module")
    schemas = [section.schema for section in sections().values() if isinstance(section.schema, type)]
    schemas += [schema for record in Registry.discover().records() if (schema := load(record).schema) is not None]
    from skyrl_engine.config.report import key_meanings

    for schema in schemas:
        if attrs.has(schema):
            texts = key_meanings(schema)
            for attribute in attrs.fields(attrs.resolve_types(schema)):
                nested = any(isinstance(kind, type) and attrs.has(kind) for kind in parts_of(attribute.type))
                if not nested and any(word in texts.get(attribute.name, "") for word in forms):
                    assert names_code(attribute), (schema, attribute.name)


# --- plants ------------------------------------------------------------------------------------------------------------------------

SFT: dict[str, Any] = {"trainer": "sft", "model": {"path": "nowhere"}, "data": {"train": "nothing.jsonl"}, "training": {"steps": 4}}
RL: dict[str, Any] = {"trainer": "rl", "model": {"path": "nowhere"}, "rl": {"steps": 4}}


def function(**options: Any) -> dict[str, Any]:
    return {**RL, "environments": [{"use": "function", "data": "tasks.jsonl", **options}]}


def gymnasium(**options: Any) -> dict[str, Any]:
    return {**RL, "environments": [{"use": "gymnasium", **options}]}


PROMPTS = [{"use": "prompts", "data": "tasks.jsonl"}]


def vllm(**options: Any) -> dict[str, Any]:
    return {**RL, "environments": PROMPTS, "generator": {"use": "vllm", **options}}


def openai(**options: Any) -> dict[str, Any]:
    return {**RL, "environments": PROMPTS, "generator": {"use": "openai", "url": "http://127.0.0.1:9/v1", "model": "m", **options}}


def teacher(**options: Any) -> dict[str, Any]:
    return {**SFT, "teacher": {"url": "http://127.0.0.1:9/v1", "model": "m", **options}}


TERM = {"use": "cross_entropy"}

PLANTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "loss.use": lambda code: {**SFT, "loss": {"use": code}},
    "loss.terms.use": lambda code: {**SFT, "loss": {**TERM, "terms": [{"use": code, "coef": 1.0}]}},
    "loss.corrections.use": lambda code: {**SFT, "loss": {**TERM, "corrections": [{"use": code}]}},
    "reducer.use": lambda code: {**SFT, "reducer": {"use": code}},
    "backend.use": lambda code: {**SFT, "backend": {"use": code}},
    "collator.use": lambda code: {**SFT, "collator": {"use": code}},
    "merger.use": lambda code: {**SFT, "merger": {"use": code}},
    "advantage.use": lambda code: {**RL, "environments": PROMPTS, "advantage": {"use": code}},
    "generator.use": lambda code: {**RL, "environments": PROMPTS, "generator": {"use": code}},
    "environments.use": lambda code: {**RL, "environments": [{"use": code}]},
    "group_filters.use": lambda code: {**RL, "environments": PROMPTS, "group_filters": [{"use": code}]},
    "optimizer.schedule": lambda code: {**SFT, "optimizer": {"schedule": code}},
    "run.observers": lambda code: {**SFT, "run": {"observers": [code]}},
    "run.ray_address": lambda code: {**SFT, "run": {"launch": "ray", "ray_address": code}},
    "environment.function.reward": lambda code: function(reward=code),
    "environment.function.rewards.use": lambda code: function(rewards=[{"use": code, "weight": 0.5}]),
    "environment.function.tools": lambda code: function(reward="json:loads", tools=[code]),
    "environment.gymnasium.id": lambda code: gymnasium(id=code),
    "environment.gymnasium.kwargs": lambda code: gymnasium(id="Text-v0", kwargs={"entry_point": code}),
    "generator.openai.url": lambda code: openai(url=f"http://127.0.0.1:9/{code}"),
    "generator.openai.api_key_env": lambda code: openai(api_key_env=code),
    "teacher.url": lambda code: teacher(url=f"http://127.0.0.1:9/{code}"),
    "teacher.api_key_env": lambda code: teacher(api_key_env=code),
    "generator.vllm.command": lambda code: vllm(command=[code]),
    "generator.vllm.python": lambda code: vllm(python=code),
    "generator.vllm.venv": lambda code: vllm(venv=code),
    "generator.vllm.arguments": lambda code: vllm(arguments=["--worker-extension-cls", code]),
    "generator.vllm.environment": lambda code: vllm(environment={"VLLM_PLUGINS": code}),
    "generator.vllm.urls": lambda code: vllm(urls=[f"http://127.0.0.1:9/{code}"]),
    "generator.vllm.api_key_env": lambda code: vllm(api_key_env=code),
    "generator.vllm.transfer_host": lambda code: vllm(transfer_host=code),
}
"""Configurations that name code, by the key that does."""

ELSEWHERE = (
    "run.ray_address",
    "environment.gymnasium.id",
    "environment.gymnasium.kwargs",
    *(key for key in PLANTS if key.startswith(("generator.vllm.", "generator.openai.", "teacher."))),
)
"""Keys that name no file."""

READ_BY_EVALUATE = ("generator.use", "environments.use", *(key for key in PLANTS if key.startswith("environment.")))


def test_every_key_that_names_code_has_a_plant() -> None:
    assert set(PLANTS) == {name for name, attribute in every_key().items() if names_code(attribute)}


@frozen
class Planted:
    """A run directory, and the file that its planted code leaves when it runs."""

    run: Path
    trace: Path
    code: str

    def write(self, table: dict[str, Any]) -> None:
        run = {**table.get("run", {}), "directory": str(self.run)}
        text = to_toml({**table, "run": run, "checkpoint": {"resume": True}})
        assert tomllib.loads(text)
        (self.run / "config.toml").write_text(text)
        manifest = self.run / "run.json"
        if manifest.exists():
            engine = {"distribution": "skyrl-engine", "version": "0.3.0"}
            known = {**json.loads(manifest.read_text()), "engine": engine, "plugins": {}, "observers": []}
            manifest.write_text(json.dumps({**known, "config": {**table, "run": run}}))


@pytest.fixture
def planted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """A run directory of somebody else, with a manifest of another key."""
    run, trace = tmp_path / "downloads" / "run", tmp_path / "code-has-run"
    for folder in ("checkpoints/step-00000002", "model", "rollouts"):
        (run / folder).mkdir(parents=True)
    seal = {"format": 1, "tables": {}, "files": {}, "hmac": "0" * 64}
    (run / "run.json").write_text(json.dumps({"format": 1, "sessions": [], "config": {}, "seal": seal}))
    (run / "model" / "config.json").write_text("{}")
    code = f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n\ndef f(text, task):\n    '''Says {{}}.'''\n    return 1.0\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1"}\n')
    return Planted(run, trace, code)


def places(planted: Planted) -> dict[str, str]:
    """References to the planted code, by the way that leads there."""
    inside, outside = planted.run / "planted.py", planted.run.parent / "outside.py"
    deep = planted.run / "checkpoints" / "step-00000002" / "deep.py"
    for file in (inside, outside, deep):
        file.write_text(planted.code)
    links = {"leads-in.py": inside, "run/leads-out.py": outside}
    for name, target in links.items():
        (planted.run.parent / name).symlink_to(target)
    return {
        "inside, relative": "./planted.py:f",
        "inside, absolute": f"{inside}:f",
        "inside, deeper": f"{deep}:f",
        "inside, by a way around": f"{planted.run.parent}/other/../run/planted.py:f",
        "a link inside that leads out": f"{planted.run}/leads-out.py:f",
        "a link outside that leads in": f"{planted.run.parent}/leads-in.py:f",
        "outside, relative": "../outside.py:f",
        "outside, absolute": f"{outside}:f",
    }


def commands_for(key: str, run: Path) -> list[list[str]]:
    config = str(run / "config.toml")
    commands = [["run", config], ["run", config, "--dry-run"], ["config", "check", config], ["config", "show", config]]
    commands += [["data", "preview", config], ["run", "--from", str(run)]]
    if key in READ_BY_EVALUATE:
        commands.append(["evaluate", str(run)])
    if key.partition(".")[0] in ("loss", "reducer", "backend", "collator", "merger"):
        commands.append(["prove", config])
    if key.partition(".")[0] in ("loss", "reducer", "collator", "merger"):
        commands.append(["diff-backends", config, "--b", "fsdp"])
    return commands


@pytest.mark.parametrize("key", PLANTS)
def test_no_command_runs_what_a_run_directory_names(key: str, planted_run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    (planted_run.run.parent / "other").mkdir()
    named = {"elsewhere": "planted_module:Odd-v0"} if key in ELSEWHERE else places(planted_run)
    for named_by, code in named.items():
        planted_run.write(PLANTS[key](code))
        commands = commands_for(key, planted_run.run)
        # every command once, every way with two
        chosen = (
            commands if named_by in ("outside, absolute", "elsewhere") else [commands[len(named_by) % len(commands)], commands[-1]]
        )
        for command in chosen:
            assert main(command) == 3, (named_by, command, capsys.readouterr().err)
            err = capsys.readouterr().err
            last = err.rstrip().rpartition("\n")[2]
            if "--from" in command and "differ" in last:
                # its run.json names no plugin, and options are read behind those
                assert not planted_run.trace.exists(), (named_by, command)
                continue
            assert f"the run directory {planted_run.run} names code" in last, (named_by, command, err)
            remedies = {"inside": "copy it to another place", "a link outside": "copy it to another place"}
            remedy = next((text for start, text in remedies.items() if named_by.startswith(start)), "--trust-code")
            # a link inside is followed by plugins, whose content counts, and not by functions
            assert remedy in last or named_by.startswith("a link inside"), (named_by, command, err)
            assert not planted_run.trace.exists(), (named_by, command)


def test_a_function_of_a_module_is_code_too(planted_run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    """`os:system` would run what the model says."""
    planted_run.write(function(reward="os:system"))
    assert main(["evaluate", str(planted_run.run)]) == 3
    assert "environments[0].reward = os:system" in capsys.readouterr().err


@pytest.mark.parametrize("lacking", ["run.json", "config.toml", "everything"])
def test_a_directory_that_lacks_its_manifest_is_a_run_directory_all_the_same(
    planted_run: Planted, lacking: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = places(planted_run)
    for layout in ("inside, absolute", "outside, absolute"):
        planted_run.write({**SFT, "loss": {"use": named[layout]}})
        config = planted_run.run / "config.toml"
        if lacking != "run.json":
            config = config.rename(planted_run.run / "resume.toml")
        if lacking != "config.toml":
            (planted_run.run / "run.json").unlink(missing_ok=True)
        assert main(["run", str(config)]) == 3, capsys.readouterr().err
        assert "run directory" in capsys.readouterr().err
        assert not planted_run.trace.exists()


def test_a_link_to_its_configuration_does_not_make_it_the_callers(planted_run: Planted, tmp_path: Path) -> None:
    planted_run.write({**SFT, "loss": {"use": places(planted_run)["outside, absolute"]}})
    mine = tmp_path / "mine.toml"
    mine.symlink_to(planted_run.run / "config.toml")
    assert main(["config", "check", str(mine)]) == 3
    assert not planted_run.trace.exists()


def test_modules_inside_are_not_imported_by_code_from_elsewhere(
    planted_run: Planted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The caller's own reward imports a name that the run directory offers by PYTHONPATH, or from the current folder."""
    (planted_run.run / "helpers_of_rewards.py").write_text(planted_run.code)
    own = planted_run.run.parent / "own.py"
    own.write_text("import helpers_of_rewards\n\ndef f(text, task):\n    return 1.0\n")
    planted_run.write(function(reward=f"{own}:f"))
    monkeypatch.syspath_prepend(str(planted_run.run))
    monkeypatch.chdir(planted_run.run)
    arguments = ["--reward", f"{own}:f", "--data", str(planted_run.run.parent.parent / "tasks.jsonl")]
    assert main(["evaluate", str(planted_run.run), *arguments]) != 0
    err = capsys.readouterr().err
    assert "nothing there is executed" in err or not planted_run.trace.exists()
    from skyrl_engine.environments import function_of
    from skyrl_engine.errors import DataError

    with pytest.raises(DataError, match="lies in the run directory"):
        function_of(f"{own}:f")
    assert not planted_run.trace.exists()


def test_a_run_directory_does_not_allow_code_of_its_model(planted_run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    planted_run.write({**function(reward="json:loads"), "model": {"path": "nowhere", "trust_remote_code": True}})
    for command in (["run", str(planted_run.run / "config.toml")], ["evaluate", str(planted_run.run)]):
        assert main(command) == 2
        assert "a run directory does not allow itself to run code" in capsys.readouterr().err


def test_files_inside_are_refused_where_a_caller_names_them(planted_run: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    file = planted_run.run / "planted.py"
    file.write_text(planted_run.code)
    planted_run.write(SFT)
    for command in (
        ["env", "show", f"{file}:f"],
        ["env", "try", f"{file}:f", "--answer", "2"],
        ["plugins", "verify", f"loss:{file}:f"],
        ["plugins", "show", "loss", f"{file}:f"],
        ["rl", "--model", "nowhere", "--reward", f"{file}:f", "--data", "tasks.jsonl", "--dry-run"],
        ["sft", "--model", "nowhere", "--data", "nothing.jsonl", "--loss", f"{file}:f", "--dry-run"],
        ["export", str(planted_run.run), "out", "--backend", f"{file}:f"],
    ):
        assert main(command) != 0, command
        assert not planted_run.trace.exists(), command
    assert "Nothing in a run directory is executed" in capsys.readouterr().err


def test_commands_that_read_a_run_directory_alone_run_nothing_of_it(
    planted_run: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command in turn whose first argument is RUN."""
    planted_run.write(
        {**function(reward=places(planted_run)["outside, absolute"]), "loss": {"use": f"{planted_run.run}/planted.py:f"}}
    )
    tried = []
    for name, command in every_command(app, ("skyrl-engine",)):
        if any(param.name == "run" and param.param_type_name == "argument" for param in command.params):
            more = {"export": ["out"], "push": ["ada/planted"], "diff": ["--steps", "1", "2"]}.get(name[-1], [])
            more = ["--to", "jsonl", "--out", "out.jsonl"] if name[1:] == ("rollouts", "export") else more
            assert main([*name[1:], str(planted_run.run), *more]) != 0, name
            tried.append(name[1:])
    assert len(tried) >= 8
    assert not planted_run.trace.exists()


def test_every_command_that_reads_a_configuration_takes_the_callers_word() -> None:
    reading = {
        name[1:]: {param.name for param in command.params}
        for name, command in every_command(app, ("skyrl-engine",))
        if any(param.name == "file" and param.param_type_name == "argument" for param in command.params)
    }
    assert len(reading) >= 6
    assert all("trust_code" in params for params in reading.values())
