"""The vision tower of a vision-language model: transformers' own, whole on every rank of the first pipeline stage."""

from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch import nn

from skyrl_engine import ModelError
from skyrl_engine.model_facts.vision_language import count_deepstack_levels
from skyrl_engine.modeling.images import ImageTokens
from skyrl_engine.modeling.loading import enable_activation_checkpointing


@frozen(eq=False)
class Vision:
    """The vision tower's facts: its own `config`, how images become `tokens`, and `other_tokens`, the ids of images and videos.

    `sections` are the numbers of rotary frequencies for time, height and width, which alternate if `interleaved`, and follow one after another
    if not. The features of `levels` of the tower's layers are added to the outputs of as many first layers of the decoder (DeepStack, arXiv
    2406.04334). `parameters` are the tower's names and shapes.
    """

    config: Any
    tokens: ImageTokens
    other_tokens: frozenset[int]
    sections: tuple[int, int, int]
    interleaved: bool
    levels: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, config: Any, name: str) -> "Vision":
        """Read the configuration of a model of `families.VISION_FAMILIES`. Raises ModelError if the tower's features do not fit the decoder."""
        vision, text = config.vision_config, config.text_config
        if vision.out_hidden_size != text.hidden_size:
            raise ModelError(
                f"{name} has image features of {vision.out_hidden_size} numbers for hidden states of {text.hidden_size}",
                remedy="Correct the model's config.json",
            )
        interleaved = config.model_type != "qwen2_5_vl"
        # what transformers takes where none are stated
        time, height, width = text.rope_parameters.get("mrope_section", (24, 20, 20) if interleaved else (16, 24, 24))
        with torch.device("meta"):
            skeleton = _make_tower(vision, torch.float32)
        return cls(
            config=vision,
            tokens=ImageTokens.of(config),
            other_tokens=frozenset((config.image_token_id, config.video_token_id)),
            sections=(time, height, width),
            interleaved=interleaved,
            levels=count_deepstack_levels(config),
            parameters=tuple((name, tuple(parameter.shape)) for name, parameter in skeleton.named_parameters()),
        )

    def tower(self, device: torch.device, dtype: torch.dtype, *, recompute: bool, shared: bool) -> nn.Module:
        """Return transformers' vision model of this configuration with uninitialised weights.

        With `shared`, tensor-parallel ranks hold different tokens and so different parts of its gradient, which megatron-core sums.
        """
        with torch.device(device):
            tower = _make_tower(self.config, dtype)
        for parameter in tower.parameters():
            parameter.sequence_parallel = shared  # type: ignore[attr-defined] # megatron-core reads it
        if recompute:
            enable_activation_checkpointing(tower, "the vision tower")
        return tower

    def parts(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield, for each parameter, its part of the model (a layer, or a module before or after the layers), its name and its shape."""
        for name, shape in self.parameters:
            first, second, *_ = name.split(".")
            yield f"vision-{first}-{second}" if first == "blocks" else f"vision-{first}", name, shape


def _make_tower(config: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    with no_init_weights():
        tower: nn.Module = AutoModel.from_config(config, dtype=dtype)
    return tower
