"""A device that is not the CPU, for machines that have none: the numbers stay on the CPU, and code sees them elsewhere.

    with OtherDevice() as device:
        output = loss(tokens)
    device.place(output)    # "other"
    device.reads            # every .item(), .cpu(), .tolist(), bool(tensor), nonzero(), x[mask], and where
    device.blocking_copies  # every copy to the device for which the host waits

Inside the block every tensor counts as one of the other device, except those that the block itself makes on the CPU: by a factory without a
device (`torch.arange(3)`), by `.cpu()`, by `torch.from_numpy`. What fails on a GPU raises `WrongDevice`, with the line that did it: an
operation of both sorts, `.numpy()` of the other device. `.to(device)` and `copy_` move between both, `tensor.device` is `OTHER` there, and
factories with `device=OTHER` make tensors there. A step of a whole backend runs like a loss: give `OTHER` as its device, or let it take
the device of its parameters; tensors made before the block need nothing.

A copy to the CPU with `non_blocking=True` is read where it is first used, as "a copy sent ahead": there the host waits, and no earlier. A copy
to the device without `non_blocking=True` is a blocking one: CUDA makes it behind all work that the device has, and the host waits for it.

Not seen: legacy constructors of a class (`torch.Tensor([1.0])`), code that asks for `device.type` (it gets "cpu"), and native code.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from attrs import frozen
from torch.overrides import TorchFunctionMode

Place = Literal["other", "host"]

OTHER = torch.device("cpu", 1)
"""The name of the other device. Torch itself takes it for the CPU, so generators and everything native work."""

_HOST = "_skyrl_engine_on_host"
_SENT = "_skyrl_engine_sent"
SENT_AHEAD = "a copy sent ahead"
"""The first use of a copy to the CPU that nobody waited for when it was made."""

_LIBRARY = str(Path(torch.__file__).parent) + os.sep
_UNSEEN = ("from_numpy", "frombuffer", "FloatTensor", "DoubleTensor", "LongTensor", "IntTensor", "BoolTensor")
"""Makers of tensors on the CPU that torch shows to no mode."""
_ENGINE = "_engine_run_backward"
"""Torch's door to its native backward pass."""


class WrongDevice(RuntimeError):  # noqa: N818 - named after what is wrong
    """Code that fails, or waits, where tensors are not on the CPU."""


@frozen
class Read:
    """One moment at which the host waits for the device and takes numbers from it: `what` did so, at `where` ("file.py:12")."""

    what: str
    where: str


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_T = torch.Tensor
_PLACE_PROPERTIES: Mapping[Any, Callable[[bool], Any]] = {
    _getter("device"): lambda other: OTHER if other else torch.device("cpu"),
    _getter("is_cpu"): lambda other: not other,
    _T.get_device: lambda other: 1 if other else -1,
}
_READS: Mapping[Any, str] = {
    _T.item: ".item()",
    _T.tolist: ".tolist()",
    _T.__bool__: "bool(tensor)",
    _T.__int__: "int(tensor)",
    _T.__float__: "float(tensor)",
    _T.__index__: "a tensor as an index",
    _T.__contains__: "`in` a tensor",
    _T.__format__: "a tensor in a text",
    _T.__repr__: "a tensor in a text",
    _T.equal: "torch.equal",
    torch.equal: "torch.equal",
    _T.allclose: "torch.allclose",
    torch.allclose: "torch.allclose",
    _T.is_nonzero: "is_nonzero()",
    torch.is_nonzero: "is_nonzero()",
}
_SIZES: Mapping[Any, str] = {
    _T.nonzero: "nonzero()",
    torch.nonzero: "nonzero()",
    torch.argwhere: "argwhere()",
    _T.argwhere: "argwhere()",
    _T.masked_select: "masked_select()",
    torch.masked_select: "masked_select()",
    _T.bincount: "bincount()",
    torch.bincount: "bincount()",
    _T.unique: "unique()",
    torch.unique: "unique()",
    _T.unique_consecutive: "unique_consecutive()",
    torch.unique_consecutive: "unique_consecutive()",
}
"""Functions whose results have a size that the device computes; the host waits for it."""

_INDEXED = (_T.__getitem__, _T.__setitem__)
_CPU_ONLY: Mapping[Any, str] = {_T.numpy: ".numpy()", _T.__array__: "NumPy"}
_TAKES_HOST_INDICES = (_T.__getitem__, _T.__setitem__, _T.index_put_, _T.index_put, torch.index_put, torch.index_put_)
_MOVES_INTO = (_T.copy_,)
_NEEDS_HOST = (torch._pack_padded_sequence, torch.tensor_split, _T.tensor_split)  # noqa: SLF001 - whose lengths must be on the CPU
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_FROM_SELF = (_T.new_tensor, _T.new_full, _T.new_zeros, _T.new_ones, _T.new_empty)
_JOINS = (torch.stack, torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack)
_DATA_SETTER = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor of C


