"""Passes with labels of their own, over tokens without loss, and under one loss after another."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from skyrl_engine import DataError, Engine, UnsupportedError
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.errors import ConfigError, PluginNotFoundError
from skyrl_engine.modeling.tiny import SIZES, write_model, write_tokenizer

LENGTHS = (7, 4, 6)
RNG = np.random.default_rng(1)
IDS = [RNG.integers(0, SIZES["vocab_size"], length) for length in LENGTHS]
LABELS = [RNG.integers(0, SIZES["vocab_size"], length - 2) for length in LENGTHS]
WEIGHTS = np.array([0, 1, 0.5, 0, -1, 0, 0, 0, 2, 1, 0], np.float32)
"""Eleven response tokens, two fewer than tokens of each sample; the second sample has none that carries loss."""


@pytest.fixture(scope="module")
def columns() -> SampleColumns:
    actions = [length - 2 for length in LENGTHS]
    return SampleColumns.create(
        input_ids=np.concatenate(IDS),
        token_offsets=np.cumsum([0, *LENGTHS]),
        action_offsets=np.cumsum([0, *actions]),
        loss_weight=WEIGHTS,
        columns={
            "labels": np.concatenate(LABELS)[:, None],
            "advantages": RNG.normal(size=sum(actions)).astype(np.float32),
            "old_logprobs": RNG.normal(-5, 0.3, sum(actions)).astype(np.float32),
            "ids": RNG.integers(0, SIZES["vocab_size"], (sum(actions), 2)),
            "said": np.full((sum(actions), 2), np.log(0.3), np.float32),
        },
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    write_tokenizer(directory, ["some words"])
    return directory


@pytest.fixture
def engine(directory: Path) -> Iterator[Engine]:
    tables = {
        "model": {"path": str(directory), "dtype": "float64"},
        "loss": {"use": "cross_entropy"},
        "reducer": {"use": "sum"},
        "training": {"micro_batch_rows": 2},
    }
    with Engine.open(tables) as engine:
        yield engine


def compute_expected(directory: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Log-probabilities of the labels, and the gradient of their weighted sum, by transformers' own model."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    found = []
    for ids, labels in zip(IDS, LABELS, strict=True):
        table = model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        found.append(table[1:-1].gather(1, torch.from_numpy(labels)[:, None])[:, 0])
    logprobs = torch.cat(found)
    (-(torch.from_numpy(WEIGHTS).double() * logprobs).sum()).backward()
    return logprobs.detach().numpy(), {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def test_labels_stand_for_the_tokens_that_follow(engine: Engine, columns: SampleColumns, directory: Path) -> None:
    """The rows stay the samples' own: only what is scored at them changes, in every pass."""
    logprobs, gradient = compute_expected(directory)
    plan = engine.plan(columns)
    scored = engine.score(plan, labels="labels").result()
    np.testing.assert_allclose(scored.fields["logprobs"].values, logprobs, rtol=1e-6)
    evaluated = engine.evaluate(plan, labels="labels", tokens="actions").result()
    np.testing.assert_array_equal(evaluated.output.fields["logprobs"].values, scored.fields["logprobs"].values)
    learned = engine.forward_backward(plan, labels="labels").result()
    assert abs(learned.metrics["loss"].result + float(WEIGHTS @ logprobs)) < 1e-10
    for name, array in engine.gradients().items():
        assert np.abs(array - gradient[name]).max() <= 1e-10 * np.abs(gradient[name]).max(), name
    assert np.abs(scored.fields["logprobs"].values - engine.score(plan).result().fields["logprobs"].values).max() > 0.1


def test_tokens_without_loss_are_scored_and_learned_from_by_nobody(engine: Engine, columns: SampleColumns) -> None:
    """A correction, a term and a loss that counts see the tokens that they always see."""
    engine.use_loss({"use": "gspo"})
    found = {}
    for tokens in ("loss", "actions"):
        plan = engine.plan(columns)
        result = engine.forward_backward(plan, tokens=tokens).result()
        found[tokens] = result, engine.gradients()
        engine.discard()
    (usual, expected), (wide, gradients) = found["loss"], found["actions"]
    assert {name: value.result for name, value in usual.metrics.items()} == {
        name: value.result for name, value in wide.metrics.items()
    }
    for name, value in expected.items():
        assert np.abs(gradients[name] - value).max() <= 1e-12 * np.abs(value).max(), name
    scored = engine.score(plan).result().on_actions("logprobs")
    np.testing.assert_array_equal(wide.output.on_actions("logprobs").values, scored.values)
    for name in ("logprobs", "token_loss"):
        carried = WEIGHTS != 0
        np.testing.assert_array_equal(wide.output.on_actions(name).values[carried], usual.output.on_actions(name).values[carried])
    assert not wide.output.on_actions("token_loss").values[WEIGHTS == 0].any()


