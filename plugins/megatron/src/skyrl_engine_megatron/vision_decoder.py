"""A decoder that sees: image features take the places of tokens on the first stage, and rotary positions have three dimensions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_engine_megatron.decoder import Decoder
from skyrl_engine_megatron.images import Images
from skyrl_engine_megatron.library import TransformerLayer


class InterleavedRotary(nn.Module):
    """Angles of rotary positions, of which frequency i turns with time, height or width (i modulo 3) while that one's section lasts, then
    with time. megatron-core's own are Qwen2-VL's, whose sections lie one behind the other.
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies  # not a registered buffer: lower precision would round it

    def forward(self, position_ids: Tensor, mrope_section: Sequence[int], **_: Any) -> Tensor:
        """float32[tokens, 1, 1, head size] of `position_ids` int64[3, 1, tokens]; of whole documents, also where ranks share them."""
        frequencies = position_ids[..., None].float() * self.inv_freq
        angles_1TF = frequencies[0].clone()
        for axis in (1, 2):
            own = slice(axis, 3 * mrope_section[axis], 3)
            angles_1TF[..., own] = frequencies[axis][..., own]
        return torch.cat((angles_1TF, angles_1TF), -1).transpose(0, 1)[:, :, None].contiguous()


class DeepStackLayer(TransformerLayer):  # type: ignore[misc] # megatron-core is untyped
    """A layer that adds image features to its output: `context` [levels, m, h] at the tokens `context_mask` int64[m].

    megatron-core hands both from layer to layer and keeps them for recomputing activations, which state in a module would not survive.
    """

    def forward(
        self, *args: Any, context: Tensor | None = None, context_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        hidden_T1H, _ = super().forward(*args, **options)
        level = self.layer_number - 1  # counted from 1 over all stages
        if context is not None and level < len(context):
            hidden_T1H = hidden_T1H.index_add(0, context_mask, context[level][:, None])
        return hidden_T1H, context


class VisionDecoder(Decoder):
    """Adds `visual`, transformers' vision tower, on the first piece of the model; the others never see an image."""

    visual: Any
    """None on the others."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: None, *, images: Images | None = None, **options: Any
    ) -> Tensor:
        """As megatron-core's, with `position_ids` int64[3, 1, tokens]; `images` on the first piece alone."""
        embeddings_T1H, features = None, None
        if self.pre_process:
            embeddings_T1H = self.embedding(input_ids=input_ids, position_ids=None)
            if images is not None:
                embeddings_T1H, features = self._seen(embeddings_T1H, images)
        hidden_T1H: Tensor = super().forward(
            input_ids, position_ids, attention_mask, decoder_input=embeddings_T1H, extra_block_kwargs=features, **options
        )
        return hidden_T1H

    def _seen(self, embeddings_T1H: Tensor, images: Images) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeddings with image features in their places, and what later layers add there."""
        pixels = images.pixel_values.to(embeddings_T1H.dtype)
        seen = self.visual(pixels, grid_thw=images.grid)
        chosen_M1H = seen.pooler_output.index_select(0, images.features)[:, None]
        levels = [level.index_select(0, images.features) for level in seen.deepstack_features]
        embeddings_T1H = embeddings_T1H.index_copy(0, images.places, chosen_M1H)
        return embeddings_T1H, {"context": torch.stack(levels), "context_mask": images.places} if levels else {}
