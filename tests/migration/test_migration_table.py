"""Every row of docs/reference/migration.md against the other engine's published formula.

The tables are read from the page: a row without a formula in `published_formulas` fails, as does a formula without a row.

Not covered: the scores themselves, advantages, and ratios beyond e^20, where the engines cut in different ways.
"""

import itertools
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from published_formulas import (
    GROUPS,
    LENGTHS,
    MICRO_BATCH,
    ONE_ADVANTAGE,
    PUBLISHED,
    Batch,
    dppo,
    dual_clip,
    importance_sampling,
    make_batch,
    ppo,
    rollout_is,
    sapo,
    skyrl,
    tokens,
    verl,
    verl_dppo_tv,
)

from skyrl_engine import BatchStructure, LossOutput
from skyrl_engine.contracts.kinds.loss import LossTokens, Sequences
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.testing.subject import CONTEXT, select_plugin

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "migration.md"
STEP = 1e-6
DEFAULT_LOSS, DEFAULT_REDUCER = ("ppo", {}), ("token_mean", {})


@frozen
class Row:
    """One row: whose it is, what they write, and what we do; a choice is a name and options."""

    engine: str
    theirs: str
    loss: tuple[str, dict]
    reducer: tuple[str, dict]
    gradient_only: bool


def rows() -> list[Row]:
    found, engine = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            engine = line.removeprefix("## ")
        elif line.startswith("| `"):
            theirs, loss, reducer, equal, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            assert equal in ("value, gradient", "only the gradient"), line
            choices = choice(loss, DEFAULT_LOSS), choice(reducer, DEFAULT_REDUCER)
            found.append(Row(engine, theirs.strip("`"), *choices, gradient_only=equal == "only the gradient"))
    return found


def choice(cell: str, default: tuple[str, dict]) -> tuple[str, dict]:
    if cell == "any":
        return default
    name, *options = re.findall(r"`([^`]+)`", cell)
    return name, tomllib.loads(f"options = {{ {', '.join(options)} }}")["options"]


def test_every_section_says_what_its_rows_were_read_from() -> None:
    """An installed engine's version is the one that `nox -s peers` installs and runs; another's is a commit, and rows have file and line."""
    text = PAGE.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    pinned = (PAGE.parents[2] / "requirements-peers.txt").read_text() + (PAGE.parents[2] / "tests/running/beside.toml").read_text()
    for engine in ("TRL", "verl"):
        (version,) = re.findall(rf"of {engine} (\d+\.\d+\.\d+)", sections[engine].partition("|")[0])
        assert f"{engine.lower()}=={version}" in pinned
    assert re.search(r"\w\.py` at commit [0-9a-f]{7}\b", sections["SkyRL"].partition("|")[0])
    of_skyrl = re.findall(r"^\| `.+$", sections["SkyRL"], re.MULTILINE)
    assert of_skyrl
    assert all(re.search(r"\| `\w+\.py:\d+` \|$", row) for row in of_skyrl)


def test_losses_of_tinker_are_losses_of_its_sdk() -> None:
    """The SDK that requirements-dev.txt installs is the published word on `loss_fn`."""
    from tinker.types import LossFnType

    theirs = {row.theirs.partition(",")[0].removeprefix("loss_fn=") for row in rows() if row.engine == "Tinker"}
    assert len(theirs) == 5
    assert theirs <= set(get_args(LossFnType))


def test_rows_and_formulas_are_the_same() -> None:
    of_page = [(row.engine, row.theirs) for row in rows()]
    assert len(of_page) == len(set(of_page))
    assert set(of_page) == set(PUBLISHED)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.engine}: {row.theirs}")
def test_the_row_is_the_published_formula(row: Row) -> None:
    """1e-7 relative to the largest: verl adds 1e-8 to denominators, central differences over 2e-6 are good to 1e-9."""
    key = (row.engine, row.theirs)
    batch, masks = make_batch(one_advantage=key in ONE_ADVANTAGE)
    ours, gradient = objective(row, batch, masks)
    formula = PUBLISHED[key]
    expected = gradient_of(formula, batch)
    assert max(abs(value) for value in expected) > 1e-3
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-7 * max(abs(value) for value in expected))
    theirs = formula(batch)
    if row.gradient_only:
        assert ours != pytest.approx(theirs, rel=1e-3), "the value is equal as well; say so on the page"
    else:
        assert ours == pytest.approx(theirs, rel=1e-7)


def objective(row: Row, batch: Batch, masks: list[np.ndarray]) -> tuple[float, np.ndarray]:
    """Sum of weight times loss by the engine's own plugins, and its gradient [n] by what the loss differentiates."""
    counts = torch.tensor([len(sequence) for sequence in batch.p])
    ids = torch.arange(len(counts))
    index = torch.repeat_interleave(ids, counts)
    names = {
        "logprobs": "p",
        "values": "p",
        "old_logprobs": "old",
        "rollout_logprobs": "rollout",
        "ref_logprobs": "ref",
        "advantages": "a",
    }
    loss = select_plugin("loss", row.loss[0], row.loss[1]).make(CONTEXT)
    needs = {need: torch.from_numpy(np.concatenate(getattr(batch, names.get(need, need)))) for need in loss.needs}
    variable = needs["values" if "values" in needs else "logprobs"].requires_grad_()
    output = loss(LossTokens(needs, Sequences(index, counts, ids, ids), torch.Generator))
    losses = output.token_loss if isinstance(output, LossOutput) else output
    reducer = select_plugin("reducer", row.reducer[0], row.reducer[1]).make(evolve(CONTEXT, max_sequence_length=None))
    structure = BatchStructure(
        loss_weight=np.concatenate(masks).astype(np.uint8),
        action_offsets=offsets_of(LENGTHS),
        group_ids=np.array(GROUPS),
        unit_ids=np.arange(len(LENGTHS)),
        micro_batch=np.arange(len(LENGTHS)) // MICRO_BATCH,
    )
    total = (torch.from_numpy(reducer.weights(structure)[np.concatenate(masks)]) * losses).sum()
    (gradient,) = torch.autograd.grad(total, variable)
    return total.item(), gradient.numpy()


