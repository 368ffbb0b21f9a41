"""Raw tables to the schema: all mistakes at once with file and key, defaults, places, and the way back."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.config.reading.origins import DEFAULT, Origin
from skyrl_engine.config.reading.places import absolute_place
from skyrl_engine.config.reading.sources import RawConfig, load
from skyrl_engine.config.reading.toml import read_toml
from skyrl_engine.config.report import to_toml
from skyrl_engine.config.schema import (
    EngineConfig,
    EnvironmentTable,
    GeneratorTable,
    LoraConfig,
    LossTable,
    MissingTable,
    OptimizerConfig,
    PluginTable,
    RewardModelTable,
    TermTable,
    TrainingConfig,
)
from skyrl_engine.config.schema.metadata import iterate_unread_fields
from skyrl_engine.config.schema.optimizer import SCHEDULES
from skyrl_engine.config.sections import sections
from skyrl_engine.config.structure import complete_origins, plain, structure
from skyrl_engine.config.trainers import TRAINERS, Trainer
from skyrl_engine.errors import ConfigError
from skyrl_engine.registry.kinds import TABLES, import_object

NEEDED = ("model.path=m", "data.train=d")


def problems(*overrides: str) -> list[str]:
    return [str(problem) for problem in structure(load(None, [*NEEDED, *overrides])).problems]


def config(*overrides: str) -> EngineConfig:
    return structure(load(None, [*NEEDED, *overrides])).config()


def test_defaults_are_complete() -> None:
    defaults = config()
    assert defaults.training == TrainingConfig(epochs=1.0)
    assert {kind: table.use for kind, table in defaults.selected.items()} == {
        kind: row.default for kind, row in TABLES.items() if kind in TRAINERS["sft"].kinds
    }


def test_all_mistakes_of_a_file_at_once_with_line_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text(
        """\
