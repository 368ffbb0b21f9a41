"""Checks of vision-language models by their transformers configuration, without torch, for planning and for loading."""

from typing import Any, Final

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.model_facts.pipeline_layers import divide_layers

VISION_LANGUAGE: Final = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Values of a configuration's `model_type` that `modeling.vision.ImageDecoder` is right for; tests hold it against transformers."""


def takes_images(config: Any) -> bool:
    """Return True where a model of this transformers configuration is loaded with its vision tower."""
    return config.model_type in VISION_LANGUAGE


def refuse_unequal_parts(config: Any, name: str, attribute: str, *, parts: int, options: str) -> None:
    """Raise UnsupportedError where `parts`, which `options` set, does not divide a number that the decoder's configuration has."""
    size = getattr(config.get_text_config(decoder=True), attribute, None)
    if isinstance(size, int) and size % parts:
        raise UnsupportedError(
            f"{options} = {parts} does not divide {attribute} = {size} of {name}",
            remedy=f"Set {options} to a divisor of {size}, or choose another backend",
        )


def refuse_short_first_piece(config: Any, name: str, *, pieces: int) -> None:
    """Raise UnsupportedError where the first of the decoder's `pieces`, the one that sees images, has too few layers for their features.

    DeepStack (arXiv 2406.04334) adds features of several of the vision tower's layers after as many of the decoder's first ones.
    """
    if not takes_images(config):
        return
    levels, layers = count_deepstack_levels(config), config.text_config.num_hidden_layers
    first = divide_layers(layers, pieces)[0]
    if first < levels:
        raise UnsupportedError(
            f"{name} adds image features to its first {levels} layers, and a pipeline of {pieces} pieces leaves {first} of its {layers} to "
            f"the one that sees the images",
            remedy="Make the backend's pipeline sizes smaller",
        )


def count_deepstack_levels(config: Any) -> int:
    """Return how many of the decoder's first layers get image features; 0 for models that insert them in place of tokens alone."""
    return len(getattr(config.vision_config, "deepstack_visual_indexes", ()))


def refuse_vision_language(config: Any, name: str, *, images: bool) -> None:
    """Raise UnsupportedError where the model `name` is a vision-language model that is not supported, or not with this backend.

    `images`: the backend, in its layout, declares 'vision'. Models that transformers also knows as causal language models pass: they are
    trained on text.
    """
    import transformers

    if takes_images(config):
        if images:
            return
        raise UnsupportedError(
            f"{name} is a vision-language model, and the backend in this layout does not declare 'vision'",
            remedy="Choose a backend and a layout that train vision-language models, such as fsdp",
        )
    causal, image_text = (
        auto_class._model_mapping  # noqa: SLF001 - the only lists of what can be loaded
        for auto_class in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    )
    if type(config) in causal or type(config) not in image_text:
        return
    experts = getattr(config.get_text_config(), "num_experts", None)
    what = (
        "a mixture of experts that takes images" if experts else f"a vision-language model of the architecture {config.model_type}"
    )
    raise UnsupportedError(
        f"{name} is {what}, which is not supported (supported: {', '.join(VISION_LANGUAGE)})",
        remedy="Use a Qwen3-VL or Qwen2.5-VL model, or a text model",
    )
