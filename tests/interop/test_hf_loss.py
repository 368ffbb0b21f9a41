"""A loss and a reducer of this engine in transformers' Trainer and in a plain loop: the gradient is that of the whole step, in any cut."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from trainer_rows import ROWS, TRAINED, load_llama

from skyrl_engine import loss, reducer
from skyrl_engine.errors import DataError, EngineError, PluginBrokenError, UnsupportedError
from skyrl_engine.interop import hf_loss
from skyrl_engine.proof.trainer import prove_trainer
from skyrl_engine.proof.trainer_cuts import TrainerCut, standard_cuts
from skyrl_engine.proof.trainer_definitions import define_token_mean
from skyrl_engine.proof.transformers_trainer import adapt_transformers_trainer

MINE = """
from skyrl_engine import loss

@loss(needs=("logprobs",))
def twice(tokens, config):
    return -2 * tokens.logprobs
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_llama(tmp_path_factory.mktemp("model"))


def in_trainer(model: Any, function: Any) -> Any:
    from transformers import Trainer

    return adapt_transformers_trainer(model, make=partial(Trainer, compute_loss_func=function))


def test_trainer_takes_the_step_of_the_whole_batch_in_every_cut(model: Any) -> None:
    """By 1, 2, 3 or all rows at a time, padded left and right, and packed: the mean over the tokens of the step."""
    cuts = standard_cuts(ROWS)
    assert {cut.form for cut in cuts} == {"padded", "packed"}
    proof = prove_trainer(in_trainer(model, hf_loss()), ROWS, cuts=cuts, model=model, definition=define_token_mean(model, ROWS))
    proof.assert_holds()


def test_gradients_are_those_of_trainers_own_loss_where_the_two_mean_the_same(model: Any) -> None:
    cut = TrainerCut(micro_batch_rows=2)
    adapted = (in_trainer(model, hf_loss()), adapt_transformers_trainer(model))
    ours, theirs = (compute(ROWS, cut).gradients for compute in adapted)
    assert ours.keys() == theirs.keys()
    size = np.sqrt(sum(np.square(gradient).sum() for gradient in theirs.values()))
    assert max(np.abs(ours[name] - theirs[name]).max() for name in theirs) <= 1e-6 * size


def split(size: int, pad: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels, int64[rows, width], of micro-batches of so many rows."""
    made = []
    for start in range(0, len(ROWS), size):
        rows = ROWS[start : start + size]
        width = max(len(row["input_ids"]) for row in rows) + pad
        ids, labels = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
        for number, row in enumerate(rows):
            ids[number, : len(row["input_ids"])], labels[number, : len(row["labels"])] = (
                torch.tensor(row[key]) for key in ("input_ids", "labels")
            )
        made.append((ids, labels))
    return made


def gradient(model: Any, function: Any, batches: list[tuple[torch.Tensor, torch.Tensor]], count: Any) -> torch.Tensor:
    model.zero_grad()
    for ids, labels in batches:
        mask = torch.ones_like(ids) if (ids != 0).all() else (ids != 0).long()
        function(model(input_ids=ids, attention_mask=mask), labels, count).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("of_loss", "of_reducer", "scale"),
    [("cross_entropy", "token_mean", 1.0), ("./mine.py:twice", "token_mean", 2.0), ("cross_entropy", "sum", float(TRAINED))],
)
def test_a_plain_loop_adds_up_micro_batches_of_any_size(
    model: Any, of_loss: str, of_reducer: str, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    function = hf_loss(of_loss, of_reducer)
    due = sum(
        cross_entropy(model(input_ids=ids).logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
        for ids, labels in split(1)
    )
    model.zero_grad()
    (scale * due / TRAINED).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for size, pad in ((1, 0), (2, 0), (4, 3), (6, 0)):
        got = gradient(model, function, split(size, pad), TRAINED)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=float(1e-5 * expected.abs().max()))


def test_plugins_may_be_given_as_they_are_and_a_reducer_is_judged_by_what_it_does() -> None:
    @reducer()
    def own_mean(structure, config):
        return structure.loss_weight / structure.loss_weight.sum(dtype=np.float64)

    @reducer()
    def by_sequence(structure, config):
        counts = np.diff(structure.action_offsets)
        return np.repeat(1 / np.maximum(counts, 1), counts) / len(counts)

    @loss(needs=("logprobs", "entropy"))
    def with_bonus(tokens, config):
        return -tokens.logprobs - 0.1 * tokens.entropy

    logits = torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, 2, -100, 3], [4, 5, 6, -100]])
    logprobs = logits[:, :-1].log_softmax(-1)
    kept = labels[:, 1:] != -100
    chosen = logprobs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    due = ((-chosen + 0.1 * (logprobs.exp() * logprobs).sum(-1)) * kept).sum() / 10
    torch.testing.assert_close(hf_loss(with_bonus, own_mean)(logits, labels, torch.tensor(10.0)), due)
    with pytest.raises(UnsupportedError, match=r"by_sequence.* needs the sequences of the whole step"):
        hf_loss(with_bonus, by_sequence)


def test_a_micro_batch_without_loss_has_a_gradient_of_zero() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    hf_loss()(logits, torch.full((2, 3), -100), 7).backward()
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("of_loss", "of_reducer", "words"),
    [
        ("ppo", "token_mean", r"needs old_logprobs, advantages, and compute_loss_func is given logits and labels alone"),
        ("dpo", "token_mean", "compares chosen with rejected answers"),
        ("cross_entropy", "sequence_mean", "needs the sequences of the whole step"),
        ("cross_entropy", "group_mean", "needs the sequences of the whole step"),
        ("nothing", "token_mean", "nothing"),
    ],
)
def test_what_a_trainer_does_not_tell_is_refused_by_name(of_loss: str, of_reducer: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        hf_loss(of_loss, of_reducer)


@pytest.mark.parametrize(
    ("labels", "count", "words"),
    [
        (torch.tensor([[1, 2, 3]]), None, "num_items_in_batch is missing"),
        (torch.tensor([[1, 2, 3]]), 2.5, "divides by one whole number"),
        (torch.tensor([[1, 2, 3]]), torch.tensor([2, 3]), "divides by one whole number"),
        (torch.tensor([[1, 2, 3]]), 1, "this micro-batch alone has 2 tokens"),
        (torch.tensor([[1, 2]]), 2, r"logits \[1, 3, 5\] and labels \[1, 2\]"),
        (None, 2, "without labels"),
    ],
)
def test_calls_that_do_not_fit_are_refused(labels: Any, count: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        hf_loss()(torch.zeros(1, 3, 5), labels, count)


def test_a_loss_that_draws_or_fails_is_named() -> None:
    @loss(needs=("logprobs",))
    def drawing(tokens, config):
        return tokens.generator().normal_()

    @loss(needs=("logprobs",))
    def failing(tokens, config):
        raise KeyError("beta")

    labels = torch.tensor([[1, 2, 3]])
    for one, kind, words in ((drawing, EngineError, "drawing"), (failing, PluginBrokenError, "failing.*KeyError")):
        with pytest.raises(kind, match=words):
            hf_loss(one)(torch.zeros(1, 3, 5), labels, 2)
