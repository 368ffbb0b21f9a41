"""Settings shared by everything in a process: one table for all kinds of plugins."""

import decimal
import gc
import locale
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import _tensor_str

from skyrl_engine.testing.promise import Broken

REMEDY = "Change settings of the process in a with statement, or not at all"

PATIENCE_S = 0.5
"""Seconds in which threads may end, such as those of a pool that is gone, before they are left running."""

_Value = Any


@frozen
class _Setting:
    """A setting of the process: `read` returns it, comparable, and `write` puts such a value back. `shown`: messages show its value."""

    read: Callable[[], _Value]
    write: Callable[[_Value], object]
    shown: bool = True


# --- torch -------------------------------------------------------------------------------------------------------------------------

_MIXED = "mixed with those of torch.backends"
"""The legacy setting where torch refuses to read it, since a newer switch was set as well."""

_SWITCHES = tuple(
    f"torch.backends.{name}"
    # what comes first is what the later ones fall back to
    for name in (
        "fp32_precision",
        "cuda.matmul.fp32_precision",
        "cudnn.fp32_precision",
        "cudnn.conv.fp32_precision",
        "cudnn.rnn.fp32_precision",
        "mkldnn.fp32_precision",
        "mkldnn.matmul.fp32_precision",
        "mkldnn.conv.fp32_precision",
        "mkldnn.rnn.fp32_precision",
        "cuda.matmul.allow_bf16_reduced_precision_reduction",
        "cuda.matmul.allow_fp16_reduced_precision_reduction",
        "cudnn.enabled",
        "cudnn.benchmark",
        "cudnn.deterministic",
        "mkldnn.enabled",
        "mkldnn.deterministic",
    )
)
_ATTENTIONS = ("flash", "mem_efficient", "math", "cudnn")


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return _MIXED


def _set_matmul_precision(value: str) -> None:
    if value != _MIXED:
        torch.set_float32_matmul_precision(value)


def _owner(path: str) -> tuple[Any, str]:
    """Return the object that has the switch, and its attribute; None for the object where this version of torch has none of it."""
    owner: Any = torch
    *names, last = path.split(".")[1:]
    for name in names:
        owner = getattr(owner, name, None)
    return owner, last


def _switches() -> dict[str, object]:
    owners = {path: _owner(path) for path in _SWITCHES}
    values = {path: getattr(owner, name, None) for path, (owner, name) in owners.items()}
    values |= {f"{name} attention": getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTIONS}
    return values


def _set_switches(values: Mapping[str, object]) -> None:
    for path in _SWITCHES:
        owner, name = _owner(path)
        if getattr(owner, name, None) != values[path]:
            setattr(owner, name, values[path])
    for name in _ATTENTIONS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(values[f"{name} attention"])


def _is_flushing_denormal_numbers() -> bool:
    return not (torch.tensor([1e-310], dtype=torch.float64, device="cpu") * 1).any()


def _set_default_device(device: torch.device) -> None:
    # None ends the mode in which torch passes the device to every call
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _anomaly_mode() -> dict[str, bool]:
    return {"mode": torch.is_anomaly_enabled(), "check_nan": torch.is_anomaly_check_nan_enabled()}


# --- Python ------------------------------------------------------------------------------------------------------------------------

_HOOKS = ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook"))
_LOGGERS = (logging.root, logging.getLogger("skyrl_engine"))
_SIGNALS = dict(signal.Signals.__members__)
_DECIMALS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _set_filters(filters: Any) -> None:
    warnings.filters[:] = filters  # type: ignore[index]  # a list, which the type hides
    with warnings.catch_warnings():
        pass  # leaving this block makes Python forget what it remembers of older filters


