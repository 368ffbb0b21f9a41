"""Every mistake that can be planted turns the rows red that it concerns, with the right number next to it; without one, all is green."""

from collections.abc import Callable
from typing import Any

import pytest

from skyrl_engine.proof.cases import Case
from skyrl_engine.proof.plants import PLANTS
from skyrl_engine.proof.prover import CaseResult, Prover

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

ONE = Case("padded")
ROWS = [Case("padded", micro_batch_rows=rows) for rows in (2, 8)]
PACKED = Case("packed", micro_batch_tokens=120)
TREE = Case("tree", micro_batch_tokens=120)
SHUFFLED = Case("padded", micro_batch_rows=3, shuffled=True)

OBJECTIVE = {"use": "ppo", "terms": [{"use": "kl", "coef": 0.1}, {"use": "entropy", "coef": 0.01}]}


@pytest.fixture(scope="module")
def prove(pools: Any, configure: Configure) -> Callable[..., list[CaseResult]]:
    """`prove("per_microbatch_mean", cases, loss=...)`: the rows."""

    def rows(plant: str | None, cases: list[Case], **tables: object) -> list[CaseResult]:
        tables.setdefault("loss", OBJECTIVE)
        prover = Prover(configure(**tables), pools["qwen3"], None if plant is None else PLANTS[plant])
        return list(prover.rows(cases))

    return rows


def test_every_cut_holds_without_a_mistake(prove: Callable[..., list[CaseResult]]) -> None:
    for row in prove(None, [ONE, *ROWS, PACKED, TREE, SHUFFLED]):
        assert row.holds, row
        assert row.difference is not None
        assert 0.0 < row.difference.gradient < 1e-5, "a difference of nothing at all would mean that nothing was compared"


@pytest.mark.parametrize("reducer", ["token_mean", "sequence_mean"])
def test_means_of_micro_batches_count_as_often_as_there_are_micro_batches(
    prove: Callable[..., list[CaseResult]], reducer: str
) -> None:
    cuts = {ROWS[0]: 8, ROWS[1]: 2, PACKED: 4}
    if reducer == "sequence_mean":
        del cuts[PACKED]  # its rows hold different numbers of samples
    whole, *rows = prove("per_microbatch_mean", [ONE, *cuts], reducer={"use": reducer}, loss={"use": "cross_entropy"})
    assert whole.holds, "one micro-batch is the whole batch"
    for row in rows:
        assert not row.holds
        assert row.explanation.startswith(f"gradient x{cuts[row.case]}.00 = number of micro-batches")


def test_a_sum_has_no_denominator_to_get_wrong(prove: Callable[..., list[CaseResult]]) -> None:
    assert all(row.holds for row in prove("per_microbatch_mean", ROWS, reducer={"use": "sum"}))


def test_a_mean_over_padding_is_named(prove: Callable[..., list[CaseResult]]) -> None:
    for row in prove("mean_over_padding", [*ROWS, PACKED]):
        assert not row.holds
        assert row.explanation.endswith(" = 1 / padded positions per unit of loss weight")


def test_terms_that_count_per_micro_batch_are_named_each(prove: Callable[..., list[CaseResult]]) -> None:
    rows = prove("terms_per_microbatch", [ONE, *ROWS])
    assert rows[0].holds
    for row, count in zip(rows[1:], (8, 2), strict=True):
        name = "= number of micro-batches"
        assert row.explanation == f"term kl counts x{count}.00 {name}; term entropy counts x{count}.00 {name}"


def test_truncated_weights_are_no_factor(prove: Callable[..., list[CaseResult]]) -> None:
    for row in prove("truncated_weights", [ONE, PACKED]):
        assert not row.holds
        assert "is no multiple of any sample's" in row.explanation


def test_outputs_under_other_samples_are_noticed_although_loss_and_gradient_are_right(
    prove: Callable[..., list[CaseResult]],
) -> None:
    for row in prove("outputs_out_of_order", [ONE, PACKED, SHUFFLED]):
        assert not row.holds
        assert row.difference is not None
        assert row.difference.is_within(1e-5)
        assert row.explanation == "token losses came back under other samples"


def test_what_declares_to_depend_on_the_cut_is_excused_and_not_hidden(prove: Callable[..., list[CaseResult]]) -> None:
    (whole, cut) = prove(None, [ONE, ROWS[0]], reducer={"use": "token_mean_legacy"})
    assert whole.holds
    assert not cut.holds
    assert cut.excuse.startswith("reducer 'token_mean_legacy' of skyrl-engine-reducers ")


def test_answers_that_see_their_siblings_are_noticed_where_rows_are_trees(prove: Callable[..., list[CaseResult]]) -> None:
    assert [row.holds for row in prove("visible_siblings", [ONE, PACKED, TREE])] == [True, True, False]


@pytest.mark.proof
@pytest.mark.usefixtures("without_ray")
def test_mistakes_between_ranks(prove: Callable[..., list[CaseResult]]) -> None:
    """Two processes: right without a mistake, and a lost or an averaged rank is named."""
    cases = [Case("padded", 2, micro_batch_rows=2), Case("packed", 2, micro_batch_tokens=80, shuffled=True)]
    assert all(row.holds for row in prove(None, cases))
    for row in prove("mean_over_ranks", cases):
        assert row.explanation == "gradient x0.50 = 1 / number of ranks"
    for row in prove("dropped_rank", cases):
        assert row.explanation.endswith(" = rank 0's share of the loss weight: samples of rank 1 count for nothing")
