"""Import DeepSpeed when it is first needed: without its output, on the rank's own device, in the existing process group."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from skyrl_engine import UnsupportedError

_EXPECTED = ("untested optimizer", "OVERFLOW!")
"""Parts of warnings about things that this backend does on purpose and tests."""

_open: list[torch.device] = []
"""The devices of the open backends of this process."""

_before: list[str | None] = []
"""LOCAL_RANK before the first of them was opened."""

_joined: list[Any] = []
"""The default process group from which DeepSpeed's own groups were last made, if any were."""


def load(device: torch.device) -> Any:
    """Return the module `deepspeed`, ready for engines on `device`.

    Raises UnsupportedError if this process has used DeepSpeed on another kind of device.
    """
    if device.type == "cpu":
        from skyrl_engine_deepspeed import cpu

        cpu.choose_cpu()
    with _deaf_to_deprecations():
        import deepspeed
    _send_logs_to_root(deepspeed.utils.logger)
    if device.type == "cpu":
        cpu.forgo_compiled_operations(deepspeed.ops)
        cpu.use_device(deepspeed.get_accelerator(), device)
    chosen = deepspeed.get_accelerator().device_name()
    if chosen != device.type:
        raise UnsupportedError(
            f"DeepSpeed was first used on {chosen} in this process and cannot change to {device.type}",
            remedy=f'Set run.device to "{chosen}" or start a new process',
        )
    _follow_process_group(deepspeed)
    deepspeed.init_distributed(dist_init_required=False)
    _call_by_new_names(deepspeed.comm.comm.cdb)
    return deepspeed


@contextlib.contextmanager
def set_local_rank(device: torch.device) -> Iterator[None]:
    """Set LOCAL_RANK, from which DeepSpeed reads its device's number in every step, while at least one backend of this process is open.

    It is restored then: this may be the user's process, and libraries such as accelerate take it for one of several ranks.
    """
    if not _open:
        _before[:] = [os.environ.get("LOCAL_RANK")]
    _open.append(device)
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        _open.remove(device)
        if not _open:
            (before,) = _before
            if before is None:
                os.environ.pop("LOCAL_RANK", None)
            else:
                os.environ["LOCAL_RANK"] = before


def initialize(deepspeed: Any, **arguments: Any) -> Any:
    """Return the engine that `deepspeed.initialize` makes; its printed lines go to DeepSpeed's log at the level DEBUG."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _deaf_to_deprecations():
        engine, *_ = deepspeed.initialize(**arguments, dist_init_required=False)
    for line in printed.getvalue().splitlines():
        deepspeed.utils.logger.debug(line)
    return engine


@contextlib.contextmanager
def _deaf_to_deprecations() -> Iterator[None]:
    """Hide deprecation warnings about DeepSpeed's own imports, some of which happen while it makes an engine."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield


def _follow_process_group(deepspeed: Any) -> None:
    """Let DeepSpeed forget a default process group that no longer exists: it never replaces its copy by itself."""
    world = dist.group.WORLD
    if _joined and _joined[0] is not world:
        deepspeed.utils.groups._release_process_group_references()  # noqa: SLF001 - what its own destroy_process_group calls
    _joined[:] = [world]


def _send_logs_to_root(logger: logging.Logger) -> None:
    """Send DeepSpeed's log records to the root logger; its own handler would print them among results on standard output."""
    logger.handlers.clear()
    logger.propagate = True
    if not logger.filters:
        logger.addFilter(lambda record: not any(part in record.getMessage() for part in _EXPECTED))


def _call_by_new_names(backend: Any) -> None:
    """Let DeepSpeed 0.19 call two collectives by their new names: torch 2.13 and later warn at every call by the old ones."""
    for held, name in (("all_gather_function", "all_gather_single"), ("reduce_scatter_function", "reduce_scatter_single")):
        if hasattr(dist, name):
            setattr(backend, held, getattr(dist, name))
