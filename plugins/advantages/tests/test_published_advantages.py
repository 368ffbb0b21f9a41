"""Every row of docs/reference/advantages.md against the other engine's published formula.

The tables are read from the page: a row without a formula in `published_advantages` fails, as does a formula without a row. What a row says
must hold for the numbers to be equal is granted, and taken away again, one at a time: each is needed.
"""

import math
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from published_advantages import (
    GAMMA,
    LAM,
    PUBLISHED,
    Attempt,
    Published,
    Word,
    attempts,
    by_group,
    earlier_verl_reinforce_plus_plus,
    nemo_grpo,
    prime_grpo,
    skyrl_batch_normalize,
    skyrl_gae,
    skyrl_maxrl,
    trl_grpo,
    trl_rloo_normalized,
    verl_grpo,
    verl_reinforce_plus_plus,
)

from skyrl_engine.contracts import AdvantageOutput
from skyrl_engine.testing.advantages.batches import DrawnRows, DrawnSample, Token
from skyrl_engine_advantages import plugin

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "advantages.md"


def together(batch: Sequence[Attempt]) -> list[Attempt]:
    """Drop groups of one."""
    sizes = [attempt.group for attempt in batch]
    return [attempt for attempt in batch if sizes.count(attempt.group) > 1]


def drop_observations(batch: Sequence[Attempt]) -> list[Attempt]:
    return [evolve(attempt, words=tuple(word for word in attempt.words if word.sampled)) for attempt in batch]


def at_the_end(batch: Sequence[Attempt]) -> list[Attempt]:
    """Put the whole reward on the last token, as engines do that know one reward per attempt."""
    return [
        evolve(
            attempt,
            words=(*(evolve(word, reward=0.0) for word in attempt.words[:-1]), evolve(attempt.words[-1], reward=attempt.reward)),
        )
        for attempt in batch
    ]


CONDITIONS: dict[str, Callable[[Sequence[Attempt]], list[Attempt]]] = {
    "groups of two or more": together,
    "no observations": drop_observations,
    "one reward": at_the_end,
}
FACTOR = "one factor"


@frozen
class Row:
    """One row: whose it is, what they write, what we do, and what must hold for the two to be equal; None: they differ."""

    engine: str
    theirs: str
    name: str
    options: dict
    conditions: tuple[str, ...] | None


def rows() -> list[Row]:
    table_rows, engine = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            engine = line.removeprefix("### ")
        elif engine and re.match(r"\| `\w+=|\| `\w+Config", line):
            theirs, ours, equal = (cell.strip() for cell in line.strip("|").split("|"))
            name, *options = re.findall(r"`([^`]+)`", ours)
            conditions = None if equal == "no" else () if equal == "yes" else tuple(equal.split(", "))
            assert conditions is None or set(conditions) <= {*CONDITIONS, FACTOR}, line
            options_table = tomllib.loads(f"options = {{ {', '.join(options)} }}")["options"]
            table_rows.append(Row(engine, theirs.strip("`"), name, options_table, conditions))
    return table_rows


def ours(name: str, options: dict, batch: Sequence[Attempt]) -> list[np.ndarray]:
    """Our advantages of the sampled tokens of every attempt, in float64."""
    factory = getattr(plugin, name)
    schema = factory.skyrl_engine_config_schema()
    walk = {"gamma": GAMMA} if hasattr(schema(), "gamma") else {}
    walk |= {"lam": LAM} if hasattr(schema(), "lam") else {}
    samples = tuple(
        DrawnSample(
            i, attempt.group, i, 0, True, tuple(Token(float(word.sampled), word.reward, word.value) for word in attempt.words)
        )
        for i, attempt in enumerate(batch)
    )
    arrays = DrawnRows(samples, ("old_values",)).batch()
    output = factory(arrays, schema(**{**walk, **options}))
    values = output.advantages if isinstance(output, AdvantageOutput) else output
    return [
        values[start:end][arrays.scored[start:end]]
        for start, end in zip(arrays.action_offsets[:-1], arrays.action_offsets[1:], strict=True)
    ]


def theirs(formula: Published, batch: Sequence[Attempt]) -> list[np.ndarray]:
    return [
        np.array([value for value, word in zip(row, attempt.words, strict=True) if word.sampled])
        for row, attempt in zip(formula(batch), batch, strict=True)
    ]


