"""A trainer that keeps the promise passes, and each mistake that trainers have made is named by its cause."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from trainer_rows import LENGTHS, PREFERENCES, ROLLOUTS, ROWS, TRAINED, load_llama

from skyrl_engine.errors import DataError, EngineError, ResultError, UnsupportedError
from skyrl_engine.proof.comparison import Gradients
from skyrl_engine.proof.diagnosis import Pieces
from skyrl_engine.proof.forwards import Forward, watch_forwards
from skyrl_engine.proof.row_kinds import Row, list_sequences
from skyrl_engine.proof.trainer import TrainerPass, TrainerProof, prove_trainer, read_gradients
from skyrl_engine.proof.trainer_cuts import TrainerCut, standard_cuts
from skyrl_engine.proof.trainer_definitions import define_dpo, define_grpo, define_token_mean, find_advantages
from skyrl_engine.proof.transformers_trainer import adapt_transformers_trainer
from skyrl_engine.testing.ranks.world import World

ONE, TWO = TrainerCut(micro_batch_rows=1), TrainerCut(micro_batch_rows=2)
PACKED = TrainerCut(micro_batch_rows=2, form="packed")
RANKS = TrainerCut(micro_batch_rows=2, ranks=2)
LEFT = TrainerCut(micro_batch_rows=2, padding_side="left")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_llama(tmp_path_factory.mktemp("model"))


Count = Callable[[Sequence[Row], TrainerCut, torch.Tensor], float]


def by_batch(rows: Sequence[Row], _cut: TrainerCut, _labels: torch.Tensor) -> float:
    """Return what each micro-batch's sum is divided by, where the trainer is right: the trained tokens of the batch."""
    return sum(sum(label != -100 for label in row["labels"]) for row in rows)


def by_micro_batch(_rows: Sequence[Row], _cut: TrainerCut, labels: torch.Tensor) -> float:
    return float((labels != -100).sum())


def by_accumulation(rows: Sequence[Row], cut: TrainerCut, labels: torch.Tensor) -> float:
    return by_micro_batch(rows, cut, labels) * sum(map(len, cut.divide(len(rows))))


def by_padding(_rows: Sequence[Row], _cut: TrainerCut, labels: torch.Tensor) -> float:
    return float(labels[:, 1:].numel())


def by_ranks(rows: Sequence[Row], cut: TrainerCut, labels: torch.Tensor) -> float:
    return by_batch(rows, cut, labels) * cut.ranks


def train(model: Any, rows: Sequence[Row], cut: TrainerCut, count: Count = by_batch, *, borders: bool = True) -> Gradients:
    """Compute a plain loop's gradient of the step; ranks come one after the other, and their gradients are summed."""
    model.zero_grad()
    for micro_batches in cut.divide(len(rows)):
        for members in micro_batches:
            chosen = [rows[place] for place in members]
            ids, labels, more = join(chosen, borders=borders) if cut.form == "packed" else pad(chosen, cut)
            logits = model(input_ids=ids, **more).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (loss / count(rows, cut, labels)).backward()
    return read_gradients(model)


def pad(rows: Sequence[Row], cut: TrainerCut) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    longest = max(len(row["input_ids"]) for row in rows) + cut.extra_padding

    def around(values: list[int], fill: int) -> list[int]:
        filling = [fill] * (longest - len(values))
        return [*filling, *values] if cut.padding_side == "left" else [*values, *filling]

    ids = torch.tensor([around(row["input_ids"], 0) for row in rows])
    labels = torch.tensor([around(row["labels"], -100) for row in rows])
    return ids, labels, {"attention_mask": torch.tensor([around([1] * len(row["labels"]), 0) for row in rows])}


