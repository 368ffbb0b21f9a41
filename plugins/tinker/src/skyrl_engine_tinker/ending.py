"""The end of the server's process: within seconds of SIGTERM or SIGINT, whatever its models do.

    signal --> no new connections; requests under way are answered   REQUESTS_SECONDS
           --> sessions end, models are closed                       until ENDING_SECONDS
           --> what still runs is abandoned, the process exits

Nothing that was acknowledged is lost by that: a checkpoint is on the disk before its request is answered.
"""

import logging
import os
import sys
import threading
from types import FrameType
from typing import Final

import uvicorn

logger = logging.getLogger(__name__)

REQUESTS_SECONDS: Final = 2
"""Seconds for requests under way. A step that ends in this time is answered."""

ENDING_SECONDS: Final = 4.5
"""Seconds until the process exits; supervisors often kill after 5 or 10."""


class EndingServer(uvicorn.Server):
    """A server that exits with the status 0 at most `ENDING_SECONDS` after the first signal."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, and start the clock."""
        if not self.should_exit:
            clock = threading.Timer(ENDING_SECONDS, _exit_now)
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
