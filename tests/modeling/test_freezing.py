"""Patterns that freeze parameters: what they match, ties, and what is refused."""

import logging

import pytest
import torch
from attrs import evolve

from skyrl_engine.contracts import LoraConfig, ModelConfig
from skyrl_engine.errors import ConfigError
from skyrl_engine.model_facts.parameter_shapes import count_numbers
from skyrl_engine.modeling.list_shapes import list_parameter_shapes
from skyrl_engine.modeling.loading import load_scorer, load_skeleton
from skyrl_engine.modeling.tiny import write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    root = tmp_path_factory.mktemp("models")
    for name, tied in (("tied", True), ("untied", False)):
        write_model(root / name, "llama", tie_word_embeddings=tied)
    return {name: ModelConfig(str(root / name)) for name in ("tied", "untied")}


@pytest.mark.parametrize("load", [load_scorer, load_skeleton])
def test_a_pattern_freezes_whole_names(models: dict[str, ModelConfig], load) -> None:
    model, _ = load(evolve(models["untied"], freeze=("model.layers.0.*", "*.embed_tokens.*", "lm_hea?.weight")))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {
        name
        for name, _ in model.named_parameters()
        if name.startswith("model.layers.0.") or name in ("model.embed_tokens.weight", "lm_head.weight")
    }


@pytest.mark.parametrize(("pattern", "other"), [("lm_head.*", "model.embed_tokens.weight"), ("*.embed_tokens.*", "lm_head.weight")])
def test_a_tied_parameter_is_frozen_under_either_name_and_a_warning_says_so(
    models: dict[str, ModelConfig], caplog: pytest.LogCaptureFixture, pattern: str, other: str
) -> None:
    with caplog.at_level(logging.WARNING):
        model, _ = load_scorer(evolve(models["tied"], freeze=(pattern,)))
    assert not model.lm_head.weight.requires_grad
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert f"is tied to {other}: both are frozen" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_scorer(evolve(models["untied"], freeze=(pattern,)))
    assert "tied" not in caplog.text


def test_frozen_parameters_have_the_precision_of_the_computation_and_are_counted_so(models: dict[str, ModelConfig]) -> None:
    spec = evolve(models["untied"], freeze=("model.layers.*",), dtype="bfloat16")
    model, _ = load_scorer(spec)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert dtypes["lm_head.weight"] == dtypes["model.norm.weight"] == torch.float32
    shapes = list_parameter_shapes(spec)
    assert count_numbers(shapes, trained=True) == sum(
        parameter.numel() for name, parameter in model.named_parameters() if not name.startswith("model.layers.")
    )


@pytest.mark.parametrize(
    ("freeze", "said"),
    [
        (("visual.*",), r"model\.freeze\[0\]: 'visual\.\*' matches no parameter"),
        (("model.*", "embed_tokens"), r"model\.freeze\[1\]: 'embed_tokens' matches no parameter.*Match names such as model\."),
        (("model.*", "lm_head.weight"), "model.freeze: it freezes every parameter"),
    ],
)
def test_patterns_that_match_nothing_or_everything_are_refused(
    models: dict[str, ModelConfig], freeze: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_skeleton(evolve(models["untied"], freeze=freeze))


def test_adapters_and_patterns_are_refused_together(models: dict[str, ModelConfig]) -> None:
    with pytest.raises(ValueError, match=r"trains adapters, which freezes all weights of the model: remove model\.freeze"):
        evolve(models["untied"], freeze=("model.*",), lora=LoraConfig())
