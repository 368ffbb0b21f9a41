"""Functions of other engines' forms give the losses and gradients of the native one; the formulas are ours, their shapes are theirs."""

import pickle
import subprocess
import sys
from inspect import Parameter, Signature

import attrs
import pytest
import torch
from cattrs import ClassValidationError

from skyrl_engine import LossOutput, Metric
from skyrl_engine.config.converter import strict_converter
from skyrl_engine.errors import ContractError, DataError
from skyrl_engine.interop import masked_loss
from skyrl_engine_losses.plugin import ppo


def clipped(log_probs, old_log_probs, advantages, low, high):
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def skyrl_form(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    assert rollout_logprobs is None
    loss = clipped(log_probs, old_log_probs, advantages, config.eps_clip_low, config.eps_clip_high)
    share = ((loss == 0) * loss_mask).sum() / loss_mask.sum()
    return (loss * loss_mask).sum(), {"clip_ratio": share.item()}


def verl_form(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None):
    low = config.clip_ratio_low if "clip_ratio_low" in config else config.clip_ratio
    high = config.get("clip_ratio_high", config.clip_ratio)
    loss = clipped(log_prob, old_log_prob, advantages, low, high)
    if rollout_is_weights is not None:
        loss = loss * rollout_is_weights
    return aggregate(loss, response_mask, loss_agg_mode, **config.global_batch_info), {"actor/pg_loss": loss.mean().item()}


def aggregate(loss, mask, mode, dp_size=1, batch_num_tokens=None):
    if mode == "token-sum":
        return (loss * mask).sum() * dp_size
    assert mode == "token-mean"
    return (loss * mask).sum() / (mask.sum() if batch_num_tokens is None else batch_num_tokens) * dp_size


def trl_form(per_token_logps, old_per_token_logps, advantages, completion_mask, epsilon_low=0.2, epsilon_high=0.2):
    """TRL's advantages are one number per sequence."""
    loss = clipped(per_token_logps, old_per_token_logps, advantages.unsqueeze(1), epsilon_low, epsilon_high)
    return (loss * completion_mask).sum() / completion_mask.sum().clamp(min=1.0)


class OpenRLHFForm(torch.nn.Module):
    def __init__(self, clip_eps_low, clip_eps_high):
        super().__init__()
        self.low, self.high = clip_eps_low, clip_eps_high

    def forward(self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None):
        loss = clipped(log_probs, old_log_probs, advantages, self.low, self.high)
        share = ((loss == 0) * action_mask).sum() / action_mask.sum()
        return (loss * action_mask).sum() / action_mask.sum(), share, -(log_probs - old_log_probs).detach().mean(), None


FORMS = {
    "skyrl": masked_loss(skyrl_form, config={"eps_clip_low": 0.2, "eps_clip_high": 0.28}),
    "verl, sum": masked_loss(
        verl_form,
        config={"clip_ratio": 0.2, "clip_ratio_high": 0.28, "loss_agg_mode": "token-sum", "global_batch_info": {"dp_size": 1}},
    ),
    "verl, counts of the batch": masked_loss(
        verl_form, config={"clip_ratio": 0.2, "clip_ratio_high": 0.28, "global_batch_info": {"dp_size": 1, "batch_num_tokens": 1}}
    ),
    "verl, mean": masked_loss(
        verl_form, config={"clip_ratio": 0.2, "clip_ratio_high": 0.28, "global_batch_info": {"dp_size": 1}}, reduction="token_mean"
    ),
    "trl": masked_loss(trl_form, config={"epsilon_high": 0.28}, per_sequence=("advantages",), reduction="token_mean"),
    "openrlhf": masked_loss(
        OpenRLHFForm(0.2, 0.28).forward, name="openrlhf", reduction="token_mean", metrics=("clip_ratio", "ppo_kl", "rollout_kl")
    ),
}


def make_loss(plugin, **options):
    """The loss as the engine makes it."""
    schema = plugin.skyrl_engine_config_schema()
    return plugin.skyrl_engine_make_loss(config=None if schema is None else schema(**options))


def losses_of(loss, tokens):
    output = loss(tokens)
    return output.token_loss if isinstance(output, LossOutput) else output


def of_one_advantage_per_sequence(tokens):
    constant = tokens.sequences.broadcast(tokens.sequences.mean(tokens.advantages))
    return attrs.evolve(tokens, needs={**tokens.needs, "advantages": constant})


@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_are_those_of_the_native_loss(make_tokens, form):
    """1e-12 in float64: the derivative by the mask is the token's own expression; sums are over at most nine tokens."""
    tokens = of_one_advantage_per_sequence(make_tokens())
    schema = ppo.skyrl_engine_config_schema()
    native = losses_of(ppo.skyrl_engine_make_loss(config=schema(clip_low=0.2, clip_high=0.28)), tokens)
    adapted = losses_of(make_loss(FORMS[form]), tokens)
    torch.testing.assert_close(adapted, native, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 2, len(native), dtype=native.dtype)
    gradients = [torch.autograd.grad((weights * losses).sum(), tokens.logprobs)[0] for losses in (adapted, native)]
    assert gradients[1].abs().max() > 0.1
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


def test_options_reach_the_function(make_tokens):
    tokens = make_tokens()
    wide, narrow = (make_loss(FORMS["skyrl"], eps_clip_high=high) for high in (9.0, 0.0))
    assert not torch.equal(losses_of(wide, tokens), losses_of(narrow, tokens))


def test_optional_columns_are_passed_when_they_are_needed(make_tokens):
    def corrected(log_probs, old_log_probs, advantages, loss_mask, rollout_logprobs=None, ref_log_probs=None):
        assert ref_log_probs is None
        return (-(log_probs - rollout_logprobs).exp() * advantages * loss_mask).sum()

    needs = ("logprobs", "old_logprobs", "advantages", "rollout_logprobs")
    tokens = make_tokens()
    loss = make_loss(masked_loss(corrected, needs=needs))
    assert loss.needs == needs
    torch.testing.assert_close(losses_of(loss, tokens), -(tokens.logprobs - tokens.rollout_logprobs).exp() * tokens.advantages)


def test_columns_of_ones_own_by_name(make_tokens):
    def weighted(log_probs, bonus, scale, mask):
        return (-scale * bonus * log_probs * mask).sum()

    tokens = make_tokens()
    plugin = masked_loss(weighted, arguments={"bonus": "entropy"}, config={"scale": 2.0})
    torch.testing.assert_close(losses_of(make_loss(plugin, scale=3.0), tokens), -3 * tokens.entropy * tokens.logprobs)


def test_metrics_are_weighted_by_tokens_unless_declared(make_tokens):
    def reporting(log_probs, loss_mask):
        return (-log_probs * loss_mask).sum(), {"share": 0.5, "largest": log_probs.max().detach(), "loss": 3.0, "nothing": None}

    output = make_loss(masked_loss(reporting, metrics={"largest": "max"}))(make_tokens())
    assert output.metrics["share"] == Metric.mean(4.5, 9)
    assert output.metrics["largest"].reduction == "max"
    assert output.metrics["reporting_loss"].result == 3.0, "under the engine's own name it would be refused"
    assert "nothing" not in output.metrics


def test_further_values_want_names(make_tokens):
    with pytest.raises(ContractError, match="further values, of which not all have names"):
        make_loss(masked_loss(OpenRLHFForm(0.2, 0.2).forward, reduction="token_mean", metrics=("clip_ratio",)))(make_tokens())


def test_random_numbers_are_seeded_and_the_global_state_stays(make_tokens):
    def thinned(log_probs, loss_mask):
        return (-log_probs * loss_mask * (torch.rand_like(log_probs) > 0.5)).sum()

    torch.manual_seed(3)
    before = torch.get_rng_state()
    loss = make_loss(masked_loss(thinned, batch_local=True))
    first, second = (losses_of(loss, make_tokens()) for _ in range(2))
    assert torch.equal(first, second)
    assert 0 < (first == 0).sum() < len(first)
    assert torch.equal(torch.get_rng_state(), before)


def test_in_evaluation_nothing_is_left_to_differentiate(make_tokens):
    with torch.no_grad():
        losses = losses_of(make_loss(FORMS["openrlhf"]), make_tokens())
    assert not losses.requires_grad
    assert len(losses) == 9


@pytest.mark.parametrize("counts", [(), (0,), (0, 0)])
def test_without_tokens_there_is_nothing_to_call(make_tokens, counts):
    def never(log_probs, loss_mask):
        raise AssertionError("called without a token")

    assert losses_of(make_loss(masked_loss(never)), make_tokens(counts)).shape == (0,)


@pytest.mark.parametrize("counts", [(1,), (2,), (1, 1), (0, 1, 0), (40, 1)])
def test_batches_of_any_shape(make_tokens, counts):
    tokens = make_tokens(counts, torch.float32)
    expected = clipped(tokens.logprobs, tokens.old_logprobs, tokens.advantages, 0.2, 0.28)
    torch.testing.assert_close(losses_of(make_loss(FORMS["skyrl"]), tokens), expected)


def test_values_that_differ_within_a_sequence_are_no_value_of_the_sequence(make_tokens):
    with pytest.raises(DataError, match="takes advantages as one value per sequence"):
        make_loss(FORMS["trl"])(make_tokens())


def test_a_value_that_is_not_finite_is_left_to_the_engine_to_name(make_tokens):
    tokens = make_tokens()
    broken = tokens.advantages.clone()
    broken[2] = torch.nan
    losses = losses_of(make_loss(FORMS["skyrl"]), attrs.evolve(tokens, needs={**tokens.needs, "advantages": broken}))
    assert losses.isnan().nonzero().tolist() == [[2]]


def test_an_option_that_the_function_wants_and_nobody_named(make_tokens):
    with pytest.raises(AttributeError, match=r"reads config\.eps_clip_high, which is no option; .* \(named: eps_clip_low\)"):
        make_loss(masked_loss(skyrl_form, config={"eps_clip_low": 0.2}))(make_tokens())


def test_options_pickle_and_are_equal():
    schema = FORMS["verl, sum"].skyrl_engine_config_schema()
    config = schema(clip_ratio=0.5)
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.global_batch_info["dp_size"] == 1
    assert dict(**config.global_batch_info) == {"dp_size": 1}


@pytest.mark.parametrize(
    ("takes", "keywords", "message"),
    [
        ("log_probs, advantages", {}, "takes no mask"),
        ("log_probs, loss_mask, action_mask", {}, "takes loss_mask and action_mask, of which one must be the mask"),
        ("log_probs, loss_mask, zeal", {}, "takes 'zeal', which is no known name"),
        ("log_probs, loss_mask", {"needs": ("logprobs", "advantages")}, "nothing that would be 'advantages'"),
        ("log_probs, advantages, loss_mask", {"needs": ("logprobs",)}, r"write needs=\('logprobs', 'advantages'\)"),
        ("log_probs, loss_mask", {"arguments": {"logits": "logprobs"}}, "takes no argument 'logits'"),
        ("log_probs, loss_mask", {"per_sequence": ("advantages",)}, "per_sequence names 'advantages'"),
        ("log_probs, loss_mask", {"reduction": "mean"}, "reduction must be one of sum, token_mean"),
        ("log_probs, loss_mask, config", {"config": {"clip": object()}}, "from which no type can be told"),
    ],
)
def test_what_cannot_be_matched_is_refused_where_it_is_written(takes, keywords, message):
    def function(**options):
        return options

    function.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in takes.split(", ")])
    with pytest.raises(TypeError, match=message):
        masked_loss(function, **keywords)


