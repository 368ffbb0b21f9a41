"""Ranks of this process that are real processes: their numbers, their memory, and a death in the middle of a step."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from skyrl_engine import hookimpl
from skyrl_engine.contracts.kinds.observer import StepFinished


def own_ranks() -> list[int]:
    """Process ids of this process's own rank actors, by their titles, which Ray sets."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and title(int(entry.name)).startswith("ray::RankActor"):
            number = int(entry.name)
            if os.getpid() in ancestors(number):
                found.append(number)
    return found


def title(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_text()
    except OSError:  # the process ended while we looked
        return ""


def ancestors(number: int) -> Iterator[int]:
    while number > 1:
        _, _, state = Path(f"/proc/{number}/stat").read_text().rpartition(")")
        number = int(state.split()[1])
        yield number


class Kill:
    """An observer that kills a rank inside the step after the named one."""

    def __init__(self, after: int) -> None:
        self._after = after
        self.at: float | None = None

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        if event.step == self._after:
            ranks = own_ranks()  # the run waits meanwhile; what is left for the thread to do must not take as long as a step
            threading.Thread(target=self._kill, args=(ranks,), daemon=True).start()

    def _kill(self, ranks: list[int]) -> None:
        deadline = time.monotonic() + 60
        while (
            not (busy := [rank for rank in ranks if title(rank).startswith("ray::RankActor.call")]) and time.monotonic() < deadline
        ):
            time.sleep(0.002)
        self.at = time.monotonic()
        os.kill(busy[-1], signal.SIGKILL)


def resident(process: int | str = "self") -> int:
    """Bytes of memory that a process holds now."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