[model]
path = 3
[data]
loss_on = "lats"
[run]
batch_size = 3
[training]
batch_size = 0
steps = 10.0
[optimizer]
betas = [0.9, 1.5]
[chekpoint]
every = true
"""
    )
    structured = structure(load(Path("train.toml"), ["run.sed=3"]))
    with pytest.raises(ConfigError) as caught:
        structured.config()
    assert {str(problem) for problem in caught.value.problems} == {
        "train.toml:2: model.path: must be text, is 3. Put it in quotes",
        'train.toml:4: data.loss_on: must be one of "last", "all", "completion", is "lats". Did you mean "last"?',
        "train.toml: data.train: is required. Set it in the file or give data.train=... on the command line",
        "train.toml:6: run.batch_size: is not a known key. Did you mean training.batch_size?",
        'command line: run.sed: is not a known key. Did you mean "seed"?',
        "train.toml:8: training.batch_size: must be at least 1, is 0. Choose a larger number",
        "train.toml:9: training.steps: must be a whole number or none, is 10.0. Write 10",
        "train.toml:11: optimizer.betas: must be less than 1.0, is 1.5. Choose a smaller number",
        'train.toml:13: chekpoint: is not a known key. Did you mean "checkpoint"?',
    }
    assert str(caught.value).endswith("the configuration has 9 mistakes. Correct each line above")


def test_mistakes_in_nested_lists_name_their_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text('[run]\nobservers = [\n  "a",\n  3,\n]\n')
    found = [str(problem) for problem in structure(load(Path("train.toml"), NEEDED)).problems]
    assert found == ["train.toml:2: run.observers[1]: must be text, is 3. Put it in quotes"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("loss=focal", 'command line: loss: must be a table, is "focal". Write [loss] and use = "..." under it'),
        ("loss.use=3", "command line: loss.use: must be text, is 3. Put it in quotes"),
        ('loss.use=""', "command line: loss.use: must not be empty. Give a value"),
        ("run=3", "command line: run: must be a table, is 3. Write a table"),
        ("observers=3", "command line: observers: must be a table, is 3. Write [observers.NAME] and its options"),
        ("observers.a=3", ("command line: observers.a: must be a table, is 3. "
         "Write the references in run.observers, and options in [observers.NAME]")),
        ("batch_size=3", "command line: batch_size: is not a known key. Did you mean training.batch_size?"),
        ("every=3", ("command line: every: is not a known key. The keys here are trainer, model, data, run, plugins, collator, loss, reducer, "
         "backend, merger, observers, optimizer, training, teacher, sampling, evaluation, checkpoint")),
        ("plugins.pin.x=3", "command line: plugins.pin.x: must be text, is 3. Put it in quotes"),
    ],
)  # fmt: skip
def test_tables_that_are_none(override: str, problem: str) -> None:
    assert problems(override) == [problem]


def test_a_plugin_table_keeps_its_options_and_may_leave_use_out() -> None:
    parsed = config("backend.mixed=true", "loss={use = 'focal', gamma = 2, use_kl = {coef = 1}}")
    assert parsed.selected["backend"] == PluginTable("fsdp", {"mixed": True})
    assert parsed.selected["loss"] == LossTable("focal", {"gamma": 2, "use_kl": {"coef": 1}})


def test_options_of_an_observer_are_found_by_its_name_whatever_lies_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a reference in run.observers: a file called like the observer is not meant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "watch").mkdir()
    assert dict(config("run.observers=['watch']", "observers.watch.every=3").observers) == {"watch": {"every": 3}}


def test_terms_and_corrections_are_plugin_tables_of_their_own() -> None:
    terms = "terms = [{use = 'kl', coef = 0.001, estimator = 'k3'}, {use = 'entropy', coef = -1}]"
    parsed = config(f"loss={{use = 'ppo', clip_low = 0.1, {terms}, corrections = [{{use = 'tis', high = 2.0}}]}}")
    assert parsed.selected["loss"].options == {"clip_low": 0.1}
    assert parsed.selected["loss"].terms == (TermTable("kl", {"estimator": "k3"}, coef=0.001), TermTable("entropy", coef=-1))
    assert parsed.selected["loss"].corrections == (PluginTable("tis", {"high": 2.0}),)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("{terms = {use = 'kl'}}", 'loss.terms: must be a list, is a table. Write [[loss.terms]] and use = "..." under it, once for each'),
        ("{terms = ['kl']}", 'loss.terms[0]: must be a table, is "kl". Write [[loss.terms]] and use = "..." under it'),
        ("{terms = [{use = 'kl'}]}", "loss.terms[0].coef: is required. Set it in this entry of the list"),
        ("{terms = [{coef = 1.0}]}", "loss.terms[0].use: is required. Set it in this entry of the list"),
        ("{terms = [{use = 'kl', coef = '1'}]}", 'loss.terms[0].coef: must be a number, is "1". Write a number such as 0.5, without quotes'),
        ("{corrections = [{}]}", "loss.corrections[0].use: is required. Set it in this entry of the list"),
    ],
)  # fmt: skip
def test_terms_and_corrections_that_are_none(value: str, problem: str) -> None:
    assert problems(f"loss={value}") == [f"command line: {problem}"]


def test_tables_a_command_does_not_need_may_be_absent() -> None:
    parsed = structure(load(None, ["run.seed=3"]), need=()).config()
    assert parsed.run.seed == 3
    assert parsed.model == MissingTable("model")
    assert parsed.data == MissingTable("data")
    assert not parsed.has("data")
    assert parsed.has("training")
    assert structure(load(None, ["model.path=m"]), need=("model",)).config().model.path == "m"
    structured = structure(load(None, ["data.train=3"]), need=())
    assert [problem.where for problem in structured.problems] == ["command line: data.train"]


def test_reading_an_absent_table_is_a_mistake_that_names_it() -> None:
    parsed = copy.deepcopy(structure(load(None, []), need=()).config())
    with pytest.raises(AssertionError, match=r"data\.max_length is read, and this run has no table \[data\]"):
        _ = parsed.data.max_length


def test_none_means_no_value() -> None:
    parsed = config("optimizer.max_grad_norm=none", "checkpoint.keep=none", "data.eval=none")
    assert (parsed.optimizer.max_grad_norm, parsed.checkpoint.keep, parsed.data.eval) == (None, None, None)


def test_places_in_a_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("configs/train.toml").write_text(
        """\
[model]
path = "./model"
tokenizer = "model"
revision = "./not-a-place"
[data]
train = "../data/train.jsonl"
[run]
observers = ["metrics_jsonl", "./watch.py:watch"]
[loss]
use = "./my_loss.py:focal"
[observers."./watch.py:watch"]
every = 3
"""
    )
    parsed = structure(load(Path("configs/train.toml"), ["data.eval=./eval.jsonl", "data.cache=cache"])).config()
    assert parsed.model.path == f"{tmp_path}/configs/model"
    assert parsed.model.tokenizer == "model"
    assert parsed.model.revision == "./not-a-place"
    assert parsed.data.train == f"{tmp_path}/configs/../data/train.jsonl"
    assert parsed.data.eval == f"{tmp_path}/eval.jsonl"
    assert parsed.data.cache == "cache"
    assert parsed.selected["loss"].use == f"{tmp_path}/configs/my_loss.py:focal"
    assert parsed.run.observers == ("metrics_jsonl", f"{tmp_path}/configs/watch.py:watch")
    assert list(parsed.observers) == [f"{tmp_path}/configs/watch.py:watch"]


def test_what_lies_in_the_current_folder_becomes_absolute_and_plugins_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed from elsewhere means the same files."""
    monkeypatch.chdir(tmp_path)
    for name in ("models/small", "fsdp", "cross_entropy"):
        Path(name).mkdir(parents=True)
    parsed = structure(load(None, ["model.path=models/small", "data.train=owner/name", "loss.use=cross_entropy"])).config()
    assert parsed.model.path == f"{tmp_path}/models/small"
    assert parsed.data.train == "owner/name"
    assert parsed.selected["loss"].use == "cross_entropy"


