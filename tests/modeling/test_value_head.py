"""The value head: next to the language-model head, under the name transformers gives such heads, exact in value and gradient."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from skyrl_engine.contracts.values.model import ComputeDtype, ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.chunked_head import VOCABULARY_SCORES
from skyrl_engine.modeling.loading import load_scorer, load_skeleton

VOCABULARY, HIDDEN = 64, 16
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=0,
)
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
POSITIONS, LABELS = torch.tensor([0, 3, 6]), torch.tensor([1, 5, 6])


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    """A causal language model without a value head."""
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    return tmp_path


def with_head(directory: Path, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    head = {"score.weight": weight} | ({} if bias is None else {"score.bias": bias})
    save_file({**load_file(path), **head}, path, metadata={"format": "pt"})


def scores(scorer: Any, *needs: str) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = scorer({"input_ids": IDS}, POSITIONS, LABELS, needs=needs)
    return result


def test_a_head_that_the_checkpoint_lacks_is_zero_and_said(saved_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _, scorer = load_scorer(ModelConfig(str(saved_model), value_head=True))
    assert scores(scorer, "values")["values"].tolist() == [0, 0, 0]
    assert "holds no value head; it starts at zero" in caplog.text
    of_a_head = {*VOCABULARY_SCORES, "logprobs_at", "divergence", "top_1_agreement"}
    assert scorer.computes == {*of_a_head, "values"}
    assert load_scorer(ModelConfig(str(saved_model)))[1].computes == of_a_head


@pytest.mark.parametrize("bias", [torch.tensor([0.5]), None], ids=["critic", "reward model"])
@pytest.mark.parametrize("compute", ["float32", "float64", "bfloat16"])
def test_a_head_of_the_checkpoint_scores_as_it_says(
    saved_model: Path, bias: torch.Tensor | None, compute: ComputeDtype, caplog: pytest.LogCaptureFixture
) -> None:
    """bfloat16 is the backend's to cast to: here the weights are as they are kept."""
    weight = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    with_head(saved_model, weight, bias)
    with caplog.at_level(logging.WARNING):
        model, scorer = load_scorer(ModelConfig(str(saved_model), value_head=True, dtype=compute))
    assert not [record for record in caplog.records if record.name.startswith("skyrl_engine")], "nothing is left unused"
    plain = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.float64 if compute == "float64" else torch.float32)
    hidden = plain.model(IDS)[0].flatten(0, 1)[POSITIONS]
    values = scores(scorer, "values")["values"]
    expected = hidden.double() @ weight[0].double() + (0 if bias is None else 0.5)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-12 if compute == "float64" else 1e-6)
    assert values.dtype == (torch.float64 if compute == "float64" else torch.float32)
    assert model.get_parameter("score.weight") is scorer.get_parameter("value_head.weight")


def test_values_of_a_lower_precision_are_not_rounded_to_it(saved_model: Path) -> None:
    """Hidden states and weights in bfloat16, as a backend gathers them; the product in float32."""
    weight = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    with_head(saved_model, weight, torch.tensor([100.0]))
    _, scorer = load_scorer(ModelConfig(str(saved_model), value_head=True))
    scorer.bfloat16()
    values = scores(scorer, "values")["values"]
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_no_score_is_a_view(saved_model: Path) -> None:
    """FSDP2 warns of a root that returns one: on every rank of every run with a value head."""
    _, scorer = load_scorer(ModelConfig(str(saved_model), value_head=True))
    for positions in (POSITIONS, POSITIONS[:0]):
        found = scorer({"input_ids": IDS}, positions, LABELS[: len(positions)], needs=("values", "logprobs", "entropy"))
        assert {name: values._is_view() for name, values in found.items()} == dict.fromkeys(
            ("values", "logprobs", "entropy"), False
        )


def test_values_alone_compute_nothing_of_the_vocabulary(saved_model: Path) -> None:
    _, scorer = load_scorer(ModelConfig(str(saved_model), value_head=True))
    scorer.head.register_forward_pre_hook(lambda *_: pytest.fail("the language-model head ran"))
    alone = scores(scorer, "values")
    assert alone.keys() == {"values"}
    torch.autograd.backward(alone["values"].sum())
    assert scorer.head.linear.weight.grad is None


