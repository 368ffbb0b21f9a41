"""Mistakes in the engine itself that every cut makes alike: passes that share one agree with each other, and not with the definition.

Each is made in the real code, of which nothing else changes; the rank runs in this process.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.proof.cases import Case
from skyrl_engine.proof.prover import Prover
from skyrl_engine.workers.batch import ShardBatch

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/errors.py",
    "skyrl_engine/proof",
    "skyrl_engine/objective",
    "skyrl_engine/workers",
    "skyrl_engine/contracts",
    "skyrl_engine/engine",
    "skyrl_engine/modeling",
    "plugins/collators/src",
    "plugins/fsdp/src",
    "plugins/losses/src",
    "plugins/reducers/src",
)

Configure = Callable[..., Any]

CUTS = [Case("padded", micro_batch_rows=2), Case("packed", micro_batch_tokens=120)]
OBJECTIVE = {"use": "ppo", "terms": [{"use": "kl", "coef": 0.1}, {"use": "entropy", "coef": 0.01}]}

built = ShardBatch._build
computed = LossObjective.__call__


def next_labels(batch: ShardBatch, *arguments: Any) -> Any:
    made = built(batch, *arguments)
    return evolve(made, labels=made.labels.roll(1))


def earlier_positions(batch: ShardBatch, *arguments: Any) -> Any:
    made = built(batch, *arguments)
    return evolve(made, positions=(made.positions - 1).clamp(min=0))


def whole_weights(batch: ShardBatch, *arguments: Any) -> Any:
    made = built(batch, *arguments)
    return evolve(made, samples=evolve(made.samples, weights=np.trunc(made.samples.weights)))


def equal_weights(batch: ShardBatch, *arguments: Any) -> Any:
    made = built(batch, *arguments)
    return evolve(made, samples=evolve(made.samples, weights=np.ones_like(made.samples.weights)))


def advantages_of_the_next_token(batch: ShardBatch, *arguments: Any) -> Any:
    made = built(batch, *arguments)
    columns = {**made.samples.columns, "advantages": np.roll(made.samples.columns["advantages"], 1)}
    return evolve(made, samples=evolve(made.samples, columns=columns))


def no_gradient(objective: LossObjective, *arguments: Any) -> Any:
    total, output = computed(objective, *arguments)
    return total.detach() + 0 * total, output


def terms_without_coefficients(objective: LossObjective, *arguments: Any) -> Any:
    parts = evolve(objective.parts, terms=tuple(evolve(term, coefficient=1.0) for term in objective.parts.terms))
    return computed(evolve(objective, parts=parts), *arguments)


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        (ShardBatch, "_build", next_labels),
        (ShardBatch, "_build", earlier_positions),
        (ShardBatch, "_build", whole_weights),
        (ShardBatch, "_build", equal_weights),
        (ShardBatch, "_build", advantages_of_the_next_token),
        (LossObjective, "__call__", no_gradient),
        (LossObjective, "__call__", terms_without_coefficients),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_that_every_cut_makes(
    pools: Any, configure: Configure, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mistake: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    rows = list(Prover(configure(loss=OBJECTIVE), pools["qwen3"]).rows(CUTS))
    assert [row.holds for row in rows] == [False, False]
    if mistake is terms_without_coefficients:
        assert rows[0].explanation.startswith("term kl counts x10.00")
        assert "term entropy counts x100.00" in rows[0].explanation


def test_a_critic_by_definition(pools: Any, configure: Configure) -> None:
    for row in Prover(configure(loss={"use": "value_clip"}), pools["llama"], dtype="float64").rows(CUTS):
        assert row.holds, row


def test_corrections_by_definition(pools: Any, configure: Configure) -> None:
    corrections = [{"use": "token_mask"}, {"use": "tis", "ratio": "sequence"}, {"use": "sequence_mask", "low": 0.5, "high": 2.0}]
    loss = {**OBJECTIVE, "corrections": corrections}
    for row in Prover(configure(loss=loss), pools["llama"], dtype="float64").rows(CUTS):
        assert row.holds, row


def test_where_nothing_is_learned_nothing_is_proved(pools: Any, configure: Configure) -> None:
    silent = {"use": "rollout_is", "clip_low": 0.0, "clip_high": 0.0}
    with pytest.raises(UnsupportedError, match="no gradient on the recorded rollouts"):
        list(Prover(configure(loss=silent), pools["qwen3"]).rows(CUTS))
