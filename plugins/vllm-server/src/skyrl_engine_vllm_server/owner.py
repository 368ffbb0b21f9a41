"""Servers that a run started end with it, also where it is killed and can end nothing itself."""

import os
import signal
import threading
import time

OWNER = "SKYRL_ENGINE_OWNER"
"""Environment variable with the process id of the run."""

_LOOK_SECONDS, _GRACE_SECONDS = 2.0, 10.0


def end_with_owner() -> None:
    """End this process soon after the run that started the server has ended; nothing where no run did."""
    owner = os.environ.get(OWNER, "")
    if owner.isdecimal():
        threading.Thread(target=_watch, args=(int(owner),), name="skyrl-engine-owner", daemon=True).start()


def _watch(owner: int) -> None:
    while _lives(owner):
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    # a server that is still starting does not hear it
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
