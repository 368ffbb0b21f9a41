"""The end of the server's process: within seconds of SIGTERM or SIGINT, whatever its models do.

    signal --> no new connections; requests under way are answered   until POLLS_SECONDS
           --> polls are told to try again                           until REQUESTS_SECONDS
           --> sessions end, models are closed                       until ENDING_SECONDS
           --> what still runs is abandoned, the process exits

Nothing that was acknowledged is lost by that: a checkpoint is on the disk before its request is answered.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

import uvicorn

logger = logging.getLogger(__name__)

POLLS_SECONDS: Final = 1.5
"""Seconds that polls are held on: a step that ends in this time is answered."""

REQUESTS_SECONDS: Final = 2
"""Seconds until connections are closed."""

ENDING_SECONDS: Final = 4.0
"""Seconds until the process exits; supervisors often kill after 5 or 10."""


class EndingServer(uvicorn.Server):
    """A server that exits with the status 0 at most `ENDING_SECONDS` after the first signal; `release_polls` lets go of those that are held."""

    def __init__(self, config: uvicorn.Config, release_polls: Callable[[], None]) -> None:
        super().__init__(config)
        self._release_polls = release_polls

    async def on_tick(self, counter: int) -> bool:
        """Have the signals: ranks on Ray, which start later, bring a handler that aborts the process."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self.handle_exit)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, and start the clocks."""
        if not self.should_exit:
            for seconds, work in ((POLLS_SECONDS, self._release_polls), (ENDING_SECONDS, _exit_now)):
                clock = threading.Timer(seconds, work)
                clock.daemon = True
                clock.start()
        super().handle_exit(sig, frame)


def _exit_now() -> None:
    logger.warning(
        "the server ended before its models did: a step that ran was abandoned; checkpoints that were answered are whole"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    # threads that compute cannot be ended, and an ordinary exit would wait for them
    os._exit(0)
