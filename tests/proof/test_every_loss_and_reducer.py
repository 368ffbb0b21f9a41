"""The promise on a model, for every first-party loss and every first-party reducer: no cut changes the gradient, but where that is declared.

Two-layer Qwen3 and Llama models, recorded rollouts with empty responses, masked tokens and fractional weights; the reference is the
objective by definition: one sample after the other through the plain model in float64.
"""

from collections.abc import Callable
from typing import Any

import pytest
from by_day import now

from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.proof.cases import Case
from skyrl_engine.proof.prover import Prover
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.resolve import Registry

pytestmark = [pytest.mark.proof, pytest.mark.usefixtures("without_ray")]

Configure = Callable[..., Any]
SAMPLES = 16


def first_party(kind: str) -> list[str]:
    return [record.name for record in Registry.discover().records(kind) if str(record.distribution).startswith("skyrl-engine")]


LOSSES = first_party("loss")
REDUCERS = [name for name in first_party("reducer") if name != "prompt_mean"]  # group_mean under another name
CUTS = [
    Case("padded", micro_batch_rows=1),
    Case("padded", micro_batch_tokens=120, shuffled=True),
    Case("packed", micro_batch_tokens=40),
    Case("tree", micro_batch_tokens=40),
    Case("tree", micro_batch_tokens=120, shuffled=True),
    Case("packed", micro_batch_tokens=120, shuffled=True),
]
IN_DOUBLE = [CUTS[0], CUTS[4], CUTS[5]]
SIZES = [Case("padded", micro_batch_rows=rows, shuffled=rows % 2 == 0) for rows in range(1, SAMPLES + 1)]
SIZED = ("cross_entropy", "gspo", "clip_cov", "value_clip")
"""A loss of each nature: of tokens, of sequences, of a whole micro-batch, of values."""
BY_DAY = (*SIZED, "ppo", "dpo", "kto", "divergence")
"""And of pairs, of judged answers, and of a teacher. The objective holds every pair of a loss and a reducer by day, without a model:
test_every_pair.py."""
TWO_RANKS = [
    Case("padded", 2, micro_batch_rows=3),
    Case("packed", 2, micro_batch_tokens=80, shuffled=True),
    Case("tree", 2, micro_batch_tokens=80, shuffled=True),
]


def is_allowed(loss: str, reducer: str) -> bool:
    product = load(Registry.discover().resolve("loss", loss))
    made = product.make(product.schema() if product.schema else None, FactoryContext())
    return made.reducers is None or reducer in made.reducers


def prove(pools: Any, configure: Configure, family: str, loss: str, reducer: str, cases: list[Case], dtype: Any) -> None:
    prover = Prover(configure(loss={"use": loss}, reducer={"use": reducer}), pools[family], dtype=dtype)
    rows = list(prover.rows(cases))
    assert len(rows) == len(cases)
    for row in rows:
        assert row.difference is not None, f"{family}, {loss}, {reducer}: {row.explanation}"
        assert row.holds or row.excuse, f"{family}, {loss}, {reducer}, {row.case.name}: {row.explanation} {row.difference}"
    if any(row.excuse for row in rows):
        assert not all(row.holds for row in rows), f"{loss} with {reducer} declares to depend on the cut, and does not"


def its_reducer(loss: str, turn: int = 0) -> str:
    """Losses and reducers take turns: every pair is held at the objective, and a model sees each of both a few times."""
    usable = [reducer for reducer in REDUCERS if is_allowed(loss, reducer)]
    return usable[(LOSSES.index(loss) + turn) % len(usable)]


@pytest.mark.parametrize("loss", now(LOSSES, *BY_DAY))
def test_both_precisions(pools: Any, configure: Configure, loss: str) -> None:
    prove(pools, configure, "qwen3", loss, its_reducer(loss), CUTS, "float32")
    prove(pools, configure, "llama", loss, its_reducer(loss, turn=3), IN_DOUBLE, "float64")


@pytest.mark.nightly
@pytest.mark.parametrize("loss", LOSSES)
def test_every_reducer_in_both_precisions(pools: Any, configure: Configure, loss: str) -> None:
    for reducer in REDUCERS:
        if is_allowed(loss, reducer):
            prove(pools, configure, "qwen3", loss, reducer, CUTS, "float32")
            prove(pools, configure, "llama", loss, reducer, IN_DOUBLE, "float64")


@pytest.mark.parametrize("loss", now(LOSSES, *SIZED))
def test_every_micro_batch_size_in_every_order(pools: Any, configure: Configure, loss: str) -> None:
    prove(pools, configure, "llama", loss, "token_mean" if is_allowed(loss, "token_mean") else "sequence_mean", SIZES, "float32")
    prove(pools, configure, "qwen3", loss, "sequence_mean", SIZES[::3], "float64")


@pytest.mark.parametrize("loss", now(LOSSES, *SIZED, "divergence"))
def test_two_ranks(pools: Any, configure: Configure, loss: str) -> None:
    """Real processes, gloo between them."""
    prove(pools, configure, "qwen3", loss, its_reducer(loss, turn=1), TWO_RANKS, "float32")


@pytest.mark.nightly
def test_two_ranks_with_every_reducer(pools: Any, configure: Configure) -> None:
    for reducer in REDUCERS:
        prove(pools, configure, "qwen3", "cross_entropy", reducer, TWO_RANKS, "float32")


def test_the_lists_are_whole() -> None:
    """A matrix over nothing would hold as well."""
    assert {"cross_entropy", "ppo", "gspo", "clip_cov", "value_clip", "kl", "entropy"} <= set(LOSSES)
    assert set(REDUCERS) == {
        "sum", "token_mean", "batch_token_mean", "token_mean_legacy", "sequence_mean", "sequence_mean_token_sum_norm", "group_mean",
        "trajectory_mean",
    }  # fmt: skip
