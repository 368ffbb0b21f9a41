"""Documents with pictures for a tiny vision-language model: one picture, several of different sizes, none."""

from collections.abc import Sequence
from typing import Final, Literal

import torch
from attrs import evolve, frozen
from torch import Tensor

from skyrl_engine.modeling.tiny import CHANNELS, FRAMES, IMAGE_TOKEN, MERGE, PATCH

_SPECIAL: Final = 4
"""Token ids at the end of the vocabulary that have a meaning; text has none of them."""

Variant = Literal["own", "negated", "swapped", "missing"]
"""Pictures are used as they are, with negated pixels, those of documents 0 and 3 exchanged, or that of document 0 forgotten."""


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
    """Return token ids int64[length] without a meaning."""
    return torch.randint(0, vocabulary - _SPECIAL, (length,), generator=draw)


def with_pictures(vocabulary: int, variant: Variant, empty: int) -> list[tuple[Tensor, Pictures]]:
    """Return token ids int64[length] of every document, with its pictures between text; document `empty` has neither."""
    draw = torch.Generator().manual_seed(4)
    documents = []
    for number, grids in enumerate(_GRIDS):
        parts = [text_tokens(vocabulary, 2, draw)]
        for height, width in grids:
            parts += [torch.full((height * width // MERGE**2,), IMAGE_TOKEN), text_tokens(vocabulary, 3, draw)]
        parts.append(text_tokens(vocabulary, 8 - number, draw))
        ids = torch.cat(parts)[: 0 if number == empty else None]
        grid = torch.tensor([(1, *size) for size in grids], dtype=torch.int64).reshape(-1, 3)
        pixels = torch.randn(int(grid.prod(1).sum()), CHANNELS * FRAMES * PATCH**2, generator=draw)
        documents.append((ids, Pictures(grid, pixels)))
    if variant == "negated":
        return [(ids, evolve(pictures, pixels=-pictures.pixels)) for ids, pictures in documents]
    if variant == "swapped":
        (first, one), (second, other) = documents[0], documents[3]
        documents[0], documents[3] = (first, other), (second, one)
    if variant == "missing":
        ids, pictures = documents[0]
        documents[0] = ids, Pictures(pictures.grids[:0], pictures.pixels[:0])
    return documents
