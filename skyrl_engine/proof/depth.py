"""Find how deep into a model two forward passes agree, by cutting it short."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from attrs import frozen


@frozen
class Depth:
    """Two forward passes agree with the first `agreeing` of the model's `layers`, by name, and differ with the first `differing`.

    0 agreeing layers: the least that could be tried differ.
    """

    layers: Sequence[str]
    agreeing: int
    differing: int

    @property
    def layer(self) -> str | None:
        """The one layer that the difference enters in; None where it is one of several, or outside of the layers."""
        return self.layers[self.agreeing] if self.agreeing and self.differing == self.agreeing + 1 else None

    @property
    def in_words(self) -> str:
        last = self.layers[self.differing - 1]
        if self.layer is not None:
            return f"{last} is the first layer to diverge: cut before it, the model agrees"
        if self.agreeing:
            first = self.layers[self.agreeing]
            return f"one of {first} to {last} is the first to diverge: cut before them, the model agrees"
        with_layers = f"{last} alone" if self.differing == 1 else f"{self.layers[0]} to {last} alone"
        return f"they do so with {with_layers}: it is in there, in the embedding, the final norm or the head"


def depth_of_agreement(differs: Callable[[int], bool], layers: Sequence[str], cuts: Sequence[int]) -> Depth:
    """Find the layer where passes part that differ over all `layers`; `differs` says whether those of the model cut after so many layers do.

    `cuts` are the numbers of layers, fewer than all and ascending, that can be tried. Of a model whose passes differ with some layers and agree
    with more, one change is found.
    """
    place = bisect_left(cuts, True, key=differs)
    return Depth(layers, cuts[place - 1] if place else 0, cuts[place] if place < len(cuts) else len(layers))
