"""`section.key=value` on a command line."""

import pytest

from skyrl_engine.config.reading.overrides import parse_override
from skyrl_engine.errors import Problem


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("loss.use=focal", ("loss", "use"), "focal"),
        ("loss.use=acme-losses:focal", ("loss", "use"), "acme-losses:focal"),
        ("model.path=runs/a b", ("model", "path"), "runs/a b"),
        ("model.path=a#b", ("model", "path"), "a#b"),
        ("data.train=x=y", ("data", "train"), "x=y"),
        ("run.seed=3", ("run", "seed"), 3),
        ("run.seed = 3", ("run", "seed"), 3),
        ("run.seed=3 # three", ("run", "seed"), "3 # three"),
        ("run.seed=3,", ("run", "seed"), "3,"),
        ("run.seed=3\nmodel.path=1", ("run", "seed"), "3\nmodel.path=1"),
        ("optimizer.learning_rate=1e-6", ("optimizer", "learning_rate"), 1e-6),
        ("training.shuffle=false", ("training", "shuffle"), False),
        ("training.shuffle=False", ("training", "shuffle"), "False"),
        ('model.revision="1234567"', ("model", "revision"), "1234567"),
        ("model.revision=2024-01-01", ("model", "revision"), "2024-01-01"),
        ('run.observers=["a", "b"]', ("run", "observers"), ["a", "b"]),
        ('loss={use = "ppo", clip = {low = 0.2}}', ("loss",), {"use": "ppo", "clip": {"low": 0.2}}),
        ('plugins.pin."loss:ppo"=acme', ("plugins", "pin", "loss:ppo"), "acme"),
        ("data.eval=none", ("data", "eval"), "none"),
        ('data.subset=""', ("data", "subset"), ""),
    ],
)
def test_values_are_toml_or_words(text: str, path: tuple[str, ...], value: object) -> None:
    parsed = parse_override(text)
    assert parsed == (path, value)
    assert not isinstance(parsed, Problem)
    assert type(parsed[1]) is type(value)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("training", "is not an override"),
        ("a b=1", "'a b' is not a dotted key"),
        ("=1", "'' is not a dotted key"),
        ("a..b=1", "'a..b' is not a dotted key"),
        ("[a]\nb=1", "'[a]\\nb' is not a dotted key"),
        ("run.seed=", "has no value"),
        ("run.observers=[a, b]", "the value is not TOML"),
        ("loss={use = focal}", "the value is not TOML"),
        ('model.path="a', "the value is not TOML"),
    ],
)
def test_what_is_no_override_is_a_problem_of_the_command_line(text: str, cause: str) -> None:
    problem = parse_override(text)
    assert isinstance(problem, Problem)
    assert problem.where == f"command line: {text}"
    assert problem.cause == cause


def test_a_file_among_the_overrides_is_said_to_come_first() -> None:
    problem = parse_override(__file__)
    assert isinstance(problem, Problem)
    assert problem.remedy == "Put the file first, section.key=value after it"
