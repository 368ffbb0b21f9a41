"""`trainer = "..."` decides which tables a configuration has and which kinds of plugin a run uses."""

import jsonschema
import pytest

from skyrl_engine.config import config_schema, from_dict, load, resolve, trainers
from skyrl_engine.config.find_trainer import find_trainer, get_trainer
from skyrl_engine.config.schema import MissingTable
from skyrl_engine.config.sections import sections
from skyrl_engine.config.structure import structure
from skyrl_engine.config.trainers import TRAINERS, Trainer
from skyrl_engine.errors import ConfigError
from skyrl_engine.registry.kinds import KINDS, TABLES

NEEDED = ("model.path=m", "data.train=d")
SCORING = ("collator", "backend", "merger", "loss")


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second trainer: it shares `checkpoint` with sft, has a table of its own, and uses neither reducers nor corrections."""
    planted = {**TRAINERS, "scoring": Trainer("scoring", ("scoring", "checkpoint"), SCORING, "acme:run", "acme:plan")}
    for module in ("trainers", "find_trainer", "json_schema"):
        monkeypatch.setattr(f"skyrl_engine.config.{module}.TRAINERS", planted)


def problems(*overrides: str) -> list[str]:
    return [str(problem) for problem in structure(load(None, list(overrides))).problems]


def test_sft_trains_unless_something_else_is_said() -> None:
    resolved = resolve(load(None, NEEDED))
    assert resolved.config.trainer == "sft"
    assert next(iter(resolved.as_dict().items())) == ("trainer", "sft")
    assert str(resolved.origins["trainer"]) == "default"
    assert resolved.to_toml().startswith('trainer = "sft"\n')
    assert str(resolve(load(None, ["trainer=sft", *NEEDED])).origins["trainer"]) == "command line"


def test_an_unknown_trainer_is_refused_with_what_may_have_been_meant() -> None:
    assert problems("trainer=stf", *NEEDED) == ['command line: trainer: there is no trainer "stf". Did you mean "sft"?']
    assert problems("trainer=pretraining") == [
        'command line: trainer: there is no trainer "pretraining". Choose one of "sft", "preference", "reward_model", "rl", "perplexity"'
    ], "tables that an unknown trainer may need are not asked for"
    assert problems("trainer=3") == ["command line: trainer: must be text, is 3. Put it in quotes"]
    assert problems("trainer={use = 'sft'}") == ["command line: trainer: must be text, is a table. Put it in quotes"]


@pytest.mark.usefixtures("scoring")
def test_a_table_of_another_trainer_is_refused_by_name() -> None:
    assert problems("scoring.top=3", *NEEDED) == [
        (
            "command line: scoring: [scoring] is a table of trainer scoring, and this run's trainer is sft. "
            'Remove it, or set trainer = "scoring"'
        )
    ]
    assert problems("trainer=scoring", *NEEDED) == [
        (
            "command line: data: [data] is a table of the trainers sft, preference and reward_model, and this run's trainer is scoring. "
            'Remove it, or set trainer = "sft"'
        )
    ]
    assert problems("trainer=scoring", "model.path=m", "checkpoint.keep=3") == [], "both trainers have it"


@pytest.mark.usefixtures("scoring")
def test_a_table_of_several_other_trainers_names_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {**trainers.TRAINERS, "bare": Trainer("bare", (), (), "acme:run", "acme:plan")}
    for module in ("trainers", "find_trainer"):
        monkeypatch.setattr(f"skyrl_engine.config.{module}.TRAINERS", planted)
    assert problems("trainer=bare", "model.path=m", "checkpoint.keep=3") == [
        (
            "command line: checkpoint: [checkpoint] is a table of the trainers sft, preference, reward_model, rl and scoring, "
            "and this run's trainer is "
            'bare. Remove it, or set trainer = "sft"'
        )
    ]


@pytest.mark.usefixtures("scoring")
def test_kinds_that_a_trainer_does_not_use_are_neither_loaded_nor_accepted() -> None:
    resolved = resolve(load(None, ["trainer=scoring", "model.path=m"]))
    assert set(resolved.plugins) == {*SCORING} - {"collator"}, "the engine chooses the collator as it plans"
    assert resolved.config.data == MissingTable("data")
    assert not {"data", "training", "evaluation", "reducer"} & resolved.as_dict().keys()
    assert resolve(from_dict(resolved.as_dict(), "run.json")).as_dict() == resolved.as_dict()
    assert problems("trainer=scoring", "model.path=m", "reducer.use=sum", "loss.corrections=[{use = 'tis'}]") == [
        "command line: loss.corrections: selects a correction, and trainer scoring uses none. Remove it",
        (
            "command line: reducer: [reducer] selects a reducer, and this run's trainer scoring uses none. "
            "Remove it, or choose another trainer"
        ),
    ]


def test_a_caller_may_use_kinds_beside_the_trainers_where_the_configuration_names_them() -> None:
    """As `Engine.open` does, which samples whatever the trainer; the trainer itself still refuses the table."""
    raw = load(None, ["model.path=m", "data.train=d", "generator.slots=3"])
    resolved = resolve(raw, also=("generator",))
    assert resolved.plugins["generator"].table["slots"] == 3
    assert "generator" not in resolve(load(None, ["model.path=m", "data.train=d"]), also=("generator",)).plugins
    with pytest.raises(ConfigError, match=r"\[generator\] selects a generator, and this run's trainer sft uses none"):
        resolve(raw)


@pytest.mark.usefixtures("scoring")
def test_the_json_schema_agrees() -> None:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    model, data = {"model": {"path": "m"}}, {"data": {"train": "d"}}
    for table in (
        {**model, **data},
        {**model, **data, "trainer": "sft"},
        {**model, "trainer": "scoring"},
        model,
        {**model, "trainer": "sft"},
        {**model, **data, "trainer": "scoring"},
        {**model, "trainer": "scoring", "reducer": {"use": "sum"}},
        {**model, **data, "trainer": "stf"},
    ):
        assert validator.is_valid(table) == (structure(from_dict(table, "x")).problems == ()), table


def test_a_trainer_that_stands_in_no_row_owns_the_tables_that_it_names() -> None:
    """A section asks the trainer itself, so a trainer need not be one of the engine's to read its tables."""
    outside = Trainer("outside", ("data", "checkpoint"), SCORING, "acme:run", "acme:plan")
    accepted = {name for name, section in sections().items() if section.belongs_to(outside)}
    assert {"data", "checkpoint", "model", "run", "optimizer", *SCORING} <= accepted
    assert not {"training", "rl", "preference", "reducer", "environments"} & accepted


def test_a_trainer_is_imported_by_its_row_and_an_unknown_one_is_refused() -> None:
    for trainer in TRAINERS.values():
        assert get_trainer(trainer.name) is trainer
        assert (trainer.load_run().__name__, trainer.load_plan().__name__) == (f"run_{trainer.name}", f"plan_{trainer.name}")
    assert find_trainer(3) is None
    with pytest.raises(ConfigError, match=r"there is no trainer 'stf'(?s:.)*sft"):
        get_trainer("stf")


def test_every_trainer_names_tables_and_kinds_that_exist() -> None:
    for name, trainer in TRAINERS.items():
        assert name == trainer.name
        assert set(trainer.tables) <= set(sections()) - set(TABLES)
        assert set(trainer.kinds) <= set(KINDS)


def test_a_required_table_of_the_trainer_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"data\.train"):
        resolve(load(None, ["model.path=m"]))
