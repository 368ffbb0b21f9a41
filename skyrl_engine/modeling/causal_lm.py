"""The decoder, layers and head of a Hugging Face causal language model, and the rule by which it changes its logits."""

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.vision_language import takes_images
from skyrl_engine.modeling.vision import ImageDecoder, language_part


@frozen
class LogitRule:
    """The function that a model applies to its head's output x: `softcap * tanh(x * scale / softcap)`, or `x * scale` without a soft cap.

    Soft capping: Gemma 2 (arXiv 2408.00118, section 2), `final_logit_softcapping`. Scale: Cohere's `logit_scale` and Falcon-H1's
    `lm_head_multiplier` multiply, Granite's `logits_scaling` divides.
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitRule":
        """Return the rule that a model's configuration states."""
        text = config.get_text_config(decoder=True)
        scale = _number(text, "logit_scale") * _number(text, "lm_head_multiplier") / _number(text, "logits_scaling")
        softcap = getattr(text, "final_logit_softcapping", None)
        return cls(scale, None if softcap is None else float(softcap))

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def _number(config: Any, name: str) -> float:
    """Return a multiplier of the configuration, or 1 if it has none."""
    value = getattr(config, name, None)
    return 1.0 if value is None else float(value)


@frozen
class CausalLanguageModelParts:
    """The parts of a causal language model: `decoder` gives hidden states, `head` and then `rule` give logits."""

    decoder: nn.Module
    head: nn.Linear
    rule: LogitRule


def split_causal_lm(model: Any) -> CausalLanguageModelParts:
    """Find decoder and head of a Hugging Face causal language model. Raises ModelError if one of them cannot be found."""
    name = type(model).__name__
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{name} does not say where its linear language-model head is (get_output_embeddings returns {type(head).__name__})",
            remedy="Use a causal language model whose class implements get_output_embeddings",
        )
    if takes_images(model.config):
        return CausalLanguageModelParts(ImageDecoder(model.model), head, LogitRule.of(model.config))
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    if decoder is model and not hasattr(model, model.base_model_prefix):
        # Llama 4's class names the place of the decoder in a model with a vision tower
        decoder = getattr(model, "model", None)
    if decoder is None or decoder is model or any(module is head for module in decoder.modules()):
        raise ModelError(
            f"{name} does not separate its decoder from its language-model head",
            remedy="Use a causal language model whose class implements get_decoder, with the head outside of it",
        )
    return CausalLanguageModelParts(decoder, head, LogitRule.of(model.config))


def output_names(model: Any) -> set[str]:
    """Return the names of the parameters of the model's language-model head."""
    head = model.get_output_embeddings()
    places = [name for name, module in model.named_modules() if module is head]
    return {f"{place}.{name}" for place in places for name, _ in head.named_parameters()}


def all_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the decoder's layers, and those of its vision tower if it has one."""
    return [*transformer_layers(language_part(decoder)), *tower_layers(decoder)]


def tower_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the layers of the decoder's vision tower; empty if it has none."""
    return transformer_layers(decoder.visual) if isinstance(decoder, ImageDecoder) else []


def transformer_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return a text decoder's layers: the elements of its longest module list outside of other lists; empty if there is no list.

    Class names do not matter, so that models with remote code work like transformers' own.
    """
    lists: list[nn.ModuleList] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                lists.append(child)
            else:
                visit(child)

    visit(decoder)
    longest = max(lists, key=len, default=None)
    return [] if longest is None else [layer for layer in longest if any(True for _ in layer.parameters())]
