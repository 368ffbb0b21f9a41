"""Every row of docs/reference/migration-rl.md: the other engine's name is answered with our key, and our key takes the row's value.

Not covered: that the other engine has an option of that name. Of installed engines `nox -s peers` looks (tests/proof/migration_rows.py); of the
others the page states commit, file and line.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from skyrl_engine.config import load, resolve
from skyrl_engine.config.foreign_keys import explain_path
from skyrl_engine.config.reading.sources import RawConfig
from skyrl_engine.config.structure import structure
from skyrl_engine.errors import ConfigError, EngineError
from skyrl_engine.registry.kinds import TABLES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "migration-rl.md"
USES = {
    "loss.dual_clip": ("loss", "ppo_dual_clip"),
    "loss.delta_low": ("loss", "dppo"),
    "loss.delta_high": ("loss", "dppo"),
    "loss.clip_low": ("loss", "ppo"),
    "loss.clip_high": ("loss", "ppo"),
    "reducer.max_sequence_length": ("reducer", "sequence_mean_token_sum_norm"),
    "advantage.lam": ("advantage", "gae"),
    "advantage.gamma": ("advantage", "gae"),
}
"""The plugin whose option a key is, where that is not the recipe's."""


@frozen
class Row:
    """`where` is the default of an installed engine's option, of others file and line."""

    engine: str
    theirs: str
    where: str
    ours: str

    @property
    def key(self) -> str:
        return self.ours.partition(" = ")[0]

    @property
    def tables(self) -> dict[str, Any]:
        return tomllib.loads(self.ours.replace("\\|", "|"))


def rows() -> Iterator[Row]:
    engine = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            engine = line.removeprefix("## ")
        elif line.startswith("| `"):
            theirs, where, ours, _ = (cell.strip() for cell in line.strip("|").split("|"))
            yield Row(engine, theirs.strip("`"), where, ours.strip("`"))


def base() -> dict[str, Any]:
    return {
        "trainer": "rl",
        "model": {"path": "m"},
        "environments": [{"use": "reasoning_gym", "task": "spell_backward"}],
        "generator": {"use": "hf"},
    }


def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {key: merge(one[key], value) if isinstance(value, dict) and key in one else value for key, value in other.items()}
    return {**one, **both}


def check_config(raw: RawConfig, key: str) -> None:
    """Check a configuration: with the options of plugins where the key may be one; that takes ten times as long."""
    if key.partition(".")[0] in {*TABLES, "environments", "group_filters"}:
        resolve(raw)
    else:
        structure(raw).config()


def test_there_is_a_row_for_every_engine() -> None:
    found = [(row.engine, row.theirs) for row in rows()]
    assert len(found) == len(set(found))
    assert {engine for engine, _ in found} == {"TRL", "verl", "SkyRL", "prime-rl"}


INSTALLED = {"TRL": r"of TRL (\d+\.\d+\.\d+)", "verl": r"of verl (\d+\.\d+\.\d+)"}


def test_every_row_says_what_it_was_read_from() -> None:
    """Rows of engines that `nox -s peers` installs have the default, under the version installed there; others file and line, at a commit."""
    text = PAGE.read_text(encoding="utf-8")
    introductions = dict(re.findall(r"^## ([\w-]+)\n\n(.+?)\n\n", text, re.MULTILINE | re.DOTALL))
    root = PAGE.parents[2]
    pinned = (root / "requirements-peers.txt").read_text() + (root / "tests/running/beside.toml").read_text()
    for engine, version in INSTALLED.items():
        (of_page,) = re.findall(version, introductions[engine])
        assert f"{engine.lower()}=={of_page}" in pinned
    for row in rows():
        if row.engine in INSTALLED:
            assert re.fullmatch(r"`[^`]+`( of `RLOOConfig`)?|an argument of the trainer|computed|required", row.where), row
        else:
            assert re.fullmatch(r"`\w+\.py:\d+`", row.where), row
            assert re.search(r"`[\w/-]+(\.py)?` at commit [0-9a-f]{7}\b", introductions[row.engine]), row.engine


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: f"{row.engine}: {row.theirs}")
def test_the_name_is_answered_with_our_key(row: Row) -> None:
    """TRL's names are flat and come into [rl], as do options of the command line; others come with their tables."""
    written = f"rl.{row.theirs}" if row.engine == "TRL" else row.theirs
    if written == row.key:
        return
    with pytest.raises(ConfigError) as refused:
        check_config(load(base(), [f"{written}=1"]), written)
    message = str(refused.value)
    if not row.ours:
        assert "Leave it out" in message
        return
    key = row.key
    if key in ("environments", "group_filters"):
        # of a list of plugin tables, the key inside is named
        assert re.search(rf"Set {key}\.\w+ \(\[\[{key}\]\]", message), message
        wanted = re.search(rf"Set {key}\.(\w+)", message)
        assert wanted is not None
        assert wanted.group(1) in row.tables[key][0]
        return
    assert re.search(rf"(Set|Did you mean) {re.escape(key)}\b", message), message


@pytest.mark.parametrize("row", list({row.ours: row for row in rows() if row.ours}.values()), ids=lambda row: row.ours)
def test_our_key_takes_the_value_of_a_row(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_r.py").write_text("def score(text, task):\n    return 0.0\n\n\ncompute_score = score\n")
    tables = base()
    if row.key in USES:
        table, plugin = USES[row.key]
        tables = merge(tables, {table: {"use": plugin}})
    if row.key.startswith("rl.kl."):
        tables = merge(tables, {"rl": {"kl": {"coef": 0.1}}})
    if row.key.startswith("rl.entropy."):
        tables = merge(tables, {"rl": {"entropy": {"target": 0.1}}})
    check_config(load(merge(tables, row.tables)), row.key)


def test_words_of_fine_tuning_come_first_there() -> None:
    with pytest.raises(EngineError) as refused:
        resolve(load({"model": {"path": "m"}, "data": {"train": "d"}}, ["training.train_batch_size=4"]))
    assert "Set training.batch_size" in str(refused.value)
    assert explain_path(("data", "train_files")) == "Set data.train"


def test_words_inside_a_table_of_another_engine_are_all_told() -> None:
    theirs = {"rollout": {"n": 8, "val_kwargs": {"n": 2}}, "actor": {"unheard_of": 1}}
    with pytest.raises(ConfigError) as refused:
        structure(load({**base(), "actor_rollout_ref": theirs, "training": {"batch_size": 4}})).config()
    message = str(refused.value)
    assert "actor_rollout_ref.rollout.n: is a key of another engine. Set rl.group_size" in message
    assert "Set evaluation.samples" in message
    assert (
        "[training] is a table of the trainers sft, preference and reward_model, and this run's trainer is rl. Set rl.groups"
        in message
    )
