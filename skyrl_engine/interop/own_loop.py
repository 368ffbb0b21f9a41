"""Wait for coroutines from code that has no event loop, or runs inside another one: on a loop in a thread of its own."""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}
"""The loop of each process: a forked child has the object, but not the thread."""
_STARTING = threading.Lock()


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what the coroutine returns, or raise what it raises. All coroutines of a process share one loop."""
    with _STARTING:
        loop = _LOOPS.get(os.getpid())
        if loop is None:
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="interop", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


async def await_value(value: Awaitable[T] | T) -> T:
    """Return the value, or what it resolves to where it is awaitable."""
    return await value if inspect.isawaitable(value) else value
