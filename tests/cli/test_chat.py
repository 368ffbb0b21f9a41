"""`skyrl-engine chat`: a model that was trained on three chats says them again, as text that comes token by token."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from skyrl_engine.cli import chat_lines
from skyrl_engine.cli.app import main
from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.contracts import Sampling
from skyrl_engine.environments import function_of
from skyrl_engine.environments.tools import Tool
from skyrl_engine.errors import RolloutError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.rollout.dialogue import Called, Dialogue, Ended, append_rows
from skyrl_engine.rollout.speaker import Speaker
from skyrl_engine.testing.templates import TEMPLATES

GREETING, FAREWELL = "Hello, grüß dich 👋!", "See you."
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
TOOLS = 'def add(a: int, b: int) -> int:\n    """Add two numbers."""\n    return a + b\n'
LONGEST = 320


def says(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/`, trained over and over on the chats of `chats.jsonl` in `run/`, and `tools.py`."""
    from tokenizers import decoders

    folder = tmp_path_factory.mktemp("chat")
    (folder / "tools.py").write_text(TOOLS)
    schema = dict(Tool.of(function_of(f"{folder}/tools.py:add")).schema)
    called = [
        *says("2+3"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "5"},
    ]
    rows: list[dict[str, Any]] = [
        {"messages": says("hi", GREETING, "bye", FAREWELL)},
        {"messages": [*called, {"role": "assistant", "content": "It is 5."}], "tools": [schema]},
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = TEMPLATES["chatml"]
    texts = [json.dumps(row, ensure_ascii=False) for row in rows] * 3 + ["\n<tool_call>\n</tool_call><tool_response>"]
    tokenizer = write_tokenizer(folder / "model", texts, size=420, template=template.text)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens({"additional_special_tokens": list(template.tokens)})
    tokenizer.save_pretrained(folder / "model")
    write_model(folder / "model", tokenizer=tokenizer, max_position_embeddings=LONGEST, num_hidden_layers=1)
    steps = [
        "--steps",
        "50",
        "--batch-size",
        "2",
        "--learning-rate",
        "1e-2",
        "run.device=cpu",
        "run.report=false",
        "data.loss_on=all",
    ]
    data = ["--model", str(folder / "model"), "--data", str(folder / "chats.jsonl")]
    assert main(["--quiet", "sft", *data, *steps, "--output", str(folder / "run")]) == 0
    lora = ["--lora", "4", "--steps", "4", *steps[2:], "--output", str(folder / "adapters")]
    assert main(["--quiet", "sft", "--model", str(folder / "run/model"), *data[2:], *lora]) == 0
    return folder


def open_speaker(world: Path) -> Speaker:
    generator = SelectedPlugin.of(Registry.discover().resolve("generator", "hf"), {}, "test")
    model = ModelConfig(path=str(world / "run/model"))
    return Speaker.open(model, generator, Sampling(max_tokens=60, temperature=0.0), device="cpu", raw=False, name="tiny")


@pytest.fixture(scope="module")
def speak(world: Path) -> Iterator[Callable[..., Speaker]]:
    """`speak(temperature=0.0, most=60)`: the trained model, loaded once."""
    speaker = open_speaker(world)
    plain = speaker._sampling

    def change(temperature: float = 0.0, most: int = 60) -> Speaker:
        speaker._sampling = evolve(plain, temperature=temperature, max_tokens=most)
        speaker.forget()
        return speaker

    yield change
    speaker.close()


@pytest.fixture
def run_chat(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str, lines: tuple[str, ...] = ()) -> tuple[int, str, str]:
        import io

        monkeypatch.chdir(world)
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        code = main(["chat", *arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def test_lines_are_answered_and_the_chat_is_a_row_that_trains(run_chat: Any, world: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.jsonl"
    lines = ("hi", "bye", f"/save {saved}", "/reset", "/system You add.", "//hi", f"/save {saved}", "/exit", "never said")
    code, out, err = run_chat("run", "--temperature", "0", lines=lines)
    assert code == 0, err
    first, second = (json.loads(line) for line in saved.read_text().splitlines())
    assert first == {"messages": says("hi", GREETING, "bye", FAREWELL)}
    assert out.startswith(f"{GREETING}\n{FAREWELL}\n")
    assert second["messages"][:2] == [{"role": "system", "content": "You add."}, {"role": "user", "content": "/hi"}]
    assert "never said" not in json.dumps(second)
    assert main(["sft", "--model", str(world / "model"), "--data", str(saved), "--dry-run", "run.device=cpu"]) == 0


def test_one_answer_as_text_and_as_json(run_chat: Any) -> None:
    assert run_chat("run", "--temperature", "0", "--prompt", "hi")[:2] == (0, f"{GREETING}\n")
    code, out, _ = run_chat("run/checkpoints/step-00000050", "--temperature", "0", "--prompt", "hi", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["answer"], report["finish"]) == (GREETING, "stop")
    assert report["messages"] == says("hi", GREETING)


def test_adapters_beside_the_model_that_they_are_merged_into(run_chat: Any, world: Path) -> None:
    assert main(["--quiet", "export", str(world / "adapters"), str(world / "merged"), "--merge"]) == 0
    ask = ("--temperature", "0", "--max-tokens", "30", "--prompt", "2+3")
    code, out, err = run_chat("adapters", *ask, "--compare", "merged")
    assert code == 0, err
    ours, its = out.removeprefix("--- adapters\n").split("--- merged\n")
    assert ours == its
    for name in ("adapters/model", "adapters/checkpoints/step-00000004"):
        assert run_chat(name, *ask)[1] == ours
    code, _, err = run_chat("adapters", *ask, "--base", "model")
    assert (code, "adapters of another base model" in err) == (4, True)


def test_a_tool_is_called_its_answer_is_read_and_all_of_it_trains(speak: Any, world: Path, tmp_path: Path) -> None:
    dialogue = Dialogue(speak(), [Tool.of(function_of(f"{world}/tools.py:add"))])
    *_, called, first, ended = [event for event in dialogue.say("2+3") if not isinstance(event, str) or "5" in event]
    assert isinstance(called, Called)
    assert [dict(call.arguments) for call in called.calls] == [{"a": 2, "b": 3}]
    assert [answer["content"] for answer in called.answers] == ["5"]
    assert "5" in first
    assert isinstance(ended, Ended)
    assert (ended.text, ended.finish) == ("It is 5.", "stop")
    assert [message["role"] for message in dialogue.messages] == ["user", "assistant", "tool", "assistant"]
    append_rows(tmp_path / "saved.jsonl", [dialogue.row()])
    assert (
        main(["sft", "--model", str(world / "model"), "--data", str(tmp_path / "saved.jsonl"), "--dry-run", "run.device=cpu"]) == 0
    )


def test_text_comes_in_pieces_and_the_next_turn_reads_what_is_new(speak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl_engine_generators.rows import CachedDecoder

    starts: list[list[int]] = []
    read = CachedDecoder.read

    def spy(self: Any, rows: Any, ids: Any, begin: Any) -> Any:
        starts.append(list(begin))
        return read(self, rows, ids, begin)

    monkeypatch.setattr(CachedDecoder, "read", spy)
    dialogue = Dialogue(speak())
    *pieces, ended = dialogue.say("hi")
    assert "".join(pieces) == ended.text == GREETING
    assert len(pieces) > 3
    assert not any("\ufffd" in piece for piece in pieces)
    *_, last = dialogue.say("bye")
    assert last.text == FAREWELL
    assert starts[0] == [0]
    assert starts[-1][0] >= ended.tokens


def test_answers_follow_from_the_seed(speak: Any) -> None:
    def answer(seed: int, dialogue: Dialogue | None = None) -> str:
        dialogue = dialogue or Dialogue(speak(temperature=3.0, most=12), seed=seed)
        *_, ended = dialogue.say("bye")
        assert isinstance(ended, Ended)
        return ended.text

    dialogue = Dialogue(speak(temperature=3.0, most=12), seed=1)
    first, second = answer(1, dialogue), answer(1, dialogue)
    assert first != second
    dialogue.reset()
    assert answer(1, dialogue) == first == answer(1)
    assert answer(2) != first


def test_a_stopped_answer_stays_and_carries_no_loss(speak: Any) -> None:
    dialogue = Dialogue(speak())
    with closing(dialogue.say("hi")) as events:  # type: ignore[type-var] # a generator
        first = next(events)
        dialogue.stop()
        *_, ended = events
    assert ended.finish == "abort"
    assert GREETING.startswith(ended.text)
    assert ended.text.startswith(first)
    assert dialogue.row()["messages"][1]["weight"] == 0
    # an answer that nobody waits for leaves nothing
    with closing(dialogue.say("bye")) as events:  # type: ignore[type-var] # a generator
        next(events)
    assert len(dialogue.messages) == 2
    dialogue.reset()
    assert list(dialogue.say("hi"))[-1].text == GREETING  # type: ignore[union-attr]


def test_an_answer_under_another_system_prompt_carries_no_loss(speak: Any) -> None:
    dialogue = Dialogue(speak(), system="You add.")
    list(dialogue.say("hi"))
    dialogue.system = None
    list(dialogue.say("bye"))
    assert [message.get("weight") for message in dialogue.row()["messages"]] == [None, 0, None, None]
    dialogue.system = "You add."
    assert [message.get("weight") for message in dialogue.row()["messages"]] == [None, None, None, None, 0]


def test_ctrl_c_ends_the_answer_alone(speak: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []

    def interrupt(text: str) -> None:
        shown.append(text)
        if len(shown) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_lines, "echo_part", interrupt)
    dialogue = Dialogue(speak())
    chat_lines.answer_once([dialogue], "hi", as_json=False)
    assert "(stopped)" in capsys.readouterr().err
    assert GREETING.startswith("".join(shown))
    assert len("".join(shown)) < len(GREETING)
    assert len(dialogue.messages) == 2


def test_ctrl_c_stops_the_answers_that_have_not_begun(speak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_lines, "echo_part", lambda _text: signal.raise_signal(signal.SIGINT) if not second.messages else None)
    first, second = Dialogue(speak()), Dialogue(speak())
    chat_lines.answer_once([first, second], "hi", as_json=False)
    assert [dialogue.row()["messages"][1]["weight"] for dialogue in (first, second)] == [0, 0], "both were cut off"


def test_a_second_ctrl_c_ends_a_tool_that_hangs_and_not_the_chat(
    speak: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(_text: str) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_lines, "echo_part", hang)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    lines = iter(("hi", "/help"))
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines, "/exit"))
    dialogue = Dialogue(speak())
    chat_lines.converse([dialogue])
    told = capsys.readouterr().err
    assert "(interrupted: the chat is as it was before this line)" in told
    assert "/save" in told, "the line after it was obeyed"
    assert dialogue.messages == []


def test_a_full_context_is_said_and_the_chat_is_as_it_was(speak: Any) -> None:
    dialogue = Dialogue(speak(most=LONGEST))
    with pytest.raises(RolloutError, match=r"the context is full: the dialogue has .* takes 320"):
        list(dialogue.say("hi " * LONGEST))
    assert dialogue.messages == []
    # a prompt that leaves little room has an answer of what there is
    text = "hi"
    while len(dialogue.speaker.renderer.prompt(says(text))) < LONGEST - 4:
        text += " hi"
    *_, ended = dialogue.say(text)
    assert isinstance(ended, Ended)
    assert ended.tokens <= 4


def test_two_answers_stand_in_columns_of_a_terminal(
    speak: Any, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    chat_lines.answer_once([Dialogue(speak()), Dialogue(open_speaker(world))], "hi", as_json=False)
    last = [line for line in capsys.readouterr().out.splitlines() if "Hello" in line][-1]
    assert last.count(GREETING) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere/at/all",), "model.path names the directory nowhere/at/all, which does not exist"),
        (("run", "--step", "7", "--prompt", "x"), "no checkpoint of step 7"),
        (("model", "--step", "7"), "is no run directory"),
        (("begun",), "has no model yet: it has neither ended nor written a checkpoint"),
        (("silent",), "has no chat template, so it was not trained to chat. Give one with --template FILE"),
        (("judge",), "values texts and writes none"),
        (("bert",), "has no causal language model for"),
        (("model", "--base", "run"), "has all weights and needs no base"),
        (("lost",), "the base model ./gone of lost is not there. Say where it is with --base"),
        (("nowhere",), "nowhere is no directory here, and cannot be loaded from the hub. Name a directory, a run or a hub id"),
        (("model", "--json"), "--json prints one answer"),
        (("model", "optimizer.learning_rate=1"), "is nothing that chat reads"),
        (("model", "rl.max_tokens=1"), "Use --max-tokens"),
        (("model", "--template", "none", "--tool", "./tools.py:add"), "which a chat template writes, and there is none"),
    ],
)
def test_refusals_name_the_remedy(run_chat: Any, world: Path, arguments: tuple[str, ...], words: str) -> None:
    if not (world / "begun").exists():
        _make_bad_models(world)
    code, out, err = run_chat(*arguments)
    assert code in (2, 3, 4), err
    assert out == ""
    assert words in " ".join(err.split())


def _make_bad_models(world: Path) -> None:
    import shutil

    (world / "begun").mkdir()
    shutil.copy(world / "run/config.toml", world / "begun")
    for name, change in {
        "silent": None,
        "judge": {"architectures": ["Qwen3ForSequenceClassification"]},
        "bert": {"model_type": "vit"},
    }.items():
        shutil.copytree(world / "model", world / name)
        file = world / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **(change or {})}))
    (world / "silent" / "chat_template.jinja").unlink()
    shutil.copytree(world / "adapters/model", world / "lost")
    file = world / "lost/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "./gone"}))


def test_without_a_template_every_line_is_a_text_to_go_on_from(run_chat: Any) -> None:
    code, out, err = run_chat("run", "--template", "none", "--temperature", "0", "--max-tokens", "5", lines=("hi", "hi"))
    assert code == 0, err
    first, second = out.splitlines()[:1], out.splitlines()[-1:]
    assert first == second


def test_what_is_no_command_is_answered_with_the_nearest(run_chat: Any) -> None:
    code, out, err = run_chat("run", lines=("/rest", "/reset now", "/save x.txt"))
    assert (code, out) == (4, "")
    assert "There is no command /rest. Did you mean '/reset'?" in err
    assert "/reset takes no text." in err
    assert "nobody has said anything" in err
