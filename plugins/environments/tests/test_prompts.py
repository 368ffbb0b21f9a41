"""`prompts`: tasks without a reward."""

from pathlib import Path

from skyrl_engine.contracts import FactoryContext
from skyrl_engine.testing import EnvironmentConformance, select_plugin

SUMS = str(Path(__file__).with_name("material") / "sums.jsonl")


class TestPrompts(EnvironmentConformance):
    plugin = "skyrl-engine-environments:prompts"
    options = {"data": SUMS, "eval_fraction": 0.3}  # noqa: RUF012 the suite reads it, nothing changes it


def test_nobody_judges() -> None:
    environment = select_plugin("environment", "prompts", {"data": SUMS}).make(FactoryContext(1, 0, 64))
    assert [environment.claims.succeeds(reward) for reward in (0.0, 1.0)] == [None, None]
    assert environment.tasks("train")[0].messages[-1]["role"] == "user"
    assert len(environment.tasks("eval")) == 0
