"""Copies of what a device still computes: the host gives the device more work meanwhile, and waits when it reads them.

Between the forward and the backward pass of a micro-batch nothing is read: a host that waits there leaves the device without work until it has
launched the backward pass, kernel by kernel. So losses, metrics and outputs are sent to the host behind the work that makes them, one copy of
each sort per micro-batch, and `RankOutput.concat` reads them when a pass has launched all its micro-batches.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from skyrl_engine.contracts.values.outputs import LateFields, LateNumber, Metric
from skyrl_engine.contracts.values.ragged import IntArray, Ragged

Refusal = Callable[[Sequence[float]], None]
"""Raises an error where the numbers that a check asked for are wrong."""


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of the host on `device`, perhaps as another `dtype`, without waiting for the work that the device has.

    From memory that may be swapped out, CUDA copies only after the device has done all else, and the host waits for that; pinned memory is
    read behind the host's back, and torch keeps it until it was.
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device=device, dtype=dtype, non_blocking=True)


@frozen(eq=False)
class Sent:
    """A tensor on its way to the host. The device may be told more meanwhile; `read` waits for this tensor alone."""

    _copy: Tensor
    _arrived: "torch.cuda.Event | None"

    @classmethod
    def of(cls, tensor: Tensor) -> "Sent":
        """Send a copy of a tensor that nothing is differentiated through."""
        # torch takes pinned memory for such a copy
        copy = tensor.detach().to("cpu", non_blocking=True)
        if tensor.device.type != "cuda":
            return cls(copy, None)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
        arrived.record(torch.cuda.current_stream(tensor.device))
        return cls(copy, arrived)

    def read(self) -> Tensor:
        """Return the copy, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


@define(eq=False)
class Later:
    """Numbers, checks of numbers and outputs of one micro-batch, all to be read when its pass is over.

    Numbers and checks are added first, then `send` is called once, and then all is readable. A check that fails raises its error at the
    first read, whatever is read. `device` is that of the scores.
    """

    device: torch.device
    _tensors: list[Tensor] = field(factory=list, init=False)
    _checks: list[tuple[slice, Refusal]] = field(factory=list, init=False)
    _places: list[int] = field(factory=list, init=False)
    _sent: Sent | None = field(default=None, init=False)
    _numbers: list[float] | None = field(default=None, init=False)

    def check(self, numbers: Sequence[Tensor], refuse: Refusal) -> None:
        """Have `refuse` look at these numbers, each a tensor of the device, when they are read."""
        first = len(self._tensors)
        self._tensors += [number.detach().reshape(()) for number in numbers]
        self._checks.append((slice(first, first + len(numbers)), refuse))

    def send_metrics(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Send the tensors that metrics hold, and those that are checked; return metrics that find their numbers there."""
        late = {name: metric.replace_tensors(self._add) for name, metric in metrics.items()}
        kinds = sorted({tensor.dtype for tensor in self._tensors}, key=str)
        self._places = [place for kind in kinds for place, tensor in enumerate(self._tensors) if tensor.dtype == kind]
        if kinds:
            # one copy, exact for every type; a stack of each type costs less than a cast of each number
            of_kind = [torch.stack([tensor for tensor in self._tensors if tensor.dtype == kind]).double() for kind in kinds]
            self._sent = Sent.of(torch.cat(of_kind))
        self._tensors.clear()
        return late

    def send_fields(self, values: Mapping[str, Tensor], offsets: IntArray) -> Mapping[str, Ragged]:
        """Send tensors [n] by name as float32 fields with `offsets`; none of them waits, until one is asked for."""
        if not values:
            return {}
        names, sent = tuple(values), Sent.of(torch.stack([tensor.detach().float() for tensor in values.values()]))

        def read() -> Mapping[str, Ragged]:
            self.read()
            return {name: Ragged(row, offsets) for name, row in zip(names, sent.read().numpy(), strict=True)}

        return LateFields(names, cache(read))

    def read(self) -> list[float]:
        """Wait for the numbers and return them. Raises what the checks find."""
        if self._numbers is None:
            arrived = [] if self._sent is None else self._sent.read().tolist()
            numbers = [number for _, number in sorted(zip(self._places, arrived, strict=True))]
            for checked, refuse in self._checks:
                refuse(numbers[checked])
            self._numbers, self._sent = numbers, None
        return self._numbers

    def raise_now(self) -> None:
        """Raise what the checks find without another read: for a caller that sends nothing and waits anyway."""
        self.send_metrics({})
        self.read()

    def _add(self, tensor: Any) -> LateNumber | float:
        if tensor.device != self.device:
            return float(tensor)  # of the host, where nothing is waited for
        self._tensors.append(tensor.reshape(()))
        return LateNumber(partial(self._read_at, len(self._tensors) - 1))

    def _read_at(self, place: int) -> float:
        return self.read()[place]