def _set_environment(variables: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _levels() -> dict[str, int]:
    return {logger.name: logger.level for logger in _LOGGERS}


def _set_levels(levels: Mapping[str, int]) -> None:
    for logger in _LOGGERS:
        logger.setLevel(levels[logger.name])


def _handlers() -> dict[str, object]:
    return {f"handler of {name}": signal.getsignal(number) for name, number in _SIGNALS.items()}


def _set_handlers(handlers: Mapping[str, Any]) -> None:
    for name, number in _SIGNALS.items():
        handler = handlers[f"handler of {name}"]
        # one that was not set from Python is None, and only the main thread may set one
        if handler is not None and handler != signal.getsignal(number):
            with suppress(ValueError, OSError):
                signal.signal(number, handler)


def _decimal_context() -> dict[str, object]:
    context = decimal.getcontext()
    return {name: getattr(context, name) for name in _DECIMALS} | {"traps": dict(context.traps)}


def _set_decimal_context(values: Mapping[str, Any]) -> None:
    for name in _DECIMALS:
        setattr(decimal.getcontext(), name, values[name])
    decimal.getcontext().traps.update(values["traps"])


def _set_hooks(hooks: Mapping[str, object]) -> None:
    for owner, name in _HOOKS:
        setattr(owner, name, hooks[f"{owner.__name__}.{name}"])


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "a directory that is gone"


def _start_method() -> str:
    """Return how processes are started; the default where nothing has asked for it yet, since asking settles it."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _threads() -> frozenset[threading.Thread]:
    """Return the threads that were started in Python, without those of others that ran Python code once."""
    return frozenset(thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))  # noqa: SLF001 - no public name


def processes() -> frozenset[int]:
    """Return the processes that this one started and that still run, where the system says so."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            pids.update(map(int, task.read_text().split()))
    return frozenset(pid for pid in pids if _is_running(pid))


def _is_running(pid: int) -> bool:
    try:
        # after the name in brackets comes the state, Z for a process that has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _leave_running(_value: _Value) -> None:
    """Leave threads and processes running: nobody can end a thread from outside, and a process may be somebody else's."""


def _set_collector(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


_SETTINGS: Mapping[str, _Setting] = {
    "gradient mode": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "number of threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": _Setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "flushing of denormal numbers": _Setting(_is_flushing_denormal_numbers, torch.set_flush_denormal),
    # before the switches, which it sets too
    "precision of matrix products": _Setting(_matmul_precision, _set_matmul_precision),
    "switches of torch": _Setting(_switches, _set_switches),
    "anomaly detection": _Setting(
        _anomaly_mode, lambda values: torch.autograd.set_detect_anomaly(values["mode"], check_nan=values["check_nan"])
    ),
    "default device": _Setting(torch.get_default_device, _set_default_device),
    "threads of backward": _Setting(torch._C._is_multithreading_enabled, torch.autograd.set_multithreading_enabled),  # noqa: SLF001 - no public name
    "autocast on the CPU": _Setting(partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "autocast on GPUs": _Setting(partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    "repetition of torch's warnings": _Setting(torch.is_warn_always_enabled, torch.set_warn_always),
    "print options of torch": _Setting(
        lambda: dict(vars(_tensor_str.PRINT_OPTS)), lambda values: vars(_tensor_str.PRINT_OPTS).update(values)
    ),
    "sharing strategy of tensors": _Setting(torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    "errors of NumPy": _Setting(np.geterr, lambda values: np.seterr(**values)),
    "print options of NumPy": _Setting(np.get_printoptions, lambda values: np.set_printoptions(**values)),
    "filters of warnings": _Setting(lambda: list(warnings.filters), _set_filters, shown=False),
    "level of all logging": _Setting(lambda: logging.root.manager.disable, logging.disable),
    "levels of loggers": _Setting(_levels, _set_levels),
    "garbage collector": _Setting(gc.isenabled, _set_collector),
    "recursion limit": _Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "switch interval": _Setting(sys.getswitchinterval, sys.setswitchinterval),
    "digits of integers": _Setting(sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    "context of decimals": _Setting(_decimal_context, _set_decimal_context),
    "hooks of exceptions": _Setting(
        lambda: {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in _HOOKS}, _set_hooks, shown=False
    ),
    "handlers of signals": _Setting(_handlers, _set_handlers, shown=False),
    "default timeout of sockets": _Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
    "start method of processes": _Setting(_start_method, partial(multiprocessing.set_start_method, force=True)),
    "locale": _Setting(partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    "file mode mask": _Setting(_umask, os.umask),
    "working directory": _Setting(_working_directory, os.chdir),
    "search path of modules": _Setting(lambda: list(sys.path), lambda paths: sys.path.__setitem__(slice(None), paths), shown=False),
    "environment variables": _Setting(lambda: dict(os.environ), _set_environment, shown=False),
    "threads": _Setting(_threads, _leave_running, shown=False),
    "processes": _Setting(processes, _leave_running, shown=False),
}

_NAMED_BY_PARTS = ("handlers of signals", "hooks of exceptions", "switches of torch")


def settings_of_process() -> Mapping[str, _Value]:
    """Return by name the settings of torch, NumPy and Python that hold for the whole process."""
    return {name: setting.read() for name, setting in _SETTINGS.items()}


def _restore(before: Mapping[str, _Value]) -> None:
    """Write those settings that differ now, in the table's order: later ones may follow earlier ones."""
    for name, setting in _SETTINGS.items():
        if setting.read() != before[name]:
            setting.write(before[name])


@contextmanager
def restore_settings() -> Iterator[None]:
    """Restore the process's settings in the end."""
    before = settings_of_process()
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def require_settings_unchanged() -> Iterator[None]:
    """Restore the process's settings in the end, and raise Broken where one had changed."""
    before = settings_of_process()
    try:
        yield
        deadline = monotonic() + PATIENCE_S
        for thread in _threads() - before["threads"]:
            thread.join(timeout=max(0.0, deadline - monotonic()))
        while processes() - before["processes"] and monotonic() < deadline:
            sleep(0.02)
        after = settings_of_process()
    finally:
        _restore(before)
    changed = [name for name, value in after.items() if _is_changed(before[name], value)]
    if not changed:
        return
    # a switch of torch says more than the legacy setting that it makes unreadable
    name = min(changed, key=lambda setting: after[setting] == _MIXED)
    raise Broken(_describe_change(name, before[name], after[name]), REMEDY)


def _is_changed(before: _Value, after: _Value) -> bool:
    """Return True for another value; threads and processes of others may end at any time."""
    return bool(after - before) if isinstance(after, frozenset) else before != after


def _describe_change(name: str, before: _Value, after: _Value) -> str:
    if name == "threads":
        left = sorted(each.name for each in after - before)
        return f"leaves {len(left)} threads running, such as {left[0]!r}"
    if name == "processes":
        return f"leaves the process {min(after - before)} running"
    is_shown = _SETTINGS[name].shown
    if isinstance(before, dict) and name != "environment variables":
        part = next(each for each in after if after[each] != before.get(each))
        name = part if name in _NAMED_BY_PARTS else f"{name} ({part})"
        before, after = before.get(part), after[part]
    # Hypothesis has set the recursion limit to a number of its own before
    was = "" if name == "recursion limit" else f", where it was {before}"
    name = name if "." in name else f"the {name}"
    return f"leaves {name} at {after}{was}" if is_shown else f"changes {name}"


def require_settings_left_alone(call: Callable[[], object]) -> None:
    """Call, restore the process's settings, and raise Broken where one had changed.

    What the first import of a library changes is nothing that the call does: where modules were imported, or a thread or process was started
    that may serve all later calls, a second call is judged.
    """
    modules, started = len(sys.modules), (_threads(), processes())
    try:
        with require_settings_unchanged():
            call()
    except Broken:
        if len(sys.modules) == modules and (_threads(), processes()) == started:
            raise
        with require_settings_unchanged():
            call()