def test_no_position_gives_a_differentiable_nothing(saved_model: Path) -> None:
    _, scorer = load_scorer(ModelConfig(str(saved_model), value_head=True))
    nothing = torch.zeros(0, dtype=torch.int64)
    result = scorer({"input_ids": IDS}, nothing, nothing, needs=("logprobs", "values"))
    assert {name: list(values.shape) for name, values in result.items()} == {"logprobs": [0], "values": [0]}
    torch.autograd.backward(result["logprobs"].sum() + result["values"].sum())
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in scorer.parameters())


def test_gradients_equal_the_plain_way_in_float64(saved_model: Path) -> None:
    """Against the model's own hidden states and whole logits. The norms inside compute in float32, alike on both sides."""
    with_head(saved_model, torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1)), torch.tensor([0.5]))
    model, scorer = load_scorer(ModelConfig(str(saved_model), value_head=True, dtype="float64"))
    result = scores(scorer, "logprobs", "values")
    torch.autograd.backward((result["values"] ** 2 - 0.1 * result["logprobs"]).sum())
    plain = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.float64)
    plain.add_module("score", torch.nn.Linear(HIDDEN, 1, dtype=torch.float64))
    plain.score.load_state_dict(model.score.state_dict())
    hidden = plain.model(IDS)[0].flatten(0, 1)[POSITIONS]
    logprobs = plain.lm_head(hidden).log_softmax(-1)[torch.arange(3), LABELS]
    torch.autograd.backward((plain.score(hidden)[:, 0] ** 2 - 0.1 * logprobs).sum())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_what_is_saved_loads_as_causal_model_critic_and_again(saved_model: Path, tmp_path: Path) -> None:
    """The same directory serves generation, transformers' own token classification, and this engine."""
    model, scorer = load_scorer(ModelConfig(str(saved_model), value_head=True))
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(2))
        model.score.bias.fill_(0.25)
    model.save_pretrained(tmp_path / "out")
    expected = scores(scorer, "logprobs", "values")
    _, again = load_scorer(ModelConfig(str(tmp_path / "out"), value_head=True))
    for name, values in scores(again, "logprobs", "values").items():
        assert torch.equal(values, expected[name]), name
    causal = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    logprobs = causal(IDS).logits.log_softmax(-1).flatten(0, 1)[POSITIONS].gather(-1, LABELS[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected["logprobs"])
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", num_labels=1).eval()
    torch.testing.assert_close(critic(IDS).logits.flatten(0, 1)[POSITIONS, 0], expected["values"])


def test_a_critic_that_transformers_saved_is_read(tmp_path: Path, saved_model: Path) -> None:
    """A token classifier and a sequence classifier hold no language-model head of their own; tied embeddings stand in."""
    tied = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True, "num_labels": 1})
    for kind, bias in ((AutoModelForTokenClassification, True), (AutoModelForSequenceClassification, False)):
        torch.manual_seed(3)
        critic = kind.from_config(tied)
        critic.save_pretrained(tmp_path / kind.__name__)
        model, _ = load_scorer(ModelConfig(str(tmp_path / kind.__name__), value_head=True))
        assert torch.equal(model.score.weight, critic.score.weight)
        assert torch.equal(model.score.bias, critic.score.bias if bias else torch.zeros(1))


def test_a_pickled_head_is_read_too(saved_model: Path) -> None:
    weight = torch.randn(1, HIDDEN)
    weights = {**load_file(saved_model / "model.safetensors"), "score.weight": weight, "score.bias": torch.ones(1)}
    torch.save(weights, saved_model / "pytorch_model.bin")
    (saved_model / "model.safetensors").unlink()
    model, _ = load_scorer(ModelConfig(str(saved_model), value_head=True))
    assert torch.equal(model.score.weight, weight)
    assert model.score.bias.item() == 1


def test_a_head_of_several_labels_is_refused(saved_model: Path) -> None:
    with_head(saved_model, torch.zeros(3, HIDDEN), torch.zeros(3))
    with pytest.raises(ModelError, match=r"score\.(weight|bias) of .* has shape \[3.*, a value head has \[1"):
        load_scorer(ModelConfig(str(saved_model), value_head=True))


def test_a_skeleton_has_the_head_without_values(saved_model: Path) -> None:
    model, scorer = load_skeleton(ModelConfig(str(saved_model), value_head=True))
    assert model.get_parameter("score.weight").is_meta
    assert scorer.value_head is model.score