SKYRL_DEFAULTS = {
    "temperature": None,
    "policy_loss_type": "regular",
    "loss_reduction": "token_mean",
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.2,
    "clip_ratio_c": 3.0,
    "use_tis": False,
    "max_seq_len": None,
    "off_policy_correction": {
        "tis_ratio_type": None,
        "token_tis_ratio_clip_high": 2.0,
        "sequence_mask_metric": None,
        "outlier_token_is_threshold_low": None,
        "outlier_token_is_threshold_high": None,
    },
    "dynamic_sampling": {"type": None, "max_sample_batches": 30},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
}
"""As `dataclasses.asdict` shows SkyRL's AlgorithmConfig, with every kind of default: a scalar, a table, None."""


def corrected_form(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    """Reads the options as SkyRL does: None means off."""
    loss = clipped(log_probs, old_log_probs, advantages, config.eps_clip_low, config.eps_clip_high)
    correction = config.off_policy_correction
    if correction.tis_ratio_type is not None:
        assert correction.tis_ratio_type == "token"
        loss = loss * (old_log_probs - rollout_logprobs).exp().clamp(max=correction.token_tis_ratio_clip_high)
    if correction.outlier_token_is_threshold_low is not None:
        loss = loss * correction.outlier_token_is_threshold_low
    return (loss * loss_mask).sum(), {}


def test_the_defaults_of_skyrls_configuration_are_taken_as_they_are(make_tokens):
    """None of them is an option that is off, and the table of a run can set it."""
    needs = ("logprobs", "old_logprobs", "advantages", "rollout_logprobs")
    plugin = masked_loss(corrected_form, config=SKYRL_DEFAULTS, needs=needs)
    schema = plugin.skyrl_engine_config_schema()
    tokens = make_tokens()
    structured = strict_converter().structure
    off = losses_of(plugin.skyrl_engine_make_loss(config=structured({}, schema)), tokens)
    plain = losses_of(make_loss(FORMS["skyrl"], eps_clip_high=0.2), tokens)
    torch.testing.assert_close(off, plain, rtol=0, atol=0)

    table = {"off_policy_correction": {"tis_ratio_type": "token", "outlier_token_is_threshold_low": 0.5}, "max_seq_len": 8}
    config = structured(table, schema)
    assert (config.max_seq_len, config.temperature) == (8, None)
    assert pickle.loads(pickle.dumps(config)) == config
    ratio = (tokens.old_logprobs - tokens.rollout_logprobs).exp().clamp(max=2.0)
    corrected = losses_of(plugin.skyrl_engine_make_loss(config=config), tokens)
    torch.testing.assert_close(corrected, plain * ratio * 0.5)
    assert structured({"max_seq_len": "none"}, schema).max_seq_len is None
    with pytest.raises(ClassValidationError):
        structured({"max_seq_len": [1]}, schema)


def test_declarations_reach_the_product():
    plugin = masked_loss(
        skyrl_form, config={"eps_clip_low": 0.2, "eps_clip_high": 0.2}, advised_reducers=("sum",), homogeneous=True
    )
    product = make_loss(plugin)
    assert (product.name, product.needs) == ("skyrl_form", ("logprobs", "old_logprobs", "advantages"))
    assert (product.advised_reducers, product.homogeneous, product.batch_local) == (("sum",), True, False)


def test_making_a_plugin_imports_no_torch():
    code = """
import sys
from skyrl_engine.interop import masked_loss
def f(log_probs, loss_mask, clip): ...
masked_loss(f, config={"clip": 0.2}).skyrl_engine_config_schema()
print(*sorted({name.partition('.')[0] for name in sys.modules} & {"torch", "ray", "transformers"}))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_a_meaning_may_be_given_by_any_known_name() -> None:
    def theirs(scores, padding_masks):
        return -(scores * padding_masks).sum()

    plugin = masked_loss(theirs, arguments={"scores": "log_probs", "padding_masks": "mask"})
    assert plugin.skyrl_engine_make_loss(config=None).needs == ("logprobs",)
