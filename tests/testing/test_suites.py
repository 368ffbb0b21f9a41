"""The suites as outsiders subclass them, and what pytest shows where a promise is broken."""

from typing import ClassVar

import pytest
import torch

from skyrl_engine.contracts.kinds.loss import FunctionLoss
from skyrl_engine.errors import ConfigError, PluginNotFoundError
from skyrl_engine.testing import CorrectionConformance, LossConformance, MergerConformance, ReducerConformance
from skyrl_engine.testing.losses.promises import LOSS_PROMISES


class TestFocal(LossConformance):
    plugin = "acme-focal-loss:focal"
    options: ClassVar = {"gamma": 3.0}
    examples = 10

    def oracle(self, tokens):
        return -((1 - tokens.logprobs.exp()) ** 3) * tokens.logprobs


class TestProduct(LossConformance):
    examples = 10

    def loss(self):
        return FunctionLoss("negative_logprobs", negative_logprobs, None, ("logprobs",))


class TestTruncated(CorrectionConformance):
    plugin = "tis"
    examples = 10


class TestSequenceMean(ReducerConformance):
    plugin = "sequence_mean"
    options: ClassVar = {"empty_sequence": "skip"}
    examples = 10


class TestOrdered(MergerConformance):
    plugin = "ordered"
    examples = 10


def negative_logprobs(tokens, _config):
    return -tokens.logprobs


class Wrong(LossConformance):
    def loss(self):
        return FunctionLoss(
            "averaged", lambda tokens, _config: -tokens.logprobs / max(len(tokens.logprobs), 1), None, ("logprobs",)
        )


class Metafunc:
    """Pytest's argument to `pytest_generate_tests`."""

    def parametrize(self, name, values, ids):
        self.ids = ids


def claimed_by(suite):
    metafunc = Metafunc()
    suite().pytest_generate_tests(metafunc)
    return set(metafunc.ids)


def test_what_is_not_claimed_is_no_test():
    every = {promise.name for promise in LOSS_PROMISES}
    assert every - claimed_by(TestFocal) == {"homogeneous", "zero_advantages", "metrics", "empty_metrics"}
    assert every - claimed_by(TestProduct) == {
        "homogeneous",
        "zero_advantages",
        "metrics",
        "empty_metrics",
        "another_process",
        "oracle",
        "config_round_trip",
        "light_import",
    }


def test_flags_take_promises_back():
    class Surrogate(TestProduct):
        surrogate_gradient = True

    assert claimed_by(TestProduct) - claimed_by(Surrogate) == {"gradient"}


def test_a_broken_promise_fails_with_its_smallest_case():
    (split,) = [promise for promise in LOSS_PROMISES if promise.name == "micro_batch_split"]
    with pytest.raises(pytest.fail.Exception) as caught:
        Wrong().test_promise(split)
    text = str(caught.value)
    assert text.startswith("micro_batch_split: A batch cut into micro-batches has the loss and gradient of the whole\n")
    assert "changes x2.00 under two micro-batches" in text
    assert "2 sequences of 1, 1 loss-carrying tokens" in text


def test_a_suite_without_a_plugin_says_what_to_do():
    class Nothing(LossConformance):
        pass

    with pytest.raises(NotImplementedError, match="set `plugin`, or override `loss`"):
        claimed_by(Nothing)


def test_wrong_references_and_options_are_the_engines_errors():
    class Unknown(LossConformance):
        plugin = "focall"

    class WrongOption(LossConformance):
        plugin = "focal"
        options: ClassVar = {"gama": 3}

    with pytest.raises(PluginNotFoundError, match="focal"):
        claimed_by(Unknown)
    with pytest.raises(ConfigError, match="gama"):
        claimed_by(WrongOption)


def test_constants_are_held_fixed_in_differences():
    """A loss whose value moves with what it detaches has the right gradient: differences hold detached numbers fixed."""

    class Detaching(LossConformance):
        def loss(self):
            return FunctionLoss("cispo", detaching, None, ("logprobs",))

    (gradient,) = [promise for promise in LOSS_PROMISES if promise.name == "gradient"]
    Detaching().test_promise(gradient)


def detaching(tokens, _config):
    with torch.no_grad():
        ratio = tokens.logprobs.exp() * 2
    return -ratio * tokens.logprobs - tokens.logprobs.detach() * tokens.logprobs
