"""The value head: values and the gradient through them in every layout, with and without log-probabilities beside them.

Compared as in test_megatron_gradients.py. The head is whole on every tensor-parallel rank of the last stage, which all compute the gradient of
the states below it, while the gradients of their parts of the vocabulary's head are added up: one that was added up too would be off by 1.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from by_day import now
from megatron_tasks import PAIRS, VOCABULARY, Case, Passed, run_passes, set_up, train_critic
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from skyrl_engine.contracts import AdamWSettings, ModelConfig
from skyrl_engine.modeling.classifier import become_classifier
from skyrl_engine.testing.backends.batches import DefinedResult, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.plugin import MegatronConfig

BOTH, ALONE = ("logprobs", "values"), ("values",)
CASES = [Case("padded", 3, needs=BOTH), Case("packed", 1, calls=2, needs=BOTH), Case("packed", 2, needs=ALONE)]
DAY = ("tp2", "pp2", "cp2")


def check(ranks: list[list[Passed]], due: dict[tuple[str, ...], DefinedResult], tolerance: float) -> None:
    for case, passed in zip(CASES, zip(*ranks, strict=True), strict=True):
        true = due[case.needs]
        for rank in passed:
            # a head that no loss reads has the gradient zero here, and none in a plain process
            unread = rank.gradients.keys() - true.gradients.keys()
            assert not any(rank.gradients[name].any() for name in unread)
            read = {name: gradient for name, gradient in rank.gradients.items() if name in true.gradients}
            assert find_worst_difference(read, true.gradients) <= tolerance
            assert {"score.weight", "score.bias"} < read.keys()
        collected = [output for rank in passed for output in rank.outputs if output.coords.collects]
        assert sum(output.metrics["loss"].value for output in collected) == pytest.approx(true.loss, rel=max(1e-6, tolerance))


@pytest.mark.parametrize("name", now(["critic", "critic-tied"], "critic"))
@pytest.mark.parametrize("layout", now(PAIRS, *DAY))
def test_values_and_their_gradients_are_those_of_the_definition(
    pair: World, models: dict[str, str], layout: str, name: str
) -> None:
    due = {needs: definition(models[name], documents(VOCABULARY), needs=needs) for needs in (BOTH, ALONE)}
    check(pair.run(run_passes, models[name], PAIRS[layout], CASES, value_head=True), due, 1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["tp2xpp2", pytest.param("tp2xcp2", marks=pytest.mark.nightly)])
def test_four_ranks(quad: World, models: dict[str, str], layout: str) -> None:
    options = MegatronConfig(tensor_parallel=2, **{{"tp2xpp2": "pipeline_parallel", "tp2xcp2": "context_parallel"}[layout]: 2})
    due = {needs: definition(models["critic"], documents(VOCABULARY), needs=needs) for needs in (BOTH, ALONE)}
    check(quad.run(run_passes, models["critic"], options, CASES, value_head=True), due, 1e-5)


@pytest.mark.parametrize("layout", now(["tp2", "pp2"], "tp2"))
def test_micro_batches_without_scored_tokens_take_part(pair: World, models: dict[str, str], layout: str) -> None:
    """The head then scores a position that no loss reads."""
    half = (4, 5, 6, 7)
    cases = [Case(size=1, unscored=half, needs=ALONE)]
    true = definition(models["critic"], documents(VOCABULARY, unscored=half), needs=ALONE)
    for (passed,) in pair.run(run_passes, models["critic"], PAIRS[layout], cases, value_head=True):
        read = {name: gradient for name, gradient in passed.gradients.items() if name in true.gradients}
        assert find_worst_difference(read, true.gradients) <= 1e-5


@pytest.mark.parametrize("layout", now(["tp2", "pp2", "cp2", "dp2"], "tp2"))
def test_it_is_saved_resumed_and_exported(pair: World, models: dict[str, str], tmp_path: Path, layout: str) -> None:
    """Bit for bit; and transformers loads the export as a critic and as a model of language."""
    optimizer = AdamWSettings(learning_rate=1e-2, weight_decay=0.1)
    for uninterrupted, resumed in pair.run(train_critic, models["critic"], PAIRS[layout], optimizer, tmp_path, tmp_path / "out"):
        assert uninterrupted[0] == resumed[0]
        for name, weight in uninterrupted[1].items():
            np.testing.assert_array_equal(weight, resumed[1][name], err_msg=name)
    weights = resumed[1]
    assert not np.array_equal(weights["score.weight"], load_file(Path(models["critic"]) / "model.safetensors")["score.weight"])
    causal = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert dict(causal.named_parameters()).keys() == weights.keys() - {"score.weight", "score.bias"}
    critic, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", num_labels=1, output_loading_info=True)
    assert not report["missing_keys"]
    for name, parameter in critic.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), weights[name], err_msg=name)


def test_a_reward_model_has_no_bias_and_transformers_loads_it(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """A model without a head starts one at zero."""
    spec = {"value_head": True, "classifier": True}
    pair.run(set_up, models["llama-untied"], PAIRS["tp2"], tmp_path, **spec)
    become_classifier(tmp_path, ModelConfig(models["llama-untied"], **spec), pad_token_id=1)
    model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not torch.count_nonzero(model.score.weight)