def join(rows: Sequence[Row], *, borders: bool) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Join rows into one, whose positions begin again at each if there are `borders`: transformers then keeps attention within them,
    unless there is a cache.
    """
    ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
    labels = torch.tensor([[label for row in rows for label in (-100, *row["labels"][1:])]])
    places = [place for row in rows for place in range(len(row["labels"]))] if borders else range(ids.shape[1])
    return ids, labels, {"position_ids": torch.tensor([list(places)]), "use_cache": False}


def test_a_right_trainer_holds_in_every_cut(model: Any) -> None:
    cuts = [*standard_cuts(ROWS), RANKS]
    proof = prove_trainer(partial(train, model), ROWS, cuts=cuts, model=model, definition=define_token_mean(model, ROWS))
    proof.assert_holds()
    assert str(proof).endswith(f"All {len(cuts)} cuts give the same gradient.")
    assert str(proof).startswith("ok      padded, 6 rows at a time, 1 rank ")


def test_without_a_definition_the_whole_batch_is_the_measure(model: Any) -> None:
    prove_trainer(partial(train, model), ROWS, cuts=[ONE, PACKED], model=model).assert_holds()


@pytest.mark.parametrize("defined", [True, False])
@pytest.mark.parametrize(
    ("count", "cut", "cause"),
    [
        (by_micro_batch, ONE, "= number of micro-batches: samples count from x"),
        (by_micro_batch, TWO, "= number of micro-batches: samples count from x"),
        (by_accumulation, TWO, "gradient x1.00: samples count from x"),
        (by_ranks, RANKS, "gradient x0.50 = 1 / number of ranks"),
    ],
)
def test_a_wrong_mean_is_named(model: Any, count: Count, cut: TrainerCut, cause: str, defined: bool) -> None:
    definition = define_token_mean(model, ROWS) if defined else None
    whole = TrainerCut(micro_batch_rows=len(ROWS))
    proof = prove_trainer(partial(train, model, count=count), ROWS, cuts=[whole, cut], model=model, definition=definition)
    right, wrong = proof.verdicts
    assert right.holds
    assert not wrong.holds
    assert cause in wrong.explanation
    with pytest.raises(AssertionError, match="1 of 2 cuts give another gradient"):
        proof.assert_holds()


def score_pairs(model: Any, rows: Sequence[Row]) -> torch.Tensor:
    """[rows]: the log-probability of the chosen answer less that of the rejected one; right of their padding, in one pass."""
    sequences = [sequence for row in rows for sequence in list_sequences(row)]
    logprobs = score_padded(model, sequences)
    return logprobs[::2] - logprobs[1::2]


def score_padded(model: Any, sequences: Sequence[Any]) -> torch.Tensor:
    """[sequences]: the sums of the log-probabilities of trained tokens, of one forward pass."""
    padded = [{"input_ids": each.input_ids.tolist(), "labels": [0, *each.trained.tolist()]} for each in sequences]
    ids, trained, more = pad(padded, TWO)
    scores = model(input_ids=ids, **more).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (scores * (trained[:, 1:] == 1)).sum(1)


@pytest.mark.parametrize("mean_of_means", [False, True])
def test_a_preference_counts_as_often_as_every_other(model: Any, tmp_path: Path, mean_of_means: bool) -> None:
    """Micro-batches of four and two pairs: the mean over micro-batches of their means counts the last two twice as often as the others."""
    reference = load_llama(tmp_path)
    with torch.no_grad():
        for weights in reference.parameters():
            weights.mul_(1.01)
        known = score_pairs(reference, PREFERENCES)

    def dpo(rows: Sequence[Row], cut: TrainerCut) -> Gradients:
        model.zero_grad()
        (micro_batches,) = cut.divide(len(rows))
        for members in micro_batches:
            margins = score_pairs(model, [rows[place] for place in members]) - known[members]
            losses = -torch.nn.functional.logsigmoid(0.3 * margins)
            (losses.mean() / len(micro_batches) if mean_of_means else losses.sum() / len(rows)).backward()
        return read_gradients(model)

    cuts = [TWO, TrainerCut(micro_batch_rows=4)]
    definition = define_dpo(model, reference, PREFERENCES, beta=0.3)
    even, uneven = prove_trainer(dpo, PREFERENCES, cuts=cuts, model=model, definition=definition).verdicts
    assert even.holds, even
    assert uneven.holds is not mean_of_means, uneven
    if mean_of_means:
        assert uneven.explanation == "gradient x1.00: samples count from x0.75 to x1.50"


@pytest.mark.parametrize("defined", [True, False])
@pytest.mark.parametrize("over_micro_batch", [False, True])
def test_rollouts_are_weighed_by_the_batch(model: Any, defined: bool, over_micro_batch: bool) -> None:
    """Without a definition the groups are the pieces: a rollout alone has no advantage."""
    advantages = find_advantages(ROLLOUTS)
    of_row = {id(row): advantage for row, advantage in zip(ROLLOUTS, advantages, strict=True)}

    def grpo(rows: Sequence[Row], cut: TrainerCut) -> Gradients:
        model.zero_grad()
        (micro_batches,) = cut.divide(len(rows))
        for members in micro_batches:
            chosen = [rows[place] for place in members]
            scores = score_padded(model, [sequence for row in chosen for sequence in list_sequences(row)])
            tokens = sum(len(row["completion_ids"]) for row in (chosen if over_micro_batch else rows))
            total = -(scores * torch.tensor([of_row[id(row)] for row in chosen])).sum() / tokens
            (total / len(micro_batches) if over_micro_batch else total).backward()
        return read_gradients(model)

    definition = define_grpo(model, ROLLOUTS, reduction="token_mean") if defined else None
    whole = TrainerCut(micro_batch_rows=len(ROLLOUTS))
    first, second = prove_trainer(grpo, ROLLOUTS, cuts=[whole, TWO], model=model, definition=definition).verdicts
    assert first.holds, first
    assert second.holds is not over_micro_batch, second


def test_counted_padding_is_named(model: Any) -> None:
    whole = TrainerCut(micro_batch_rows=len(ROWS))
    definition = define_token_mean(model, ROWS)
    (verdict,) = prove_trainer(
        partial(train, model, count=by_padding), ROWS, cuts=[whole], model=model, definition=definition
    ).verdicts
    assert verdict.explanation == f"gradient x{TRAINED / (8 * 6):.2f} = 1 / padded positions per unit of loss weight"


def test_attention_across_borders_is_seen(model: Any) -> None:
    proof = prove_trainer(partial(train, model, borders=False), ROWS, cuts=[TWO, PACKED], model=model)
    assert [verdict.holds for verdict in proof.verdicts] == [True, False]
    assert "of it is no multiple of any sample's" in proof.verdicts[1].explanation


def test_a_lost_rank_is_named(model: Any) -> None:
    def first_rank(rows: Sequence[Row], cut: TrainerCut) -> TrainerPass:
        own = [rows[place] for members in cut.divide(len(rows))[0] for place in members]
        alone = TrainerCut(micro_batch_rows=cut.micro_batch_rows)
        every = [Forward(len(some), max(LENGTHS)) for rank in cut.divide(len(rows)) for some in rank]
        return TrainerPass(train(model, own, alone, count=lambda *_: TRAINED), every)

    (verdict,) = prove_trainer(first_rank, ROWS, cuts=[RANKS], definition=define_token_mean(model, ROWS)).verdicts
    assert verdict.explanation.endswith("rank 0's share of the loss weight: samples of rank 1 count for nothing")


def train_by_ddp(model: Any, rows: Sequence[Row], cut: TrainerCut, *, average_ranks: bool) -> TrainerPass:
    """Compute one rank's part under torch's DDP, which averages gradients over ranks.

    With `average_ranks` every rank takes the mean over its own tokens; else the mean over all, times the ranks that DDP divides by.
    """
    from torch.distributed import get_rank
    from torch.nn.parallel import DistributedDataParallel

    model.zero_grad()
    (members,) = cut.divide(len(rows))[get_rank()]
    ids, labels, more = pad([rows[place] for place in members], cut)
    parallel = DistributedDataParallel(model)  # which lives until the backward pass, in which it averages
    with watch_forwards(model) as forwards:
        logits = parallel(input_ids=ids, **more).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    divisor = by_micro_batch(rows, cut, labels) if average_ranks else by_batch(rows, cut, labels) / cut.ranks
    (loss / divisor).backward()
    return TrainerPass(read_gradients(model), forwards)


@pytest.mark.parametrize("average_ranks", [False, True])
def test_real_ranks_averaged_unevenly_are_named(model: Any, pair: World, average_ranks: bool) -> None:
    """The ranks' rows hold 13 and 10 trained tokens."""
    cut = TrainerCut(micro_batch_rows=3, ranks=2)

    def gradients(rows: Sequence[Row], cut: TrainerCut) -> TrainerPass:
        first, second = pair.run(train_by_ddp, model, rows, cut, average_ranks=average_ranks)
        return TrainerPass(first.gradients, [*first.forwards, *second.forwards])

    (verdict,) = prove_trainer(gradients, ROWS, cuts=[cut], definition=define_token_mean(model, ROWS)).verdicts
    assert verdict.holds is not average_ranks, verdict
    if average_ranks:
        assert verdict.explanation == f"gradient x1.00: samples count from x{23 / 26:.2f} to x{23 / 20:.2f}"


