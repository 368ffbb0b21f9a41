"""The documents of a packed row, passed to every attention layer as the keyword argument `segments`."""

from typing import TYPE_CHECKING, Final

from attrs import define, field, frozen

if TYPE_CHECKING:
    import torch

REMEDY: Final = "Use a collator with one sample per row, such as padded, or another model"
"""The remedy if the documents of a packed row would attend to each other."""


@define(eq=False)
class Segments:
    """One row of documents end to end, of these `lengths` (all positive, in tokens); each document attends to itself alone.

    It is a plain object and no tensor, so that activation checkpointing and the hooks of sharding frameworks leave it unchanged. Every
    attention call that follows these segments appends its sliding window (None: full attention) to `windows`, so that their number shows
    whether a layer ignored them.
    """

    lengths: tuple[int, ...]
    windows: list[int | None] = field(factory=list)
    _ends: dict["torch.device", "torch.Tensor"] = field(factory=dict, init=False, repr=False)

    def ends(self, device: "torch.device") -> "torch.Tensor":
        """Return int32[documents + 1] on `device`: 0, and the end of each document. Made once, for all layers."""
        if device not in self._ends:
            import torch

            self._ends[device] = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        return self._ends[device]


@frozen(eq=False)
class WholeRows:
    """A marker for rows of one sequence each, whose padding the attention mask marks."""


WHOLE_ROWS: Final = WholeRows()


@frozen
class SegmentSupport:
    """A model's support of segments: `layers` attention calls per forward pass follow them; if 0, `refusal` is a clause that says why.

    `mixes` says that its documents were seen to reach each other, in a forward pass of finite numbers.
    """

    layers: int = 0
    refusal: str = "nobody has checked whether its attention can be replaced"
    mixes: bool = False
