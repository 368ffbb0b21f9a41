"""A small vision-language model, and documents with pictures to try it on: one picture, several of different sizes, none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import torch
from attrs import evolve, frozen
from torch import Tensor

from skyrl_engine.modeling.exporting import write_pretrained
from skyrl_engine.proof.rollouts import PAD_TOKEN_ID, VOCABULARY

IMAGE_TOKEN: Final = VOCABULARY - 1
_SPECIAL: Final = 4
"""Token ids at the end of the vocabulary that have a meaning; text has none of them."""

_PATCH, _MERGE, _CHANNELS, _FRAMES = 4, 2, 3, 2

Variant = Literal["own", "negated", "swapped", "missing"]
"""Of the pictures: as they are, with negated pixels, those of documents 0 and 3 exchanged, or that of document 0 forgotten."""


@frozen(eq=False)
class Pictures:
    """A document's pictures: patches of each along time, height and width int64[pictures, 3], and pixels float32[patches, numbers]."""

    grids: Tensor
    pixels: Tensor


_GRIDS: Final[Sequence[Sequence[tuple[int, int]]]] = (
    ((4, 6),),
    ((4, 4), (2, 6)),
    (),
    ((4, 6),),
    (),
    (),
    ((2, 2), (6, 4)),
    (),
)
"""Height and width in patches, by document; document 5 is empty."""


def text_tokens(vocabulary: int, length: int, draw: torch.Generator) -> Tensor:
    """Token ids int64[length] without a meaning."""
    return torch.randint(0, vocabulary - _SPECIAL, (length,), generator=draw)


def with_pictures(vocabulary: int, variant: Variant, empty: int) -> list[tuple[Tensor, Pictures]]:
    """Token ids int64[length] of every document, and its pictures, between text; document `empty` has neither."""
    draw = torch.Generator().manual_seed(4)
    made = []
    for number, grids in enumerate(_GRIDS):
        parts = [text_tokens(vocabulary, 2, draw)]
        for height, width in grids:
            parts += [torch.full((height * width // _MERGE**2,), IMAGE_TOKEN), text_tokens(vocabulary, 3, draw)]
        parts.append(text_tokens(vocabulary, 8 - number, draw))
        ids = torch.cat(parts)[: 0 if number == empty else None]
        grid = torch.tensor([(1, *each) for each in grids], dtype=torch.int64).reshape(-1, 3)
        pixels = torch.randn(int(grid.prod(1).sum()), _CHANNELS * _FRAMES * _PATCH**2, generator=draw)
        made.append((ids, Pictures(grid, pixels)))
    if variant == "negated":
        return [(ids, evolve(pictures, pixels=-pictures.pixels)) for ids, pictures in made]
    if variant == "swapped":
        (first, one), (second, other) = made[0], made[3]
        made[0], made[3] = (first, other), (second, one)
    if variant == "missing":
        ids, pictures = made[0]
        made[0] = ids, Pictures(pictures.grids[:0], pictures.pixels[:0])
    return made


def write_vision_model(directory: Path, *, tied: bool = True, levels: Sequence[int] = (0, 2)) -> None:
    """Write a random Qwen3-VL as a Hugging Face directory: four text layers, of which the first get the features of the vision layers `levels`.

    There are three vision layers; with two levels each stage of a pipeline of two can hold what it must.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 2, 1], "mrope_interleaved": True}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rope_parameters": rope,
        "pad_token_id": PAD_TOKEN_ID,
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": _PATCH,
        "temporal_patch_size": _FRAMES,
        "in_channels": _CHANNELS,
        "spatial_merge_size": _MERGE,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": list(levels),
    }
    special = ("image", "video", "vision_start", "vision_end")
    tokens = {f"{name}_token_id": IMAGE_TOKEN - place for place, name in enumerate(special)}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **tokens)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen3VLForConditionalGeneration(config)
        for parameter in model.parameters():  # norms that are not 1, biases that are not 0, matrices that are not near 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    write_pretrained(model, directory)
