"""The steered coefficient of the entropy bonus: its rule, step by step, in runs of one and several steps per batch, and through a resume."""

from types import SimpleNamespace
from typing import Any

import pytest
from rl_runs import Rl, steps_of, weights_of

from skyrl_engine.config.schema import EntropyControlConfig
from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.errors import ConfigError, EngineError
from skyrl_engine.training.rl.entropy_control import EntropyControl
from skyrl_engine.training.rl.run import run_rl

BONUS = 'loss.terms=[{use="entropy", coef=0.25}]'


def start(coef: float, **options: float) -> EntropyControl:
    term = SimpleNamespace(name="entropy", coefficient=coef, product=SimpleNamespace(needs=("entropy",)))
    objective: Any = SimpleNamespace(terms=(term,))
    return EntropyControl.start(EntropyControlConfig(**options), objective)


def test_the_rule_step_by_step() -> None:
    """Entropies below, at and above a target of 1; the coefficient stays within its bounds, and counts only after a low entropy."""
    control = start(0.3, target=1.0, delta=0.2, lowest=0.1, highest=0.6)
    assert control.coefficients == {"entropy": 0.0}, "nothing was measured yet"
    coefs, applied = [], []
    for entropy in (0.5, 1.0, 0.9, 1.5, 1.1, 1.2, 0.2):
        control.observe({"policy/entropy": Metric.mean(entropy * 8, 8)})
        coefs.append(control.coef)
        applied.append(control.coefficients["entropy"])
    assert coefs == pytest.approx([0.5, 0.6, 0.6, 0.4, 0.2, 0.1, 0.3])
    assert applied == pytest.approx([0.5, 0.6, 0.6, 0.0, 0.0, 0.0, 0.3])
    control.observe({})
    assert control.coef == pytest.approx(0.3), "a step without a token changes nothing"


@pytest.mark.parametrize("batch", [(), ("rl.groups=2", "rl.mini_batches=2", "rl.epochs=2")], ids=["one step", "four steps"])
def test_a_run_applies_what_it_measured(rl: Rl, batch: tuple[str, ...]) -> None:
    """With a target above every entropy all steps but the first are applied; the coefficient rises with every optimizer step."""
    result = run_rl(rl("run", "rl.steps=3", BONUS, "rl.entropy={target=50.0, delta=0.5}", *batch))
    records = [record["metrics"] for record in steps_of(result.directory)]
    steps = 4 if batch else 1
    coefs = [0.25 + 0.5 * number for number in range(3 * steps + 1)]
    assert [record["policy/entropy_coef"] for record in records] == [min(coefs[steps * (step + 1)], 1.0) for step in range(3)]
    if not batch:
        entropies = [record["policy/entropy"] for record in records]
        assert [record["objective/entropy"] for record in records] == pytest.approx(
            [0.0, -0.75 * entropies[1], -1.0 * entropies[2]], rel=1e-5
        )


@pytest.mark.nightly
def test_a_resumed_run_steers_on(rl: Rl) -> None:
    tables = (BONUS, "rl.entropy={target=50.0, delta=0.125}")
    whole = run_rl(rl("whole", "rl.steps=2", *tables))
    parts = run_rl(rl("parts", "rl.steps=1", *tables))
    (parts.directory / "model").rename(parts.directory / "of one step")
    moved = parts.directory.rename(parts.directory.with_name("moved"))
    run_rl(rl("moved", "rl.steps=2", *tables), resume=True)
    assert weights_of(moved) == weights_of(whole.directory)
    assert steps_of(moved)[-1]["metrics"]["policy/entropy_coef"] == 0.25 + 2 * 0.125


@pytest.mark.parametrize("terms", ["[]", '[{use="entropy", coef=0.1}, {use="entropy", coef=0.2}]'])
def test_what_could_not_be_steered_is_refused(rl: Rl, terms: str) -> None:
    with pytest.raises(EngineError, match=r"\[rl.entropy\] steers the coefficient of the term of the entropy"):
        run_rl(rl("run", f"loss.terms={terms}", "rl.entropy={target=1.0}"))


def test_bounds_that_contradict_each_other_are_refused(rl: Rl) -> None:
    with pytest.raises(ConfigError, match=r"rl.entropy.highest: is 0.1, and rl.entropy.lowest is 0.5"):
        run_rl(rl("run", BONUS, "rl.entropy={target=1.0, lowest=0.5, highest=0.1}"))