def gradient_of(formula: Callable[[Batch], float], batch: Batch) -> list[float]:
    """Central differences over every token's `p`, in order, with `frozen` held."""

    def at(sequence: int, token: int, moved: float) -> float:
        p = [values.copy() for values in batch.p]
        p[sequence][token] += moved
        return formula(Batch({**batch.columns, "p": p}))

    return [(at(s, t, STEP) - at(s, t, -STEP)) / (2 * STEP) for s, t in tokens(batch)]


@pytest.mark.parametrize(
    ("reducer", "ours", "theirs"),
    [
        # One sequence of two tokens of weight 1/4, one of two of weight 1/8; one group; each sequence a micro-batch.
        ("token_mean", [1 / 3, 1 / 3, 1 / 6, 1 / 6], [1 / 4, 1 / 4, 1 / 8, 1 / 8]),
        ("token_mean_legacy", [1 / 4, 1 / 4, 1 / 4, 1 / 4], [1 / 8, 1 / 8, 1 / 16, 1 / 16]),
        ("sequence_mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4], [1 / 8, 1 / 8, 1 / 16, 1 / 16]),
        ("group_mean", [1 / 3, 1 / 3, 1 / 6, 1 / 6], [1 / 4, 1 / 4, 1 / 8, 1 / 8]),
    ],
)
def test_what_the_page_says_of_weights_between_0_and_1(reducer: str, ours: list[float], theirs: list[float]) -> None:
    """Theirs is the mean's own formula with its denominator at 1 or more, as SkyRL clamps it; ours divides by the sum of weights itself."""
    weight = np.array([0.25, 0.25, 0.125, 0.125])
    structure = BatchStructure(
        loss_weight=weight.astype(np.float32),
        action_offsets=np.array([0, 2, 4]),
        group_ids=np.array([0, 0]),
        unit_ids=np.arange(2),
        micro_batch=np.arange(2),
    )
    made = select_plugin("reducer", reducer, {}).make(evolve(CONTEXT, max_sequence_length=None))
    np.testing.assert_allclose(made.weights(structure), ours, rtol=1e-6)
    halves = np.array([0.5, 0.5, 0.25, 0.25])
    sums, over = {"token_mean": (0.75, 1), "token_mean_legacy": (halves, 2), "sequence_mean": (halves, 2), "group_mean": (0.75, 1)}[
        reducer
    ]
    np.testing.assert_allclose(weight / (over * np.maximum(sums, 1)), theirs)
    np.testing.assert_allclose(weight / (over * np.asarray(sums)), ours)


def test_what_the_page_says_of_gspo() -> None:
    """The mean log-ratio of a sequence is over its tokens that carry loss, whatever their weights: a loss does not see them."""
    p, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.4, -1.8])
    ids = torch.tensor([0])
    needs = {"logprobs": p, "old_logprobs": old, "advantages": torch.ones(2)}
    loss = select_plugin("loss", "gspo", {"clip_low": 1.0, "clip_high": 9.0}).make(CONTEXT)
    output = loss(LossTokens(needs, Sequences(torch.zeros(2, dtype=torch.long), torch.tensor([2]), ids, ids), torch.Generator))
    np.testing.assert_allclose(output.token_loss.numpy(), [-np.exp(0.1)] * 2, rtol=1e-6)
    weights, differences = np.array([0.75, 0.25]), np.array([0.4, -0.2])
    assert (weights * differences).sum() / max(weights.sum(), 1) == pytest.approx(0.25), "and this is SkyRL's"


def test_the_batch_shows_what_rows_differ_in() -> None:
    """Formulas that some rows tell apart give different numbers here: no two reductions, no two clips agree by chance."""
    batch, _ = make_batch(one_advantage=False)
    reductions = [skyrl(ppo(), part)(batch) for part in ("token_mean", "token_mean_legacy", "sequence_mean", "prompt_mean")]
    reductions += [verl(ppo(), part)(batch) for part in ("seq-mean-token-mean", "seq-mean-token-sum", "token-sum")]
    losses = [skyrl(part)(batch) for part in (ppo(), dual_clip(), ppo(0.2, 0.28), sapo, importance_sampling, rollout_is)]
    for token in (dppo("tv", 0.2), dppo("kl", 0.05), verl_dppo_tv):
        masked = {b_sign for s, t in tokens(batch) if token(batch, s, t, b_sign := np.sign(batch.a[s][t])) == 0}
        assert masked == {1.0, -1.0}
    for one, other in itertools.chain(itertools.combinations(reductions, 2), itertools.combinations(losses, 2)):
        assert abs(one - other) > 1e-4 * abs(one)