def agree(row: Row, batch: Sequence[Attempt], factor: bool) -> bool:
    """Say whether the two are equal within 1e-5 of the largest: engines add 1e-6 or 1e-8 to this or that."""
    got, due = np.concatenate(ours(row.name, row.options, batch)), np.concatenate(theirs(PUBLISHED[row.engine, row.theirs], batch))
    if factor:
        got = got / np.sqrt(len(got) / (len(got) - 1))
    return bool(np.abs(got - due).max() <= 1e-5 * np.abs(due).max())


def test_rows_and_formulas_are_the_same() -> None:
    of_page = [(row.engine, row.theirs) for row in rows()]
    assert len(of_page) == len(set(of_page))
    assert set(of_page) == set(PUBLISHED)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.engine}: {row.theirs}")
def test_the_row_is_the_published_formula(row: Row) -> None:
    def is_equal_under(conditions: Sequence[str]) -> bool:
        batch = attempts()
        for condition in conditions:
            batch = CONDITIONS[condition](batch) if condition != FACTOR else batch
        return agree(row, batch, FACTOR in conditions)

    if row.conditions is None:
        assert not is_equal_under(()), "they are equal; say so on the page"
        assert not is_equal_under(("no observations", "groups of two or more"))
        return
    assert is_equal_under(row.conditions)
    for condition in row.conditions:
        assert not is_equal_under([other for other in row.conditions if other != condition]), (
            f"they are equal without {condition!r}"
        )


@pytest.mark.nightly
@pytest.mark.parametrize("row", [row for row in rows() if row.conditions == ()], ids=lambda row: f"{row.engine}: {row.theirs}")
@given(data=st.data())
def test_equal_rows_are_equal_on_any_groups(row: Row, data: st.DataObject) -> None:
    """Rewards are eighths, so that sums of them are exact and no formula divides by rounding errors."""
    sizes = data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=5))
    rewards = st.integers(-16, 16).map(lambda eighths: eighths / 8)
    batch = [
        Attempt(group, (*[Word(True)] * data.draw(st.integers(0, 4)), Word(True, data.draw(rewards))))
        for group, size in enumerate(sizes)
        for _ in range(size)
    ]
    if row.name.startswith("reinforce") and len({attempt.reward for attempt in batch}) == 1:
        return
    due = np.concatenate(theirs(PUBLISHED[row.engine, row.theirs], batch))
    np.testing.assert_allclose(np.concatenate(ours(row.name, row.options, batch)), due, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- what the page says of rows that differ


def with_rewards(*groups: Sequence[float], lengths: Sequence[int] = ()) -> list[Attempt]:
    flat = [(group, reward) for group, rewards in enumerate(groups) for reward in rewards]
    return [
        Attempt(group, (*(Word(True) for _ in range((lengths[i] if lengths else 1) - 1)), Word(True, reward)))
        for i, (group, reward) in enumerate(flat)
    ]


def first_of(values: list[np.ndarray]) -> list[float]:
    return [float(row[0]) for row in values]


def test_a_group_of_one() -> None:
    alone = with_rewards([2.0])
    for name in ("grpo", "dr_grpo", "rloo", "maxrl"):
        assert first_of(ours(name, {}, alone)) == [0.0]
    assert first_of(theirs(verl_grpo(), alone)) == [2.0 / (1 + 1e-6)]
    assert first_of(theirs(PUBLISHED["verl", "adv_estimator=rloo"], alone)) == [2.0]
    assert first_of(theirs(by_group(skyrl_maxrl), alone)) == [2.0]
    assert first_of(theirs(nemo_grpo(), alone)) == [0.0]


def test_twelve_equal_rewards_in_float32() -> None:
    """The published lines with torch in float32: the page's 0.318 and 0.005 are rounding errors over 1e-6 and 1e-4."""
    rewards = torch.full((12,), 3.3)
    centred, deviation = rewards - rewards.mean(), rewards.std()
    assert (centred / (deviation + 1e-6)).abs().max().item() == pytest.approx(0.318, abs=5e-4)
    assert (centred / (deviation + 1e-4)).abs().max().item() == pytest.approx(0.0047, abs=2e-4)
    for name in ("grpo", "dr_grpo", "rloo", "maxrl"):
        assert first_of(ours(name, {}, with_rewards([3.3] * 12))) == [0.0] * 12


def test_the_others_as_baseline_and_scale() -> None:
    """NeMo-RL's default: the worked example of the page."""
    batch = with_rewards([1.0, 0.0, 0.0, 1.0])
    assert first_of(theirs(nemo_grpo(), batch)) == pytest.approx([1.155, -1.155, -1.155, 1.155], abs=5e-4)
    assert first_of(ours("grpo", {}, batch)) == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=5e-4)
    # The only success has others that are all equal: no deviation, so no division; the failures have one.
    batch = with_rewards([1.0, 0.0, 0.0, 0.0])
    assert first_of(theirs(nemo_grpo(), batch)) == pytest.approx([1.0, -0.577, -0.577, -0.577], abs=5e-4)
    assert first_of(ours("grpo", {}, batch)) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=5e-4)


