"""How a forward pass is cut for attention: the object that travels to every attention layer as the keyword argument `segments`."""

from typing import TYPE_CHECKING, Final

from attrs import define, field, frozen

if TYPE_CHECKING:
    import torch

REMEDY: Final = "Use a collator with one sample per row, such as padded, or another model"
"""What helps where documents of a packed row would see each other."""


@define(eq=False)
class Segments:
    """One row of documents laid end to end: each of the `lengths` (all positive, in tokens) attends to itself alone.

    A plain object and no tensor, so that it passes activation checkpointing and the hooks of sharding frameworks untouched. `windows` gets
    the sliding window (None: full attention) of every attention call that honoured these segments, which shows who ignored them.
    """

    lengths: tuple[int, ...]
    windows: list[int | None] = field(factory=list)
    _ends: dict["torch.device", "torch.Tensor"] = field(factory=dict, init=False, repr=False)

    def ends(self, device: "torch.device") -> "torch.Tensor":
        """int32[documents + 1] on `device`: 0, and where each document ends. Made once, for all layers."""
        if device not in self._ends:
            import torch

            self._ends[device] = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        return self._ends[device]


@frozen(eq=False)
class WholeRows:
    """Every row is one sequence, told from its padding by the attention mask."""


WHOLE_ROWS: Final = WholeRows()


@frozen
class SegmentSupport:
    """Whether a model attends by segments: in `layers` calls per forward pass, or not at all (0), and then why (`refusal`, a clause)."""

    layers: int = 0
    refusal: str = "nobody has checked whether its attention can be replaced"
