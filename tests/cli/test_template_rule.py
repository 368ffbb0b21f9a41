"""One rule says who writes prompts and answers that are texts, on every command: what a run is trained on is what its evaluation asks."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from by_day import now

from skyrl_engine.cli.demo.recipe import Exchange
from skyrl_engine.cli.demo.tiny import make_model

FIRST = "Say 0"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose tokenizer has a chat template, one whose has none, and the same rows as samples, pairs and tasks."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("model", "bare"):
        make_model(folder / name, [Exchange(f"Say {number}", f"{number} {number + 1}") for number in range(24)])
    (folder / "bare" / "chat_template.jinja").unlink()
    numbers = range(8)
    (folder / "qa.csv").write_text("question,answer\n" + "".join(f"Say {number},{number}\n" for number in numbers))
    pairs = [{"prompt": f"Say {number}", "chosen": f"{number}", "rejected": f"{number + 1}"} for number in numbers]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    tasks = [{"prompt": f"Say {number}", "answer": f"{number}"} for number in numbers]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    (folder / "reward.py").write_text("def score(text, task):\n    return float(text.strip() == task.data['answer'])\n")
    return folder


def commands(inputs: Path, model: str = "model") -> dict[str, tuple[object, ...]]:
    """The rest of the command line of every command that trains, by its first word."""
    names = ("data.map.prompt=question", "data.map.completion=answer")
    loaded = ("--model", inputs / model)
    sampled = ("--groups", "2", "--group-size", "2", "--max-tokens", "8", "--steps", "1", "rl.max_prompt_tokens=64")
    return {
        "sft": (*loaded, "--data", inputs / "qa.csv", *names, "--batch-size", "4"),
        "distill": (*loaded, "--teacher", inputs / model, "--data", inputs / "qa.csv", *names, "--batch-size", "4"),
        "preference": (*loaded, "--data", inputs / "pairs.jsonl", "--batch-size", "4"),
        "reward-model": (*loaded, "--data", inputs / "pairs.jsonl", "--batch-size", "4"),
        "rl": (*loaded, "--data", inputs / "tasks.jsonl", "--reward", inputs / "reward.py:score", *sampled),
    }


def first_prompt(plan: str) -> str:
    """Return the line of a plan that shows the first prompt, without the bars between its tokens."""
    match = re.search(r"^first prompt[^|\n]*?  +(\S.*)$", plan, re.MULTILINE)
    assert match, plan
    assert "|" in match[1], "it shows where tokens end"
    return match[1].replace("|", "")


def test_every_trainer_asks_the_same(command, inputs: Path, tmp_path: Path) -> None:
    """The same question becomes the same tokens, which every plan shows; a text without a template stays as it is."""
    shown = {}
    for name, arguments in commands(inputs).items():
        cache = () if name == "rl" else (f"data.cache={tmp_path / 'cache'}",)
        outcome = command(name, *arguments, *cache, "--dry-run")
        assert outcome.code == 0, outcome.err
        shown[name] = first_prompt(outcome.err)
        assert "written by the chat template" in " ".join(outcome.err.split())
    assert len(set(shown.values())) == 1, shown
    assert shown["sft"] != FIRST
    assert FIRST in shown["sft"]


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [
        ("model", ("data.template=none",), 'data.template is "none"'),
        ("bare", (), "the tokenizer has no chat template"),
    ],
)
def test_texts_stand_as_they_are_where_no_template_writes_them(command, inputs: Path, tmp_path: Path, model, settings, why) -> None:
    for name, arguments in commands(inputs, model).items():
        own = (
            [setting.replace("data.", "rl.") for setting in settings]
            if name == "rl"
            else [*settings, f"data.cache={tmp_path / 'cache'}"]
        )
        outcome = command(name, *arguments, *own, "--dry-run")
        assert outcome.code == 0, outcome.err
        assert first_prompt(outcome.err) == FIRST, name
        cause = why.replace("data.", "rl.") if name == "rl" else why
        assert f"as they stand, without a chat template: {cause}" in " ".join(outcome.err.split())


def test_preview_says_who_writes_the_texts(command, inputs: Path, tmp_path: Path) -> None:
    arguments = (
        "--model",
        inputs / "model",
        "--data",
        inputs / "pairs.jsonl",
        "trainer=preference",
        f"data.cache={tmp_path / 'cache'}",
    )
    for settings, words in (((), "by the chat template"), (("data.template=none",), "as they stand, without a chat template")):
        outcome = command("data", "preview", *arguments, *settings)
        assert outcome.code == 0, outcome.err
        assert re.search(rf"^written +{words}", outcome.out, re.MULTILINE)
        assert words in json.loads(command("data", "preview", *arguments, *settings, "--json").out)["written"]


def test_preview_and_plan_tell_of_columns_that_are_not_read(command, inputs: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Say 0", "chosen": "0", "rejected": "1", "margin": 0.5}) + "\n")
    arguments = ("--model", inputs / "model", "--data", path, f"data.cache={tmp_path / 'cache'}")
    for outcome in (
        command("data", "preview", *arguments, "trainer=preference"),
        command("reward-model", *arguments, "--dry-run"),
    ):
        assert outcome.code == 0, outcome.err
        assert "warning:" in outcome.err
        assert "has columns that are not read: 'margin'" in outcome.err
        assert "loss.margins = true" in outcome.err
    read = command("reward-model", *arguments, "--dry-run", "loss.margins=true")
    assert "not read" not in read.err
    assert "columns margin" in " ".join(read.err.split())


def test_an_evaluation_asks_by_the_rule_of_the_run_and_is_warned_of_where_it_does_not(
    command, inputs: Path, tmp_path: Path
) -> None:
    """A run that was trained on raw texts is asked by raw texts. One of an engine that knew no rule is asked by the chat template, with a
    warning, and so is whoever asks for it.
    """
    cache = f"data.cache={tmp_path / 'cache'}"
    rest = (
        "--reward",
        inputs / "reward.py:score",
        "--data",
        inputs / "tasks.jsonl",
        "--max-tokens",
        "4",
        "--set",
        "rl.max_prompt_tokens=64",
    )
    sft = commands(inputs)["sft"]
    for name, settings in (("ruled", ()), ("raw", ("data.template=none",))):
        assert command("sft", *sft, "--steps", "1", "--output", name, cache, *settings, "--quiet").code == 0
    own = {"ruled": "auto", "raw": "none"}
    for name, rule in own.items():
        for template in (None, "auto", "none"):
            settings = () if template is None else ("--set", f"rl.template={template}")
            outcome = command("evaluate", name, *rest, *settings, "--output", f"{name}-{template}.jsonl")
            assert outcome.code == 0, outcome.err
            warned = "warning: the model is not evaluated on texts like those it was trained on" in outcome.err
            assert warned == (template not in (None, rule))
            (first, *_) = map(json.loads, (tmp_path / f"{name}-{template}.jsonl").read_text().splitlines())
            assert (first["prompt"] == FIRST) == ((template or rule) == "none")
            if warned and rule == "none":
                assert "without the chat template, in training" in outcome.err
                assert 'Evaluate it as it was trained, with --set rl.template="none"' in outcome.err
    (tmp_path / "other.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %} {% endif %}"
    )
    other = command("evaluate", "ruled", *rest, "--set", "model.chat_template=other.jinja")
    assert "another chat template wrote the texts in training" in other.err
    manifest = tmp_path / "ruled" / "run.json"
    document = json.loads(manifest.read_text())
    for key in ("rendering", "chat_template", "written"):
        del document["data"]["train"][key]
    manifest.write_text(json.dumps(document))
    assert "before 0.3, on prompts and answers as they stood" in command("evaluate", "ruled", *rest).err


def test_held_out_data_that_is_written_otherwise_is_warned_of(command, inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"text": "Say 0 0"}\n')
    (tmp_path / "train.jsonl").write_text('{"prompt": "Say 0", "completion": "0"}\n')
    outcome = command(
        "sft",
        "--model",
        inputs / "model",
        "--data",
        "train.jsonl",
        "--eval-data",
        "held.jsonl",
        "--dry-run",
        f"data.cache={tmp_path / 'cache'}",
    )
    assert outcome.code == 0, outcome.err
    assert "held.jsonl is not like the training data" in outcome.err


@pytest.mark.parametrize("name", now(["sft", "preference"], "sft"))
def test_runs_that_trained_on_raw_texts_are_not_resumed_by_another_rule(command, inputs: Path, tmp_path: Path, name: str) -> None:
    """A run of an engine before 0.3 is refused and the key is named, whichever version its checkpoint names; with the key it goes on where it
    was raw.
    """
    cache = f"data.cache={tmp_path / 'cache'}"
    assert (
        command(name, *commands(inputs)[name], "--steps", "1", "--output", "run", cache, "data.template=none", "--quiet").code == 0
    )
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")

    def rewrite(file: str, change) -> None:
        path = checkpoint / file
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))
        listing = json.loads((checkpoint / "files.json").read_text())
        content = path.read_bytes()
        listing[file] = (
            {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            if isinstance(listing[file], dict)
            else listing[file]
        )
        (checkpoint / "files.json").write_text(json.dumps(listing))

    rewrite("config.json", lambda document: document["data"].pop("template"))
    resumed = (name, *commands(inputs)[name], "--steps", "2", "--output", "run", cache, "checkpoint.resume=true", "--quiet")
    refused = command(*resumed)
    assert refused.code != 0
    assert 'data.template = "none"' in refused.err
    assert "before 0.3" in refused.err
    assert command(*resumed, "--dry-run").code == refused.code
    rewrite("version.json", lambda document: document.update(engine="0.2.0"))
    refused = command(*resumed)
    assert refused.code != 0
    assert "was written by skyrl-engine 0.2" in refused.err
    assert 'data.template = "none"' in refused.err
    rewrite("version.json", lambda document: document.update(engine="0.3.0"))
    went_on = command(*resumed, "data.template=none")
    assert went_on.code == 0, went_on.err


def test_what_only_a_template_writes_is_refused_without_one(command, inputs: Path, tmp_path: Path) -> None:
    """Prompts of several messages, in a run by reinforcement as in the data of others."""
    path = tmp_path / "tasks.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path.write_text(json.dumps({"prompt": messages}) + "\n")
    options = dict(zip(("--data", "--reward"), (path, inputs / "reward.py:score"), strict=True))
    line = [part for option in options.items() for part in option]
    for model, settings in (("model", ["rl.template=none"]), ("bare", [])):
        outcome = command(
            "rl", "--model", inputs / model, *line, "--max-tokens", "8", "rl.max_prompt_tokens=64", *settings, "--dry-run"
        )
        assert outcome.code != 0
        assert "has messages, which a chat template writes, and there is none" in outcome.err
        assert 'rl.template = "auto"' in outcome.err
    outcome = command("rl", "--model", inputs / "model", *line, "--max-tokens", "8", "rl.max_prompt_tokens=64", "--dry-run")
    assert outcome.code == 0, outcome.err


@pytest.mark.nightly
def test_a_run_by_reinforcement_samples_behind_texts_as_they_stand(command, inputs: Path, tmp_path: Path) -> None:
    """Its tokens are those of the tokenizer for the text alone, and its evaluation takes the key over."""
    outcome = command("rl", *commands(inputs)["rl"], "rl.template=none", "--output", "run", "--quiet")
    assert outcome.code == 0, outcome.err
    rows = command("rollouts", "export", "run", "--to", "jsonl", "--out", "attempts.jsonl")
    assert rows.code == 0, rows.err
    prompts = {json.loads(line)["prompt"] for line in (tmp_path / "attempts.jsonl").read_text().splitlines()}
    assert prompts <= {f"Say {number}" for number in range(8)}
    rest = ("--data", inputs / "tasks.jsonl", "--reward", inputs / "reward.py:score", "--tasks", "1", "--output", "seen.jsonl")
    assert command("evaluate", "run", *rest).code == 0
    assert json.loads((tmp_path / "seen.jsonl").read_text().splitlines()[0])["prompt"] == FIRST