def test_micro_batches_that_are_not_accumulated_are_named(model: Any) -> None:
    def last_only(rows: Sequence[Row], cut: TrainerCut) -> Gradients:
        for members in cut.divide(len(rows))[0]:
            alone = [rows[place] for place in members]
            found = train(model, alone, TrainerCut(micro_batch_rows=len(alone)), count=lambda *_: TRAINED)
        return found

    (verdict,) = prove_trainer(last_only, ROWS, cuts=[TWO], model=model, definition=define_token_mean(model, ROWS)).verdicts
    assert verdict.explanation.endswith("samples count from x0.00 to x1.00")


@pytest.mark.parametrize(
    ("asked", "made", "words"),
    [
        (ONE, TrainerCut(micro_batch_rows=6), "the trainer ignored the cut: 1 forward pass instead of 6"),
        (TrainerCut(micro_batch_rows=2, extra_padding=3), TWO, "the trainer ignored the cut: a forward pass of 2 x 6 tokens instead of 2 x 9"),
        (PACKED, TWO, "the trainer ignored the cut: a forward pass of 2 x 6 tokens instead of 1 x 9"),
        (LEFT, TWO, "the trainer ignored the cut: 0 padded positions on the left instead of 11"),
        (TWO, LEFT, "the trainer ignored the cut: 0 padded positions on the right instead of 11"),
    ],
)  # fmt: skip
def test_a_cut_that_is_ignored_is_no_proof(model: Any, asked: TrainerCut, made: TrainerCut, words: str) -> None:
    definition = define_token_mean(model, ROWS)
    (verdict,) = prove_trainer(
        lambda rows, _cut: train(model, rows, made), ROWS, cuts=[asked], model=model, definition=definition
    ).verdicts
    assert not verdict.holds
    assert verdict.difference is not None
    assert verdict.difference < 1e-5, "the gradient itself is right"
    assert verdict.explanation == words