class OtherDevice(TorchFunctionMode):
    """Take all tensors but those that it sees made on the CPU for tensors of another device. `reads` lists what the host waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self.blocking_copies: list[Read] = []
        self.launched = 0
        """Number of the reads that were before the last backward pass was launched, or before the last call of `note_launch`."""
        self._replaced: list[tuple[Any, dict[str, Any]]] = []
        self._entered = 0

    def __enter__(self) -> Self:
        self._entered += 1
        if self._entered == 1:
            self._replaced = [
                (torch, {name: _make_on_host(getattr(torch, name)) for name in _UNSEEN}),
                (torch.autograd, {_ENGINE: self._watch_backward(getattr(torch.autograd, _ENGINE))}),
            ]
            self._exchange()
        super().__enter__()  # type: ignore[no-untyped-call]  # of torch
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # of torch
        self._entered -= 1
        if not self._entered:
            self._exchange()

    def _exchange(self) -> None:
        for owner, functions in self._replaced:
            for name, function in list(functions.items()):
                functions[name] = getattr(owner, name)
                setattr(owner, name, function)

    def _watch_backward(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the backward pass with this mode on, which is off in torch's own functions: gradients written by hand are seen too."""

        def run_watched(*args: Any, **named: Any) -> Any:
            with self:
                result = run_backward(*args, **named)
            self.note_launch()
            return result

        return run_watched

    def note_launch(self) -> None:
        """Say that work was launched, for which no earlier read should have waited."""
        self.launched = len(self.reads)

    def place(self, tensor: torch.Tensor) -> Place:
        """Return where a tensor is taken to be."""
        return "host" if getattr(tensor, _HOST, False) else "other"

    def put_on_host(self, *values: object) -> None:
        """Take the tensors among these values for tensors of the CPU, though they were made before: constants of a module.

        Those that a block like this one moved to the other device, as a table per device is, stay there.
        """
        for tensor in _tensors(values):
            if not hasattr(tensor, _HOST):
                setattr(tensor, _HOST, True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _PLACE_PROPERTIES and not args[0].is_meta:
            return _PLACE_PROPERTIES[func](self.place(args[0]) == "other")
        if func == _DATA_SETTER:  # each look at it makes another object
            setattr(args[0], _HOST, self.place(args[1]) == "host")
            return func(*args, **named)
        tensors = list(_tensors((args, named)))
        self._receive(tensors)
        others = [tensor for tensor in tensors if self.place(tensor) == "other"]
        if others:
            self._require_readable(func, args, named)
        target, args, named = self._target(func, args, named)
        if target is None:
            self._require_one_place(func, args, named, others)
            target = "other" if others else "host"
        result = func(*args, **named)
        sends = func in (_T.to, _T.copy_, _T.cpu) and named.get("non_blocking") and others and target == "host"
        result = self._mark(result, target, tensors)
        if sends:
            setattr(result, _SENT, True)
        return result

    def _receive(self, tensors: list[torch.Tensor]) -> None:
        """Count the first use of a copy that was sent ahead, which is where the host waits for it."""
        for tensor in tensors:
            if getattr(tensor, _SENT, False):
                setattr(tensor, _SENT, False)
                self.reads.append(Read(SENT_AHEAD, _line()))

    def _require_readable(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Count what the host waits for, and refuse what only tensors of the CPU do."""
        if func in _CPU_ONLY:
            raise WrongDevice(f"{_CPU_ONLY[func]} reads a tensor that is not on the CPU, at {_line()}")
        if func in _READS:
            self.reads.append(Read(_READS[func], _line()))
        elif func in _SIZES:
            self.reads.append(Read(_SIZES[func], _line()))
        elif func in (torch.where, _T.where) and len(args) == 1:
            self.reads.append(Read("nonzero()", _line()))
        elif func in (torch.repeat_interleave, _T.repeat_interleave) and _counts_repeats(args, named):
            self.reads.append(Read("repeat_interleave() without output_size", _line()))
        elif func in _INDEXED and (masks := _masks(args)):
            of_host = all(self.place(mask) == "host" for mask in masks)
            (self.blocking_copies if of_host else self.reads).append(Read("x[mask]", _line()))
        elif func in _FROM_DATA and args and not isinstance(args[0], torch.Tensor):
            self.reads.append(Read("a tensor of tensors", _line()))

    def _target(
        self, func: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Place | None, tuple[Any, ...], dict[str, Any]]:
        """Return where the call says that its result is to be (None: where its arguments are), and the call in words that torch takes."""
        own = self.place(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if func is _T.cpu:
            self._record_move(own, "host", ".cpu()", named)
            return "host", args, named
        if func is _T.to:
            return self._to(own, args, named)
        if func is _T.type_as:
            return self.place(args[1]), args, named
        if func in _MOVES_INTO:
            self._record_move(self.place(args[1]), own, "copy_", named)
            return own, args, named
        if named.get("device") is not None:
            to = _place_of(named["device"])
            if to == "other":
                if func in _FROM_DATA and own is None:
                    self.blocking_copies.append(Read("a tensor of numbers", _line()))
                named["device"] = torch.device("cpu")
            elif own is not None and _is_called_by_torch():
                to = own
            elif own is None and _is_called_by_torch("distributed"):
                to = "other"  # a mesh names its device by its type alone, "cpu" here
            return to, args, named
        if func is _T.new_tensor and own == "other":
            self.blocking_copies.append(Read("new_tensor()", _line()))
        if func in _FROM_SELF or (own is not None and getattr(func, "__name__", "").endswith("_like")):
            return own, args, named
        if func in _FROM_DATA:
            return own or "host", args, named
        return None, args, named

    def _to(
        self, own: Place | None, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Place | None, tuple[Any, ...], dict[str, Any]]:
        like = named.get("other", args[1] if len(args) > 1 else None)
        if isinstance(like, torch.Tensor):
            self._record_move(own, self.place(like), ".to(tensor)", named)
            return self.place(like), args, named
        device = named.get("device", next((argument for argument in args[1:] if _names_a_device(argument)), None))
        if device is None or (_is_called_by_torch() and _place_of(device) == "host"):
            return own, args, named
        self._record_move(own, _place_of(device), ".to(cpu)", named)
        cpu = torch.device("cpu")
        args = tuple(cpu if _names_a_device(argument) and _place_of(argument) == "other" else argument for argument in args)
        if "device" in named and _place_of(device) == "other":
            named["device"] = cpu
        return _place_of(device), args, named

    def _record_move(self, source: Place | None, target: Place | None, what: str, named: Mapping[str, Any]) -> None:
        if named.get("non_blocking"):
            return
        if source == "other" and target == "host":
            self.reads.append(Read(what, _line()))
        elif source == "host" and target == "other":
            self.blocking_copies.append(Read(what.replace("cpu", "device"), _line()))

    def _require_one_place(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], others: list[torch.Tensor]) -> None:
        """Raise WrongDevice where tensors of both places meet; a single number of the CPU may meet others, as in torch."""
        if not others or func in _NEEDS_HOST:
            return
        if func in _TAKES_HOST_INDICES and isinstance(args[0], torch.Tensor) and self.place(args[0]) == "other":
            return
        on_host = [
            tensor for tensor in _tensors((args, named)) if self.place(tensor) == "host" and (tensor.dim() > 0 or func in _JOINS)
        ]
        if not on_host or any(tensor.is_meta for tensor in on_host):
            return
        name = getattr(func, "__name__", str(func))
        raise WrongDevice(
            f"{name} mixes devices: a tensor of shape {list(on_host[0].shape)} is on the CPU, others are where the model is, at {_line()}"
        )

    def _mark(self, result: Any, place: Place, inputs: list[torch.Tensor]) -> Any:
        """Return the result with its place set. What did not move keeps its object; what moved is a copy, as on a device."""
        if isinstance(result, torch.Tensor):
            if result.is_meta or self.place(result) == place:
                if place == "other" and not any(result is source for source in inputs):
                    setattr(result, _HOST, False)
                return result
            if any(result is source for source in inputs):
                result = result.clone()
            setattr(result, _HOST, place == "host")
        elif isinstance(result, (list, tuple)):
            for tensor in _tensors(result):
                if not any(tensor is source for source in inputs):
                    setattr(tensor, _HOST, place == "host")
        return result


def _make_on_host(maker: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **named: Any) -> torch.Tensor:
        tensor = maker(*args, **named)
        setattr(tensor, _HOST, True)
        return tensor

    return make


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from _tensors(value)


def _masks(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the masks that choose places in x[mask], in a number that the masks' device knows; one number is written without it."""
    _, index, *written = args
    if written and (not isinstance(written[0], torch.Tensor) or written[0].numel() == 1):
        return []
    tensors = [one for one in (index if isinstance(index, tuple) else (index,)) if isinstance(one, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.dtype in (torch.bool, torch.uint8)]


def _counts_repeats(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    repeats = named.get("repeats", args[1] if len(args) > 1 else None)
    return isinstance(repeats, torch.Tensor) and named.get("output_size") is None


def _names_a_device(value: object) -> bool:
    return isinstance(value, (torch.device, str)) or (isinstance(value, int) and not isinstance(value, bool))


def _place_of(device: Any) -> Place:
    if isinstance(device, int):
        return "other"
    return "host" if torch.device(device) != OTHER and torch.device(device).type == "cpu" else "other"


def _is_called_by_torch(package: str = "") -> bool:
    """Return True where torch's own Python asks, or a package of it: it has its devices from native code, which knows the CPU alone."""
    frame = sys._getframe(1)  # noqa: SLF001 - there is no public way to walk a stack without building all of it
    while frame is not None and frame.f_code.co_filename == __file__:
        assert frame.f_back is not None, "a mode is called by something"
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_LIBRARY + package)


def _line() -> str:
    """Return the line that is at fault: the innermost one outside of torch and of this file."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - as above
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_LIBRARY)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