def test_a_score_of_several_numbers_is_as_many_outputs(engine: Engine, columns: SampleColumns) -> None:
    engine.use_loss({"use": "top_k_divergence"})
    plan = engine.plan(columns.with_columns({"teacher_ids": columns.columns["ids"], "teacher_logprobs": columns.columns["said"]}))
    output = engine.forward_backward(plan, tokens="actions").result().output
    for place in range(2):
        single = plan.with_columns({"one": columns.columns["ids"][:, [place]]})
        expected = engine.score(single, labels="one").result().fields["logprobs"].values
        np.testing.assert_allclose(output.fields[f"logprobs_at:teacher_ids[{place}]"].values, expected, rtol=1e-6)


def test_gradients_of_several_losses_add_up(engine: Engine, columns: SampleColumns) -> None:
    """With the reducer sum, whose weights know no batch; each loss is the one that it is in an engine of its own."""
    tables = [{"use": "cross_entropy"}, {"use": "skyrl-engine-losses:ppo", "clip_low": 0.05}, {"use": "cross_entropy"}]
    parts = []
    for table in tables:
        engine.use_loss(table)
        engine.forward_backward(engine.plan(columns)).result()
        parts.append(engine.gradients())
        engine.discard()
    for table in tables:
        engine.use_loss(table)
        engine.forward_backward(engine.plan(columns)).result()
    for name, gradient in engine.gradients().items():
        expected = sum(part[name] for part in parts)
        assert np.abs(gradient - expected).max() <= 1e-12 * np.abs(expected).max(), name
    assert not np.allclose(parts[0]["model.norm.weight"], parts[1]["model.norm.weight"])


@pytest.mark.parametrize(
    ("table", "kind", "message"),
    [
        ({"use": "nothing"}, PluginNotFoundError, "there is no loss 'nothing'"),
        ({"use": "ppo", "clip": 1.0}, ConfigError, "use_loss: loss.clip: is not a known key"),
        ({"use": "dpo"}, UnsupportedError, "makes sense only with the reducers sequence_mean"),
        ({"use": "value_clip"}, UnsupportedError, "the model has no value head"),
    ],
)
def test_a_loss_that_cannot_be_used_leaves_the_one_in_force(
    engine: Engine, columns: SampleColumns, table: dict[str, object], kind: type[Exception], message: str
) -> None:
    before = engine.evaluate(engine.plan(columns)).result().metrics["loss"].value
    with pytest.raises(kind, match=message):
        engine.use_loss(table)
    assert engine.evaluate(engine.plan(columns)).result().metrics["loss"].value == before


def test_a_mini_batch_keeps_its_loss_and_its_labels(engine: Engine, columns: SampleColumns) -> None:
    plan = engine.plan(columns)
    engine.forward_backward(plan, micro_batches=(0, 1))
    with pytest.raises(UnsupportedError, match="were not run, so the gradient is a part of one"):
        engine.use_loss({"use": "ppo"})
    with pytest.raises(UnsupportedError, match="was begun with labels = None, and goes on with 'labels'"):
        engine.forward_backward(plan, labels="labels")
    engine.forward_backward(plan)
    engine.use_loss({"use": "ppo"})


@pytest.mark.parametrize("wrong", [-1, SIZES["vocab_size"]])
def test_ids_that_the_model_does_not_know_are_refused_before_a_rank_meets_them(
    engine: Engine, columns: SampleColumns, wrong: int
) -> None:
    ids, labels = columns.input_ids.copy(), columns.columns["labels"].copy()
    place = int(columns.token_offsets[2])
    ids[place + 1] = wrong
    with pytest.raises(DataError, match=rf"sample 2 holds the token id {wrong} in input_ids, at place 1, and .* vocabulary has"):
        engine.plan(evolve(columns, input_ids=ids))
    # the first of the response tokens, which carries no loss
    labels[0] = wrong
    plan = engine.plan(evolve(columns, columns={**columns.columns, "labels": labels}))
    engine.evaluate(plan, labels="labels").result()
    with pytest.raises(DataError, match=rf"sample 0 holds the token id {wrong} in labels, at place 0"):
        engine.evaluate(plan, labels="labels", tokens="actions")


@pytest.mark.parametrize("labels", ["nothing", "advantages", "ids", "said"])
def test_labels_are_one_token_id_per_token(engine: Engine, columns: SampleColumns, labels: str) -> None:
    plan = engine.plan(columns)
    for call in (engine.score, engine.evaluate, engine.forward_backward):
        with pytest.raises(DataError, match=f"labels = '{labels}' names no column of one token id per token"):
            call(plan, labels=labels)
