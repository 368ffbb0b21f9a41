"""The state of a run: how far it is, whether a process works on it, and why it ended."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from skyrl_engine.run.lock import LockView

StateWord = Literal[
    "starting", "running", "ended", "stopped", "failed", "killed", "unknown", "never started", "damaged", "unreadable"
]


@frozen
class RunState:
    """One word for a run's state, and the cause in words where the word alone says too little.

    `starting`: a process prepares the run or its continuation. `ended`: all steps are done; `stopped`: an orderly end before that. `killed`: no
    end is recorded and no process works on it. `unknown`: its process cannot be seen from here. `unreadable`: another engine wrote it.
    """

    word: StateWord
    cause: str | None = None

    @property
    def is_live(self) -> bool:
        """True where a process works on the run."""
        return self.word in ("starting", "running")

    def __str__(self) -> str:
        return self.word if self.cause is None else f"{self.word}: {self.cause}"


def judge_state(sessions: Sequence[Mapping[str, Any]], lock: LockView, *, step: int, total_steps: int | None) -> RunState:
    """Return the state that the sessions of a manifest and the lock say; `step` is the last one that was done."""
    last = sessions[-1] if sessions else None
    finished = None if last is None else last.get("finished")
    holder = lock.holder
    if last is None or finished:
        prepares = holder is None or (holder.work == "run" and (finished is None or holder.since > str(finished)))
        if lock.status == "held" and prepares:
            return RunState("starting", None if holder is None else str(holder))
    if last is None:
        return RunState("never started")
    if last.get("error"):
        return RunState("failed", str(last["error"]))
    if finished:
        return RunState("ended" if total_steps is not None and step >= total_steps else "stopped")
    if lock.status == "held":
        return RunState("running", None if holder is None else str(holder))
    if lock.status == "unknown":
        who = "its lock cannot be read" if holder is None else f"{holder} cannot be checked from here"
        return RunState("unknown", f"no end is recorded, and {who}")
    return RunState("killed", "no end is recorded, and no process works on it")