def test_a_refused_cut_is_shown_and_proves_nothing(model: Any) -> None:
    def one_process(rows: Sequence[Row], cut: TrainerCut) -> Gradients:
        if cut.ranks > 1:
            raise UnsupportedError("there is one process here", remedy="Take one rank")
        return train(model, rows, cut)

    both = prove_trainer(one_process, ROWS, cuts=[TWO, RANKS], model=model)
    both.assert_holds()
    assert "refused padded, 2 rows at a time, 2 ranks" in str(both)
    assert str(both).endswith("The one cut that was computed gives the same gradient. The trainer refused 1.")
    with pytest.raises(AssertionError, match="no cut was computed"):
        prove_trainer(one_process, ROWS, cuts=[RANKS], model=model).assert_holds()


def give(**arrays: Any) -> Callable[[Sequence[Row], TrainerCut], TrainerPass]:
    """A trainer that returns the same arrays for whatever rows, and tells the forward passes of `ONE`."""
    return lambda rows, _cut: TrainerPass(arrays, [Forward(1, len(row["input_ids"])) for row in rows])


def test_gradients_that_cannot_be_compared_are_refused(model: Any) -> None:
    definition = define_token_mean(model, ROWS)
    right = train(model, ROWS, ONE)
    name = next(iter(right))

    def prove(gradients: Any, **more: Any) -> TrainerProof:
        return prove_trainer(gradients, ROWS, **{"cuts": [ONE], "definition": definition, **more})

    cases: list[tuple[Gradients, str]] = [
        ({key: values for key, values in right.items() if key != name}, f"the trainer's gradients lack {name}"),
        ({**right, "other": np.zeros(2)}, "the reference lack other"),
        ({**right, name: right[name][:1]}, f"the gradient of {name} has the shape"),
        ({**right, name: right[name].astype(np.float16)}, f"the gradient of {name} is float16"),
        ({}, "the trainer returned no gradient"),
    ]
    for wrong, words in cases:
        with pytest.raises(ResultError, match=words):
            prove(give(**wrong))
    with pytest.raises(ResultError, match="nobody saw how the trainer computed the cut"):
        prove(lambda *_: right)
    (verdict,) = prove(give(**{**right, name: right[name] * np.nan})).verdicts
    assert verdict.explanation == f"the gradient of {name} is not finite"


