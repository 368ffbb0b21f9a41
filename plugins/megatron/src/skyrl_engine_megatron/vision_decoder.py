"""The decoder of a vision-language model: image features replace tokens on the first stage; rotary positions have three axes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_engine_megatron.decoder import Decoder
from skyrl_engine_megatron.experts import RoutedLayer
from skyrl_engine_megatron.images import Images
from skyrl_engine_megatron.layers import FamilyLayer


class InterleavedRotary(nn.Module):
    """Rotary angles whose axes alternate: frequency i belongs to axis i modulo 3 (time, height, width), or to time after its section."""

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        # not a registered buffer, which a lower precision would round
        self.inv_freq = inverse_frequencies

    def forward(self, position_ids: Tensor, mrope_section: Sequence[int], **_: Any) -> Tensor:
        """Return float32[tokens, 1, 1, head size] for `position_ids` int64[3, 1, tokens] of whole documents, even if ranks share them."""
        angles_1TF = self.choose_axes(position_ids[..., None].float() * self.inv_freq, mrope_section)
        return torch.cat((angles_1TF, angles_1TF), -1).transpose(0, 1)[:, :, None].contiguous()

    def choose_axes(self, angles_31TF: Tensor, sections: Sequence[int]) -> Tensor:
        """Return [1, tokens, frequencies], of every frequency the angle of its axis."""
        angles_1TF = angles_31TF[0].clone()
        for axis in (1, 2):
            own = slice(axis, 3 * sections[axis], 3)
            angles_1TF[..., own] = angles_31TF[axis][..., own]
        return angles_1TF


class SectionedRotary(InterleavedRotary):
    """Rotary angles whose axes follow one after another: Qwen2.5-VL's (arXiv 2409.12191, section 2.1)."""

    def choose_axes(self, angles_31TF: Tensor, sections: Sequence[int]) -> Tensor:
        return torch.cat([part[axis] for axis, part in enumerate(torch.split(angles_31TF, list(sections), -1))], -1)


class DeepStackLayer(FamilyLayer):
    """A layer that adds image features to its output: `context` [levels, m, h] at the tokens `context_mask` int64[m].

    megatron-core passes both from layer to layer and keeps them for recomputing activations; state in a module would be overwritten by then.
    """

    def forward(
        self, *args: Any, context: Tensor | None = None, context_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        hidden_T1H, _ = super().forward(*args, **options)
        # megatron-core counts layers from 1 over all stages
        level = self.layer_number - 1
        if context is not None and level < len(context):
            hidden_T1H = hidden_T1H.index_add(0, context_mask, context[level][:, None])
        return hidden_T1H, context


class RoutedDeepStackLayer(RoutedLayer, DeepStackLayer):
    """Such a layer with a mixture of experts."""


class VisionDecoder(Decoder):
    """A decoder with `visual`, transformers' vision tower, on the first piece of the model, the only one that gets images."""

    visual: Any
    """The vision tower; None on other pieces than the first."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: None, *, images: Images | None = None, **options: Any
    ) -> Tensor:
        """Run megatron-core's forward pass with `position_ids` int64[3, 1, tokens]; only the first piece gets `images`."""
        embeddings_T1H, features = None, None
        if self.pre_process:
            embeddings_T1H = self.embedding(input_ids=input_ids, position_ids=None)
            if images is not None:
                embeddings_T1H, features = self._insert_image_features(embeddings_T1H, images)
        hidden_T1H: Tensor = super().forward(
            input_ids, position_ids, attention_mask, decoder_input=embeddings_T1H, extra_block_kwargs=features, **options
        )
        return hidden_T1H

    def _insert_image_features(self, embeddings_T1H: Tensor, images: Images) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the embeddings with image features in their places, and the features that layers add to their outputs there."""
        pixels = images.pixel_values.to(embeddings_T1H.dtype)
        output = self.visual(pixels, grid_thw=images.grid)
        chosen_M1H = output.pooler_output.index_select(0, images.features)[:, None]
        levels = [level.index_select(0, images.features) for level in getattr(output, "deepstack_features", None) or ()]
        embeddings_T1H = embeddings_T1H.index_copy(0, images.places, chosen_M1H)
        return embeddings_T1H, {"context": torch.stack(levels), "context_mask": images.places} if levels else {}