def test_keys_of_an_empty_table_are_defaults(tmp_path: Path) -> None:
    """`skyrl-engine init` writes tables whose keys are all comments."""
    path = tmp_path / "run.toml"
    path.write_text("[model]\npath = 'm'\n[data]\ntrain = 't'\n[optimizer]\n# learning_rate = 1e-05\n[run]\n")
    raw = load(path)
    completed = complete_origins(plain(structure(raw).config()), raw, DEFAULT)
    assert {key for key, origin in completed.items() if origin is not DEFAULT} == {"model.path", "data.train"}


def test_origins_are_completed_with_defaults() -> None:
    raw = load(None, ["optimizer.betas=[0.5, 0.6]", "loss.terms=[{use = 'kl', coef = 1}]", *NEEDED])
    table = plain(structure(raw).config())
    completed = complete_origins(table, raw, DEFAULT)
    assert str(completed["optimizer.betas"]) == "command line"
    assert str(completed["loss.terms[0].use"]) == "command line"
    assert str(completed["run.seed"]) == "default"
    assert "run" not in completed


_names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6).filter(lambda text: text != "use")
_texts = _names.filter(lambda text: text != "none" and not text.startswith(("./", "../")) and absolute_place(text, None) == text)
_plain_values = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), _texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_names, inner, max_size=3)),
    max_leaves=6,
)
_STRATEGIES: dict[Any, st.SearchStrategy[Any]] = {
    str: _texts,
    bool: st.booleans(),
    int: st.integers(2, 2**62),
    float: st.floats(1e-300, 0.999),
    tuple[str, ...]: st.lists(_texts, max_size=3).map(tuple),
    tuple[float, float]: st.tuples(st.floats(0.0, 0.999), st.floats(0.0, 0.999)),
    attrs.fields_dict(OptimizerConfig)["schedule"].type: st.sampled_from((*SCHEDULES, "package.module:name")),
    attrs.fields_dict(LoraConfig)["targets"].type: st.just("all-linear") | st.lists(_texts, min_size=1, max_size=3).map(tuple),
}


_options = st.dictionaries(_names.filter(lambda name: name not in ("use", "coef", "terms", "weight")), _plain_values, max_size=3)