@pytest.mark.parametrize(("left", "holds"), [(1e-9, True), (1e-5, False)])
def test_a_gradient_that_cancels_to_nothing_is_measured_by_the_whole(left: float, holds: bool) -> None:
    """The gradient of a bias of keys is 0 but for rounding: relative to itself, rounding of float32 would be infinite."""
    draw = np.random.default_rng(1)
    pieces = [{"weight": draw.normal(size=40), "bias": np.zeros(3)} for _ in ROWS]
    definition = Pieces([str(place) for place in range(len(ROWS))], pieces, np.ones(len(ROWS)))
    whole = sum(piece["weight"] for piece in pieces)
    bias = np.array([left * np.linalg.norm(whole), 0.0, 0.0])
    trained = give(weight=whole.astype(np.float32), bias=bias.astype(np.float32))
    (verdict,) = prove_trainer(trained, ROWS, cuts=[ONE], definition=definition).verdicts
    assert verdict.holds is holds, verdict


def test_a_reference_that_proves_nothing_is_refused(model: Any) -> None:
    whole = [TrainerCut(micro_batch_rows=len(ROWS))]
    passes = [Forward(len(ROWS), max(LENGTHS))]
    with pytest.raises(ResultError, match="is 0 everywhere"):
        prove_trainer(lambda *_: TrainerPass({"a": np.zeros(3)}, passes), ROWS, cuts=whole)
    with pytest.raises(ResultError, match="is not finite"):
        prove_trainer(lambda *_: TrainerPass({"a": np.full(3, np.nan)}, passes), ROWS, cuts=whole)
    draw = np.random.default_rng(0)

    def noise(rows: Sequence[Row], _cut: TrainerCut) -> TrainerPass:
        return TrainerPass({"a": draw.normal(size=50)}, [Forward(len(rows), max(LENGTHS))])

    with pytest.raises(ResultError, match="is no sum of the gradients of its rows"):
        prove_trainer(noise, ROWS, cuts=whole)


