"""Clean up after a failure without hiding it: an error of cleaning up is logged, and the failure itself reaches the caller."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def close_after(error: BaseException | None, close: Callable[[], object]) -> None:
    """Call `close`. Where `error` is on its way to the caller already, what `close` raises is logged; without one it is raised."""
    try:
        close()
    except Exception as second:
        if error is None:
            raise
        logger.exception("cleaning up after %r failed too: %s", error, second)  # noqa: TRY401 - one line must say it


@contextmanager
def finally_close(close: Callable[[], object]) -> Iterator[None]:
    """Call `close` after the body, as `finally` does. Where both raise, the error of the body is raised and that of `close` logged."""
    try:
        yield
    except BaseException as error:
        close_after(error, close)
        raise
    close()
