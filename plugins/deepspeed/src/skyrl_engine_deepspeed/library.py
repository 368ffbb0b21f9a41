"""DeepSpeed, imported where it is first needed: quiet, on the rank's own device, inside the process group that is there."""

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
"""Parts of warnings about what this backend does on purpose, and tests."""

_joined: list[Any] = []
"""The default process group that DeepSpeed's own groups were last made from."""


def load(device: torch.device) -> Any:
    """The module `deepspeed`, ready for engines on `device`. Raises UnsupportedError where the process uses it on another kind of device."""
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed reads its device's number from here
    if device.type == "cpu":
        from skyrl_engine_deepspeed import cpu

        cpu.choose_cpu()
    with _deaf_to_deprecations():
        import deepspeed
    _send_logs_to_root(deepspeed.utils.logger)
    if device.type == "cpu":
        cpu.forgo_compiled_operations(deepspeed.ops)
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


def initialize(deepspeed: Any, **arguments: Any) -> Any:
    """The engine that `deepspeed.initialize` makes; what it prints goes to its log at the level DEBUG."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _deaf_to_deprecations():
        engine, *_ = deepspeed.initialize(**arguments, dist_init_required=False)
    for line in printed.getvalue().splitlines():
        deepspeed.utils.logger.debug(line)
    return engine


@contextlib.contextmanager
def _deaf_to_deprecations() -> Iterator[None]:
    """What DeepSpeed imports, also while it makes an engine, concerns nobody who runs this."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield


def _follow_process_group(deepspeed: Any) -> None:
    """DeepSpeed keeps a copy of the world's group for good; after another world began, the copy leads nowhere."""
    world = dist.group.WORLD
    if _joined and _joined[0] is not world:
        deepspeed.utils.groups._release_process_group_references()  # noqa: SLF001 - what its own destroy_process_group calls
    _joined[:] = [world]


def _send_logs_to_root(logger: logging.Logger) -> None:
    """Its own handler prints every record to standard output, where results are."""
    logger.handlers.clear()
    logger.propagate = True
    if not logger.filters:
        logger.addFilter(lambda record: not any(part in record.getMessage() for part in _EXPECTED))


def _call_by_new_names(backend: Any) -> None:
    """Since 2.13 torch warns at every call of two collectives by the names that DeepSpeed 0.19 knows."""
    for held, name in (("all_gather_function", "all_gather_single"), ("reduce_scatter_function", "reduce_scatter_single")):
        if hasattr(dist, name):
            setattr(backend, held, getattr(dist, name))
