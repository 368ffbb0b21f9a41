"""An attempt under way: one run of the model at a task, and the limits that hold for every attempt."""

import time
from collections.abc import Mapping
from typing import Any

from attrs import define, field, frozen

from skyrl_engine.contracts.kinds.environment import Message, Task
from skyrl_engine.contracts.kinds.generator import Completion
from skyrl_engine.rollout.transcript import Transcript


@frozen
class RolloutLimits:
    """The limits of every attempt. `keeps_history` appends to what is there; otherwise later prompts are rendered again.

    `all_may_fail` goes on where all of the first attempts failed. `keeps_messages` keeps every attempt's dialogue with it.
    """

    group_size: int
    max_prompt_tokens: int
    max_tokens: int
    min_group_size: int = 1
    max_failure_share: float = 1.0
    all_may_fail: bool = False
    keeps_history: bool = True
    keeps_messages: bool = False

    @property
    def longest(self) -> int:
        """Count the tokens that may be in front of the model, the sampled ones among them."""
        return self.max_prompt_tokens + self.max_tokens


@define(eq=False)
class RunningAttempt:
    """State of an attempt under way. `text` is its last turn's, `seconds` are by phase; `success` is None until the environment says."""

    ticket: int
    member: int
    number: int
    environment: int
    task: Task
    version: int
    messages: list[Message]
    transcript: Transcript | None = None
    sampling: Mapping[str, Any] = field(factory=dict)
    last: Completion | None = None
    text: str = ""
    tool_problems: int = 0
    success: bool | None = None
    parts: dict[str, float] = field(factory=dict)
    metrics: dict[str, float] = field(factory=dict)
    info: dict[str, Any] = field(factory=dict)
    seconds: dict[str, float] = field(factory=dict)
    since: float = 0.0

    def spend(self, phase: str) -> None:
        """Count the time since the last call as spent in `phase`."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.since
        self.since = now
