"""Every way not to be a masked sum is refused, in the first call, with the cause that is there and no other."""

from types import SimpleNamespace

import pytest
import torch

from skyrl_engine.errors import ContractError
from skyrl_engine.interop import masked_loss


# Each takes per-token losses, the mask, log-ratios and advantages, all [S, T].
def masked_sum(b):
    return (b.loss * b.mask).sum()


CAUSES = {
    "masked mean": (
        lambda b: (b.loss * b.mask).sum() / b.mask.sum(),
        r"divides by its own mask \(masked mean over all",
    ),
    "masked mean with epsilon": (
        lambda b: (b.loss * b.mask).sum() / (b.mask.sum() + 1e-8),
        "masked mean over all tokens",
    ),
    "sequence mean": (
        lambda b: ((b.loss * b.mask).sum(-1) / b.mask.sum(-1).clamp(min=1)).mean(),
        r"divides by its own mask \(masked mean of each sequence\)",
    ),
    "mean over rows": (lambda b: (b.loss * b.mask).sum(-1).mean(), "uses a mean over rows"),
    "number of rows": (lambda b: (b.loss * b.mask).sum() / len(b.mask), "uses a mean over rows"),
    "mean over padding": (lambda b: (b.loss * b.mask).mean(), "a mean over all positions, padding included"),
    "width": (lambda b: (b.loss * b.mask).sum() / b.mask.shape[-1], "divides by the width of the padded batch"),
    "selected": (lambda b: b.loss[b.mask.bool()].sum(), "uses its mask as bool"),
    "compared": (lambda b: b.loss.where(b.mask > 0, 0.0).sum(), "uses its mask as bool"),
    "selected mean": (lambda b: b.loss[b.mask == 1].mean(), "uses its mask as bool"),
    "ignored": (lambda b: b.loss.sum(), "does not use its mask"),
    "counted": (
        lambda b: (b.loss * b.mask).sum() / b.mask.count_nonzero(),
        "number of its mask's entries that are not 0",
    ),
    "unmasked term": (
        lambda b: (b.loss * b.mask).sum() + b.delta.abs().sum(),
        "adds something that its mask does not",
    ),
    "squared": (lambda b: (b.loss * b.mask**2).sum(), "twice the mask gives 4 times the value"),
    "sequence-level ratio": (
        lambda b: (
            -b.adv * b.mask * ((b.delta * b.mask).sum(-1, keepdim=True) / b.mask.sum(-1, keepdim=True).clamp(min=1)).exp()
        ).sum(),
        "uses its mask inside the formula",
    ),
    "random": (lambda b: (b.loss * b.mask * (torch.rand_like(b.loss) > 0.5)).sum(), "draws random numbers"),
    "whitened": (lambda b: (b.loss * b.mask / b.adv[b.mask.bool()].std()).sum(), "when other tokens carry none"),
    "not finite": (lambda b: (b.loss / b.adv * b.mask).sum(), "is not finite where a batch holds padding"),
}


def plugin_of(reduce, **keywords):
    def theirs(log_probs, old_log_probs, advantages, loss_mask):
        delta = log_probs - old_log_probs
        return reduce(SimpleNamespace(loss=-delta.exp() * advantages, mask=loss_mask, delta=delta, adv=advantages))

    return masked_loss(theirs, **keywords).skyrl_engine_make_loss(config=None)


@pytest.mark.parametrize("name", CAUSES)
def test_refused_with_its_cause(make_tokens, name):
    reduce, cause = CAUSES[name]
    with pytest.raises(ContractError, match=f"theirs cannot be used as it is: it .*{cause}") as raised:
        plugin_of(reduce)(make_tokens())
    assert raised.value.remedy


@pytest.mark.parametrize("name", [name for name in CAUSES if name != "not finite"])
@pytest.mark.parametrize("counts", [(4, 0), (1,)])
def test_real_values_that_hide_the_fault_do_not_help(make_tokens, name, counts):
    """At the first step the ratio is 1, and a mean over one row, or one token, is a sum."""
    with pytest.raises(ContractError, match=CAUSES[name][1]):
        plugin_of(CAUSES[name][0])(make_tokens(counts, torch.float32, ratio=0.0))


def test_the_masked_sum_is_not_refused(make_tokens):
    tokens = make_tokens()
    expected = -(tokens.logprobs - tokens.old_logprobs).exp() * tokens.advantages
    torch.testing.assert_close(plugin_of(masked_sum)(tokens).token_loss, expected)


@pytest.mark.parametrize("name", ["masked mean", "masked mean with epsilon"])
def test_a_masked_mean_is_undone(make_tokens, name):
    """The epsilon stays: 1e-8 of nine tokens."""
    tokens = make_tokens()
    expected = -(tokens.logprobs - tokens.old_logprobs).exp() * tokens.advantages
    torch.testing.assert_close(
        plugin_of(CAUSES[name][0], reduction="token_mean")(tokens).token_loss, expected, rtol=1e-7, atol=1e-8
    )


@pytest.mark.parametrize("name", ["sequence mean", "mean over rows", "counted", "sequence-level ratio"])
def test_only_a_masked_mean_is_undone(make_tokens, name):
    with pytest.raises(ContractError, match="cannot be used"):
        plugin_of(CAUSES[name][0], reduction="token_mean")(make_tokens())


def test_a_sum_is_no_mean(make_tokens):
    with pytest.raises(ContractError, match='is no masked mean over all tokens, which is what reduction="token_mean" undoes'):
        plugin_of(masked_sum, reduction="token_mean")(make_tokens())


@pytest.mark.parametrize("name", ["random", "whitened", "mean over rows"])
def test_what_depends_on_the_batch_may_be_declared(make_tokens, name):
    assert len(plugin_of(CAUSES[name][0], batch_local=True)(make_tokens()).token_loss) == 9


@pytest.mark.parametrize("name", ["masked mean", "sequence-level ratio", "unmasked term", "squared", "selected"])
def test_a_declaration_does_not_make_a_sum_of_what_is_none(make_tokens, name):
    with pytest.raises(ContractError, match=CAUSES[name][1]):
        plugin_of(CAUSES[name][0], batch_local=True)(make_tokens(ratio=0.0))


def test_later_calls_are_checked_too(make_tokens):
    def changing(log_probs, old_log_probs, advantages, loss_mask):
        loss = (-log_probs * loss_mask).sum()
        return loss / loss_mask.sum() if (log_probs < -50).any() else loss

    loss = masked_loss(changing).skyrl_engine_make_loss(config=None)
    tokens = make_tokens()
    loss(tokens)
    with torch.no_grad():
        tokens.logprobs[0] = -60
    with pytest.raises(ContractError, match="masked mean over all tokens"):
        loss(tokens)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda b: b.loss * b.mask, r"a loss of shape \[\d+, \d+\]"),
        (lambda b: masked_sum(b).item(), "returned float as its loss"),
        (lambda b: {"loss": masked_sum(b)}, "returned dict as its loss"),
    ],
)
def test_what_is_no_scalar(make_tokens, result, message):
    with pytest.raises(ContractError, match=message):
        plugin_of(result)(make_tokens())
