"""The objective multiplies weights and terms, sums them, and gates outputs; nothing else may."""

import numpy as np
import pytest
import torch
from attrs import evolve

from skyrl_engine import LossOutput, Metric
from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.kinds.loss import FunctionLoss
from skyrl_engine.contracts.values.ragged import Ragged
from skyrl_engine.errors import ContractError, DataError, PluginBrokenError
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.testing.subject import part_of


def micro_batch(weights: list[float], **columns: list[float]) -> MicroBatch:
    """Two samples with 2 and 1 scored tokens, out of 3 actions each."""
    scored = Ragged.from_list([[0, 2], [1]], np.int32)
    samples = ScoredSamples(
        sample_ids=np.array([7, 3]),
        group_ids=np.array([0, 0]),
        unit_ids=np.array([0, 1]),
        action_lengths=np.array([3, 3]),
        scored=scored,
        columns={name: np.asarray(values, dtype=np.float32) for name, values in columns.items()},
        weights=np.asarray(weights, dtype=np.float64),
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch({}, nothing, nothing, Ragged.from_list([], np.int64), samples)


def objective(function, needs=("logprobs",), *, per_token_outputs=True, step=1) -> LossObjective:
    main = part_of(FunctionLoss("test", function, None, needs), "test", "loss")
    return LossObjective(ObjectiveParts(main), seed=5, step=step, per_token_outputs=per_token_outputs)


def test_gradient_is_the_weight_of_each_term():
    """d(sum w (-lp)) / d lp = -w, to the last bit, because the engine does nothing but multiply and sum."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    total, output = objective(lambda tokens, _: -tokens.logprobs)({"logprobs": logprobs}, micro_batch([0.5, 0.25, 0.125]))
    total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, -0.25, -0.125]
    assert total.item() == output.metrics["loss"].result == 0.5 + 0.5 + 0.375


def test_outputs_are_columnar_and_keyed_by_sample():
    logprobs = torch.tensor([-1.0, -2.0, -3.0])
    _, output = objective(lambda tokens, _: -tokens.logprobs)({"logprobs": logprobs}, micro_batch([1, 1, 1]))
    assert output.sample_ids.tolist() == [7, 3]
    assert output.fields["token_loss"][0].tolist() == [1.0, 2.0]
    assert output.fields["logprobs"][1].tolist() == [-3.0]
    assert output.scored[0].tolist() == [0, 2]
    assert output.fields["logprobs"].values.dtype == np.float32


def test_the_gate_changes_nothing_but_the_per_token_outputs():
    def noisy(tokens, _config):
        noise = torch.rand(len(tokens.logprobs), generator=tokens.generator)
        return LossOutput(-tokens.logprobs * noise, {"noise": Metric.mean(noise.sum().item(), len(noise))})

    results = []
    for gate in (True, False):
        logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
        total, output = objective(noisy, per_token_outputs=gate)({"logprobs": logprobs}, micro_batch([0.3, 0.2, 0.1]))
        total.backward()
        results.append((total.item(), logprobs.grad.tolist(), output.metrics, output.sample_ids.tolist()))
        assert bool(output.fields) is gate
        assert len(output.scored) == 2
    assert results[0] == results[1]


def test_generator_depends_on_step_and_samples_and_leaves_the_global_state_alone():
    def draw(tokens, _config):
        return tokens.logprobs * torch.rand(len(tokens.logprobs), generator=tokens.generator)

    before = torch.random.get_rng_state()
    logprobs = torch.ones(3)
    first, again, later = (
        objective(draw, step=step)({"logprobs": logprobs}, micro_batch([1, 1, 1]))[0].item() for step in (1, 1, 2)
    )
    assert first == again != later
    assert torch.equal(before, torch.random.get_rng_state())


def test_sequences_offer_sums_means_and_broadcast():
    seen = {}

    def look(tokens, _config):
        seen["sum"] = tokens.sequences.sum(tokens.advantages).tolist()
        seen["mean"] = tokens.sequences.mean(tokens.advantages).tolist()
        seen["broadcast"] = tokens.sequences.broadcast(torch.tensor([10.0, 20.0])).tolist()
        return tokens.logprobs

    batch = micro_batch([1, 1, 1], advantages=[1, 3, 5])
    objective(look, needs=("logprobs", "advantages"))({"logprobs": torch.zeros(3)}, batch)
    assert seen == {"sum": [4.0, 5.0], "mean": [2.0, 5.0], "broadcast": [10.0, 10.0, 20.0]}


def test_a_scalar_loss_is_refused_with_its_shape():
    with pytest.raises(ContractError, match=r"returned shape \[\] for 3 tokens"):
        objective(lambda tokens, _: tokens.logprobs.mean())({"logprobs": torch.zeros(3)}, micro_batch([1, 1, 1]))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda tokens: tokens.logprobs.detach().numpy(), "test returned a ndarray"),
        (lambda tokens: tokens.logprobs > 0, "test returned torch.bool"),
        (lambda tokens: tokens.logprobs.long(), "test returned torch.int64"),
        (lambda tokens: tokens.logprobs.to(torch.complex64), "test returned torch.complex64"),
    ],
)
def test_a_loss_of_other_than_real_numbers_is_refused(returned, message):
    with pytest.raises(ContractError, match=message):
        objective(lambda tokens, _: returned(tokens))({"logprobs": torch.zeros(3, requires_grad=True)}, micro_batch([1, 1, 1]))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": Metric.sum(1.0)}, "test returned a metric called 'loss', under which the engine reports its own"),
        ({"tokens": Metric.sum(1.0)}, "called 'tokens'"),
        ({"policy/entropy": Metric.mean(1.0, 1)}, "called 'policy/entropy'"),
        ({"clipped": 0.5}, "test returned the metric 'clipped' as float. Return a Metric"),
    ],
)
def test_a_metric_that_would_hide_the_engines_or_cannot_combine_is_refused(metrics, message):
    with pytest.raises(ContractError, match=message):
        objective(lambda tokens, _: LossOutput(-tokens.logprobs, metrics))({"logprobs": torch.zeros(3)}, micro_batch([1, 1, 1]))


def test_a_missing_column_is_named():
    with pytest.raises(DataError, match="needs the column 'advantages'"):
        objective(lambda tokens, _: tokens.advantages, needs=("advantages",))({"logprobs": torch.zeros(3)}, micro_batch([1, 1, 1]))


def test_reading_an_undeclared_need_says_what_to_declare():
    with pytest.raises(PluginBrokenError, match="add 'entropy' to its needs"):
        objective(lambda tokens, _: tokens.entropy)({"logprobs": torch.zeros(3)}, micro_batch([1, 1, 1]))


@pytest.mark.parametrize(
    ("read", "needs", "message"),
    [
        (lambda tokens: tokens.logprob, ("logprobs",), "reads tokens.logprob; did you mean tokens.logprobs?"),
        (lambda tokens: tokens.advantage, ("logprobs", "advantages"), "reads tokens.advantage; did you mean tokens.advantages?"),
        (
            lambda tokens: tokens.value,
            ("logprobs",),
            "reads tokens.value; did you mean tokens.values? Declare it: needs = ['logprobs', 'values']",
        ),
        (lambda tokens: tokens.sequence, ("logprobs",), "reads tokens.sequence; did you mean tokens.sequences?"),
        (lambda tokens: tokens.returns, ("logprobs",), "declares needs = ['logprobs']; add 'returns' to its needs"),
        (lambda tokens: tokens.logprobs, (), "declares needs = []; add 'logprobs' to its needs"),
    ],
)
def test_a_misspelt_need_is_answered_with_the_right_one(read, needs, message):
    batch = micro_batch([1, 1, 1], advantages=[1, 1, 1])
    with pytest.raises(PluginBrokenError) as caught:
        objective(lambda tokens, _: read(tokens), needs=needs)({"logprobs": torch.zeros(3)}, batch)
    assert caught.value.cause.endswith(message), "and nothing else is advised"
    assert f"{message}. ".replace("?. ", "? ") in str(caught.value)


def test_no_scored_token_gives_a_differentiable_zero():
    empty = ScoredSamples(
        np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64),
        Ragged.from_list([], np.int32), {}, np.zeros(0),
    )  # fmt: skip
    nothing = torch.zeros(0, dtype=torch.int64)
    parameter = torch.ones(1, requires_grad=True)
    total, output = objective(lambda tokens, _: -tokens.logprobs)(
        {"logprobs": (parameter * 2)[:0].clone()}, MicroBatch({}, nothing, nothing, Ragged.from_list([], np.int64), empty)
    )
    total.backward()
    assert total.item() == 0
    assert len(output.sample_ids) == 0


def test_a_critic_is_spared_log_probabilities_unless_outputs_are_wanted():
    def squared(tokens, _config):
        return 0.5 * (tokens.values - tokens.returns) ** 2

    critic = objective(squared, needs=("values", "returns"), per_token_outputs=False)
    assert critic.needs == {"values"}
    assert objective(squared, needs=("values", "returns")).needs == {"values", "logprobs"}
    assert objective(lambda tokens, _: tokens.returns, needs=("returns",), per_token_outputs=False).needs == {"logprobs"}
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    batch = micro_batch([1, 0.5, 0.25], returns=[0, 0, 1])
    total, _ = critic({"values": values}, batch)
    total.backward()
    assert total.item() == 0.5 + 0.5 * 2 + 0.25 * 2
    assert values.grad.tolist() == [1, 1, 0.5]


def test_a_micro_batch_without_tokens_takes_part_through_every_score_that_is_read():
    """A loss may return a constant for no tokens; ranks that have tokens differentiate through both heads all the same."""
    empty = ScoredSamples(
        np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64),
        Ragged.from_list([], np.int32), {}, np.zeros(0),
    )  # fmt: skip
    nothing = torch.zeros(0, dtype=torch.int64)
    heads = {name: torch.ones(1, requires_grad=True) for name in ("logprobs", "values")}
    both = objective(lambda tokens, _: tokens.logprobs.new_zeros(0), needs=("logprobs", "values"))
    scores = {name: (head * 2)[:0].clone() for name, head in heads.items()}
    both(scores, MicroBatch({}, nothing, nothing, Ragged.from_list([], np.int64), empty))[0].backward()
    assert [head.grad.tolist() for head in heads.values()] == [[0], [0]]


def test_a_loss_that_fails_is_named_with_its_own_line():
    def broken(tokens, _config):
        return tokens.logprobs + tokens.entropy

    with pytest.raises(PluginBrokenError, match=r"test failed in its call: .*add 'entropy' to its needs") as caught:
        objective(broken)({"logprobs": torch.zeros(3)}, micro_batch([1, 1, 1]))
    (place,) = caught.value.details
    assert place.endswith("in broken")
    assert __file__ in place


def test_a_loss_that_does_not_depend_on_the_model_is_refused():
    def detached(tokens, _config):
        return -tokens.logprobs.detach()

    with pytest.raises(ContractError, match="do not depend on the model"):
        objective(detached)({"logprobs": torch.zeros(3, requires_grad=True)}, micro_batch([1, 1, 1]))
    objective(detached)({"logprobs": torch.zeros(3)}, micro_batch([1, 1, 1]))  # scoring needs no gradient


def test_the_losses_of_sources_are_means_by_their_weights():
    batch = micro_batch([0.5, 0.25, 0.125], advantages=[1.0, 2.0, 3.0])
    samples = evolve(batch.samples, sources=np.array([3] * len(batch.samples.sample_ids)))
    loss = objective(lambda tokens, _: -tokens.logprobs * tokens.advantages, ("logprobs", "advantages"))
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    _, output = evolve(loss, per_token_outputs=False)({"logprobs": logprobs}, evolve(batch, samples=samples))
    expected = 0.5 * 1.0 + 0.25 * 4.0 + 0.125 * 9.0
    assert output.metrics == {"loss": Metric.sum(expected), "loss/3": Metric.mean(expected, 0.875)}
