"""Losses of pairs of other engines' forms give the losses and gradients of the native one; the formulas are ours, their shapes are theirs."""

# ruff: noqa: ARG005 -- the kit reads names of arguments

import pytest
import torch
from torch.nn.functional import logsigmoid

from skyrl_engine.contracts import LossTokens, Pairs, Sequences
from skyrl_engine.errors import ContractError
from skyrl_engine.interop import pair_loss
from skyrl_engine.testing import LossConformance
from skyrl_engine_losses.plugin import dpo


def trl_form(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.1):
    """One loss per pair, and rewards."""
    margins = (chosen_logps - ref_chosen_logps) - (rejected_logps - ref_rejected_logps)
    return -logsigmoid(beta * margins), beta * (chosen_logps - ref_chosen_logps).detach()


class OpenRLHFForm(torch.nn.Module):
    def __init__(self, beta):
        super().__init__()
        self.beta = beta

    def forward(self, policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps):
        """The mean over pairs."""
        losses, rewards = trl_form(
            policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, self.beta
        )
        return losses.mean(), rewards.mean()


def simpo_form(policy_chosen_logps, policy_rejected_logps, config):
    return -logsigmoid(config.beta * (policy_chosen_logps - policy_rejected_logps) - config.gamma)


per_pair = pair_loss(trl_form, config={"beta": 0.1}, metrics=("rewards/chosen",))
of_means = pair_loss(OpenRLHFForm(0.1).forward, name="of_means", metrics=("rewards/chosen",))
averaged = pair_loss(simpo_form, config={"beta": 2.0, "gamma": 0.5}, average=True)


class TestPerPair(LossConformance):
    plugin = per_pair


class TestOfMeans(LossConformance):
    plugin = of_means
    examples = 4


class TestAveraged(LossConformance):
    plugin = averaged
    examples = 4


def make_tokens():
    torch.manual_seed(0)
    counts = torch.tensor([3, 5, 2, 4])
    sequences = Sequences(
        index=torch.repeat_interleave(torch.arange(4), counts),
        counts=counts,
        unit_ids=torch.tensor([0, 0, 1, 1]),
        group_ids=torch.tensor([0, 0, 1, 1]),
        roles=torch.tensor([0, 1, 1, 0]),
    )
    logprobs = (-torch.rand(14, dtype=torch.float64)).requires_grad_()
    needs = {"logprobs": logprobs, "ref_logprobs": -torch.rand(14, dtype=torch.float64)}
    return LossTokens(needs, sequences, torch.Generator, Pairs.of(sequences)), logprobs


@pytest.mark.parametrize("plugin", [per_pair, of_means])
def test_it_is_the_native_loss(plugin):
    schema = plugin.skyrl_engine_config_schema()
    theirs = plugin.skyrl_engine_make_loss(config=None if schema is None else schema())
    native = dpo.skyrl_engine_make_loss(config=dpo.skyrl_engine_config_schema()(beta=0.1))
    results = []
    for product in (theirs, native):
        tokens, logprobs = make_tokens()
        output = product(tokens)
        output.token_loss.sum().backward()
        results.append((output.token_loss.detach(), logprobs.grad, output.metrics["rewards/chosen"].result))
    for got, due in zip(*results, strict=True):
        torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(due), check_dtype=False)


def test_a_result_of_another_shape_is_refused():
    plugin = pair_loss(lambda chosen_logps, rejected_logps: torch.zeros(3), name="three")
    with pytest.raises(ContractError, match=r"three returns \(3,\) for 2 pairs"):
        plugin.skyrl_engine_make_loss(config=None)(make_tokens()[0])


def test_results_without_names_are_refused_where_some_have_one():
    plugin = pair_loss(
        lambda chosen_logps, rejected_logps: (chosen_logps - rejected_logps, 1.0, 2.0), name="three", metrics=("one",)
    )
    with pytest.raises(ContractError, match="of which not all have names"):
        plugin.skyrl_engine_make_loss(config=None)(make_tokens()[0])


def test_arguments_that_cannot_be_matched_are_named():
    with pytest.raises(TypeError, match="takes no log-probabilities of rejected answers"):
        pair_loss(lambda chosen_logps: chosen_logps, name="half")
