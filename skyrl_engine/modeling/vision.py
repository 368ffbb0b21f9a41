"""A Qwen3-VL or Qwen2.5-VL model as a decoder, whose vision tower takes part in every pass, with or without an image."""

from typing import Any

import torch
from torch import Tensor, nn

from skyrl_engine.modeling.images import ImageTokens


class ImageDecoder(nn.Module):
    """`transformers.Qwen3VLModel`, or Qwen2.5-VL's, called like a text decoder: token ids, three-dimensional positions and images in, hidden
    states out. Only the former adds features of inner layers to those of the tower (DeepStack).

    Ranks wait for each other in the collectives of the vision tower's layers, forward and backward. So the tower also runs if a micro-batch
    has no image, on one image of zeros whose features are not used: its part of the gradient is exactly 0.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.tokens = ImageTokens.of(model.config)

    @property
    def language(self) -> Any:
        """The text decoder."""
        return self.model.language_model

    @property
    def visual(self) -> nn.Module:
        """The vision tower."""
        return self.model.visual  # type: ignore[no-any-return] # transformers leaves it untyped

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        image_features: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Run `Qwen3VLModel.forward`; images go in order to the image tokens, whose number `images.placed_images` has checked.

        Where `input_ids` are some tokens of a row, `image_features` int64[m] are the numbers, among the features of the images that are given,
        of those that its image tokens get; `context_parallel.divide_row` makes them.
        """
        has_images = pixel_values is not None
        if pixel_values is None:
            merge = self.tokens.merge
            pixel_values = torch.zeros(merge**2, self.tokens.patch, device=input_ids.device)
            image_grid_thw = torch.tensor([[1, merge, merge]], device=input_ids.device)
        seen = self.model.get_image_features(pixel_values, image_grid_thw, return_dict=True)
        # cut off instead of multiplied by 0, which would keep infinities and NaN
        levels = getattr(seen, "deepstack_features", None) or ()
        if not has_images:
            seen.pooler_output = [feature[:0] for feature in seen.pooler_output]
            levels = [[feature[:0] for feature in level] for level in levels]
        elif image_features is not None:
            seen.pooler_output = [torch.cat(tuple(seen.pooler_output)).index_select(0, image_features)]
            levels = [[torch.cat(tuple(level)).index_select(0, image_features)] for level in levels]
        if levels:
            seen.deepstack_features = levels
        return self.model(input_ids=input_ids, mm_encoder_outputs={"image": seen}, **others)


def language_part(decoder: nn.Module) -> nn.Module:
    """Return the part of a decoder that attends over text: the decoder itself, or a vision-language model's text decoder."""
    return decoder.language if isinstance(decoder, ImageDecoder) else decoder