def _few(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(entries, max_size=2).map(tuple)


def _configurations(trainer: Trainer) -> st.SearchStrategy[EngineConfig]:
    """Any configuration of a trainer, with all the tables that it may have."""
    known = sections()
    tables = {name: _values(import_object(row.table or "")) for name, row in TABLES.items() if known[name].belongs_to(trainer)}
    fields = [
        attribute
        for attribute in attrs.fields(attrs.resolve_types(EngineConfig))
        if attribute.name not in ("trainer", "selected", "trainer_options")
    ]
    values = {
        attribute.name: _values(attribute.type)
        if known[attribute.name].belongs_to(trainer)
        else st.just(MissingTable(attribute.name))
        for attribute in fields
    }
    return st.builds(EngineConfig, trainer=st.just(trainer.name), selected=st.fixed_dictionaries(tables), **values)


def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Any valid value of a schema's type."""
    if kind in _STRATEGIES:
        return _STRATEGIES[kind]
    if kind is PluginTable:
        return st.builds(PluginTable, _texts, _options)
    if kind is LossTable:
        terms = st.builds(TermTable, _texts, _options, coef=st.floats(0.1, 2.0))
        return st.builds(LossTable, _texts, _options, _few(terms), _few(_values(PluginTable)))
    if kind is EnvironmentTable:
        return st.builds(EnvironmentTable, _texts, _options, weight=st.floats(0.1, 2.0))
    if kind is RewardModelTable:
        return st.builds(
            RewardModelTable,
            _texts,
            st.none() | _texts,
            st.just("judge"),
            st.floats(-2.0, 2.0).filter(bool),
            st.none() | _texts,
            st.none() | _texts,
            st.sampled_from(["each", "min"]),
            st.none() | _texts,
        )
    if kind is EngineConfig:
        return st.one_of(*(_configurations(trainer) for trainer in TRAINERS.values()))
    if attrs.has(kind):
        fields = attrs.fields(attrs.resolve_types(kind))
        drawn = st.fixed_dictionaries({attribute.name: _values(attribute.type) for attribute in fields})
        return drawn.map(lambda values: kind(**_without_contradictions(values)))
    arguments = getattr(kind, "__args__", ())
    if getattr(kind, "__origin__", None) is tuple and attrs.has(arguments[0]):
        return _few(_values(arguments[0]))
    if tuple[str, ...] in arguments:
        return _texts | st.lists(_texts, min_size=1, max_size=2).map(tuple)
    if kind == tuple[float, ...]:
        return st.lists(st.floats(0.5, 2), min_size=1, max_size=2).map(tuple)
    if type(None) in arguments:
        return st.none() | _values(arguments[0])
    if str(kind).startswith("typing.Literal"):
        return st.sampled_from(arguments)
    if str(kind).startswith("typing.Union"):
        return st.one_of(map(_values, arguments))
    assert "Mapping" in str(kind), kind
    inner = _texts if arguments[1] is str else st.dictionaries(_names, _plain_values, max_size=2)
    return st.dictionaries(_texts, inner, max_size=2)


def _without_contradictions(values: dict[str, Any]) -> dict[str, Any]:
    """A model whose dropout is off has no adapters with one, adapters freeze all else, scales of weights in 4 bits are of such weights, and a
    store has an address.
    """
    if values.get("store") is not None:
        return {**values, "store": "s3://bucket/x"}
    if values.get("double_quantization"):
        return {**values, "load_in_4bit": True}
    lora = values.get("lora")
    if lora is not None and "freeze" in values:
        values = {**values, "freeze": ()}
    if values.get("dropout") == "off" and lora is not None:
        return {**values, "lora": attrs.evolve(lora, dropout=0.0)}
    return values


def test_data_may_be_a_list(tmp_path: Path) -> None:
    """Places in it are relative like any other; an empty list, or an empty name in it, is none."""
    raw = RawConfig({"data": {"train": ["./a.csv", "b/c"]}}, {"data.train": Origin("file", "x.toml", 1, tmp_path)})
    assert structure(raw, need=()).sections["data"].train == (str(tmp_path / "a.csv"), "b/c")
    for listed in ([], ["a", ""], [3]):
        (problem,) = structure(RawConfig({"data": {"train": listed}}, {}), need=()).problems
        assert "data.train" in problem.where


@settings(max_examples=50, deadline=None)
@given(_values(EngineConfig))
def test_any_configuration_written_as_toml_reads_back_equal(configuration: EngineConfig) -> None:
    """Tables one by one: combinations that the cross-checks refuse are not what is tested. A run that samples has a generator, and one on pairs
    of attempts no estimator of advantages.
    """
    asked = {"generator": GeneratorTable("hf")} if configuration.has("sampling") and configuration.sampling.share > 0 else {}
    replaced = {"advantage"} if configuration.has("rl") and configuration.rl.pairs is not None else set()
    selected = {name: table for name, table in {**asked, **configuration.selected}.items() if name not in replaced}
    configuration = attrs.evolve(configuration, selected=selected)
    table, _ = read_toml(to_toml(plain(configuration)), "x.toml")
    structured = structure(RawConfig(table, {}))
    read = attrs.evolve(structured, problems=()).config()
    if configuration.has("training") and configuration.training.steps is None and configuration.training.epochs is None:
        configuration = attrs.evolve(configuration, training=attrs.evolve(configuration.training, epochs=1.0))
    if configuration.has("reward_model"):
        configuration = attrs.evolve(configuration, reward_model=without_unread(configuration.reward_model))
    if configuration.has("data"):
        configuration = attrs.evolve(configuration, data=without_unread(configuration.data))
    selected = {name: without_unread(table) for name, table in configuration.selected.items()}
    assert read == attrs.evolve(configuration, optimizer=without_unread(configuration.optimizer), selected=selected)


def without_unread(table: Any) -> Any:
    """Return a table as it is read back: what nothing reads in it has its default."""
    defaults = {field.name: field.default for field in attrs.fields(type(table))}
    return attrs.evolve(table, **{name: defaults[name] for name, _, _ in iterate_unread_fields(table)})


def test_the_schema_needs_neither_torch_nor_cattrs() -> None:
    code = "import sys, skyrl_engine.config.schema; print(sorted({'torch', 'cattrs', 'yaml', 'tomli_w'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