@pytest.mark.parametrize(
    ("rows", "cuts", "words"),
    [
        (ROWS[:1], None, "a batch of 1 cannot be cut"),
        ([*ROWS, {"input_ids": [1, 2]}], None, "row 6: labels is no list"),
        ([*ROWS, {"input_ids": [1, 2], "labels": [1, 2, 3]}], None, "row 6: 3 labels for 2 tokens"),
        ([*ROWS, PREFERENCES[0]], None, "row 6 is a preference row, and row 0 a supervised row"),
        ([{"prompt_ids": [1]}] * 2, None, "a row of a proof has the fields prompt_ids, which are no kind of rows"),
        ([{**PREFERENCES[0], "chosen_ids": []}] * 2, None, "row 0: chosen_ids is no list of one or more integers"),
        ([{**row, "reward": 1.0} for row in ROLLOUTS], None, "every prompt's rollouts have the same reward"),
        ([*ROLLOUTS, {**ROLLOUTS[0], "reward": float("nan")}], None, "row 8: reward is no finite number"),
        ([*ROWS, {"input_ids": [1.5, 2], "labels": [1, 2]}], None, "row 6: input_ids is no list"),
        ([{"input_ids": [1, 2], "labels": [2, -100]}] * 2, None, "no token of any row is trained"),
        (ROWS, [], "there is no cut to prove"),
        (ROWS, [TrainerCut(micro_batch_rows=0)], "is none"),
        (ROWS, [TrainerCut(micro_batch_rows=1, ranks=7)], "has more ranks than the 6 rows"),
        (ROWS, [TrainerCut(micro_batch_rows=1, form="packed", extra_padding=1)], "pads rows that it packs"),
    ],
)
def test_rows_and_cuts_that_cannot_be_used_are_refused(rows: Any, cuts: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        prove_trainer(give(a=np.ones(1)), rows, cuts=cuts)


def test_transformers_trainer_holds(model: Any) -> None:
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    torch.manual_seed(3)
    expected = torch.initial_seed()
    proof = prove_trainer(adapt_transformers_trainer(model), ROWS, model=model, definition=define_token_mean(model, ROWS))
    proof.assert_holds()
    assert all(verdict.holds for verdict in proof.verdicts)
    assert torch.initial_seed() == expected, "the global generator is as it was"
    assert model.config.use_cache
    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())


def test_transformers_trainer_with_a_mean_of_its_own_is_named(model: Any) -> None:
    """A `compute_loss_func` that does not read `num_items_in_batch`."""
    from transformers import Trainer

    def mean(outputs: Any, labels: torch.Tensor, **_given: Any) -> torch.Tensor:
        return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    adapted = adapt_transformers_trainer(model, make=partial(Trainer, compute_loss_func=mean))
    (verdict,) = prove_trainer(adapted, ROWS, cuts=[TWO], model=model, definition=define_token_mean(model, ROWS)).verdicts
    assert "= number of micro-batches: samples count from x" in verdict.explanation


def test_transformers_trainer_holds_on_ranks(model: Any, pair: World) -> None:
    adapted = adapt_transformers_trainer(model, start_ranks=lambda _size: pair)
    cuts = [TrainerCut(micro_batch_rows=3, ranks=2), TrainerCut(micro_batch_rows=1, ranks=2)]
    proof = prove_trainer(adapted, ROWS, cuts=[*cuts, RANKS], model=model, definition=define_token_mean(model, ROWS))
    assert [verdict.holds for verdict in proof.verdicts] == [True, True, False], proof
    assert proof.verdicts[2].refused
    assert "accelerate fills up micro-batches that are not even" in proof.verdicts[2].explanation


def test_what_the_adapter_cannot_do_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedError, match="chooses learning_rate"):
        adapt_transformers_trainer(model, learning_rate=1.0)
    (verdict,) = prove_trainer(
        adapt_transformers_trainer(model), ROWS, cuts=[RANKS], model=model, definition=define_token_mean(model, ROWS)
    ).verdicts
    assert verdict.refused
    assert "this adapter runs in one process" in verdict.explanation
    with pytest.raises(UnsupportedError, match="takes supervised rows, and these are preference rows"):
        adapt_transformers_trainer(model)(PREFERENCES, TWO)


def test_a_type_without_precision_is_refused(model: Any) -> None:
    half = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(EngineError, match="is bfloat16, in which rounding hides"):
        read_gradients(half)
