"""What a model that sees has beside its decoder: transformers' own vision tower, whole on the ranks that hold the first layers."""

from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch import nn

from skyrl_engine import ModelError
from skyrl_engine.modeling.images import ImageTokens
from skyrl_engine.modeling.loading import enable_activation_checkpointing


@frozen(eq=False)
class Vision:
    """`config` is the tower's own, `tokens` how images become tokens, `other_tokens` ids that stand for what is not text.

    `sections` are the numbers of rotary frequencies that turn with time, height and width, one after the other in turn.
    The features of `levels` of the tower's layers are added behind as many of the decoder's first layers (DeepStack, arXiv 2406.04334).
    `parameters` are the tower's, by name with shapes.
    """

    config: Any
    tokens: ImageTokens
    other_tokens: frozenset[int]
    sections: tuple[int, int, int]
    levels: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, config: Any, name: str) -> "Vision":
        """What a `transformers.Qwen3VLConfig` says. Raises ModelError where the tower's features do not fit the decoder."""
        vision, text = config.vision_config, config.text_config
        if vision.out_hidden_size != text.hidden_size:
            raise ModelError(
                f"{name} has image features of {vision.out_hidden_size} numbers for hidden states of {text.hidden_size}",
                remedy="Correct the model's config.json",
            )
        time, height, width = text.rope_parameters.get("mrope_section", (24, 20, 20))
        with torch.device("meta"):
            skeleton = _made(vision, torch.float32)
        return cls(
            config=vision,
            tokens=ImageTokens.of(config),
            other_tokens=frozenset((config.image_token_id, config.video_token_id)),
            sections=(time, height, width),
            levels=len(vision.deepstack_visual_indexes),
            parameters=tuple((each, tuple(parameter.shape)) for each, parameter in skeleton.named_parameters()),
        )

    def tower(self, device: torch.device, dtype: torch.dtype, *, recompute: bool, shared: bool) -> nn.Module:
        """`transformers.Qwen3VLVisionModel`, with weights of no meaning yet.

        `shared`: tensor-parallel ranks hold different tokens, hence different parts of its gradient, which megatron-core adds up.
        """
        with torch.device(device):
            tower = _made(self.config, dtype)
        for parameter in tower.parameters():
            parameter.sequence_parallel = shared  # type: ignore[attr-defined] # megatron-core reads it
        if recompute:
            enable_activation_checkpointing(tower, "the vision tower")
        return tower

    def parts(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """The part of the model that each parameter belongs to (a layer, or what is before and behind them), its name and shape."""
        for name, shape in self.parameters:
            first, second, *_ = name.split(".")
            yield f"vision-{first}-{second}" if first == "blocks" else f"vision-{first}", name, shape


def _made(config: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    with no_init_weights():
        made: nn.Module = AutoModel.from_config(config, dtype=dtype)
    return made