def test_a_negative_mean() -> None:
    """SkyRL's `maxrl` prefers the lower reward then."""
    batch = with_rewards([-1.0, -3.0])
    assert first_of(theirs(by_group(skyrl_maxrl), batch)) == pytest.approx([-0.5, 0.5], rel=1e-5)
    assert first_of(ours("maxrl", {}, batch)) == [0.0, 0.0]
    good = with_rewards([1.0, 3.0])
    np.testing.assert_allclose(first_of(ours("maxrl", {}, good)), first_of(theirs(by_group(skyrl_maxrl), good)), rtol=1e-6)


def test_one_deviation_for_the_batch() -> None:
    """TRL divides by that of all rewards; ours, by that of the tokens' advantages, which are less their groups' means."""
    batch = with_rewards([1.0, 0.0], [11.0, 10.0])
    assert first_of(theirs(trl_grpo("batch"), batch)) == pytest.approx([0.086, -0.086, 0.086, -0.086], abs=5e-4)
    assert first_of(ours("dr_grpo", {"normalize": "batch"}, batch)) == pytest.approx([1.0, -1.0, 1.0, -1.0], rel=1e-5)


def test_normalised_over_attempts_or_tokens() -> None:
    batch = with_rewards([1.0, 0.0], lengths=(8, 2))
    assert first_of(theirs(trl_rloo_normalized, batch)) == pytest.approx([0.707, -0.707], abs=5e-4)
    assert first_of(ours("rloo", {"normalize": "batch"}, batch)) == pytest.approx([0.5, -2.0], rel=1e-5)


def test_padding_in_the_mean_of_a_batch() -> None:
    """SkyRL's mean has the zeros of padding in it; where there are none, the two are equal."""
    ragged, even = (with_rewards([1.0, 0.0], lengths=lengths) for lengths in ((8, 2), (5, 5)))
    assert first_of(theirs(skyrl_batch_normalize, ragged)) == pytest.approx([0.752, -1.655], abs=5e-4)
    assert first_of(ours("dr_grpo", {"normalize": "batch"}, ragged)) == pytest.approx([0.5, -2.0], rel=1e-5)
    np.testing.assert_allclose(
        first_of(ours("dr_grpo", {"normalize": "batch"}, even)), first_of(theirs(skyrl_batch_normalize, even)), rtol=1e-5
    )


def test_turns_that_hear_of_later_ones() -> None:
    """The reward of the second turn reaches the first in today's verl and here, not in that of January 2026."""
    turns = (Word(True), Word(False), Word(True, 1.0))
    batch = [Attempt(0, turns), Attempt(1, (Word(True), Word(True, 0.5)))]
    today, before = (theirs(formula, batch)[0] for formula in (verl_reinforce_plus_plus, earlier_verl_reinforce_plus_plus))
    got = ours("reinforce_pp", {}, batch)[0]
    assert got[0] > 0
    assert today[0] > 0
    assert before[0] < 0


def test_values_of_observations() -> None:
    """A critic's opinion of a tool's words changes SkyRL's estimates of the model's, and not ours."""

    def said(value: float) -> list[Attempt]:
        return [Attempt(0, (Word(True, 0.0, 0.5), Word(False, 0.0, value), Word(True, 1.0, 0.25))), Attempt(1, (Word(True, 1.0),))]

    assert np.array_equal(ours("gae", {}, said(0.0))[0], ours("gae", {}, said(9.0))[0])
    assert abs(theirs(skyrl_gae, said(0.0))[0][0] - theirs(skyrl_gae, said(9.0))[0][0]) > 0.5


def test_float32_without_a_division_is_close() -> None:
    """prime-rl subtracts in float32: equal rewards leave a rounding error, and nothing makes it larger."""
    rewards = torch.full((12,), 3.3)
    assert 0 < (rewards - rewards.mean()).abs().max().item() < 1e-6
    batch = with_rewards([0.1, 0.2, 0.7])
    assert first_of(ours("dr_grpo", {}, batch)) == pytest.approx(first_of(theirs(by_group(prime_grpo), batch)), rel=1e-6)
    assert math.isclose(sum(first_of(ours("dr_grpo", {}, batch))), 0.0, abs_tol=1e-9)
