"""Numbers per sampled token of a rollout, one row each: who gives them, how the journal stores them, and as which column they are trained on.

```text
 Completion or StepResult ─► transcript ─► Trajectory ─► journal and exports ─► SampleColumns ─► losses, corrections, advantages
```

Every place on this way reads the table, so a new number is a new row at its end. An environment then names the row in its claims and gives
the numbers in `StepResult.columns`; nothing else changes. The format of a journal counts the rows of the table, so that older journals, which
have fewer of them, can be read.
"""

from typing import Final, Literal

import numpy as np
from attrs import frozen

LARGEST_FLOAT32: Final = float(np.finfo(np.float32).max)


@frozen
class RolloutColumn:
    """One number per sampled token.

    `name` is its name in the journal, in exports and in `StepResult.columns`; `column` its name in `SampleColumns`, where tokens that were not
    sampled hold 0. `dtype` is float32, or float64 for `rewards` alone. `source` says who gives it. `per` "token" is one number for each token
    of a turn; "turn" is one number for the turn, put at its last token. `largest` is the largest magnitude; all are finite.

    `in_every_attempt` marks the numbers without which there is no attempt: fields of `Trajectory` by `name`. The others are in
    `Trajectory.columns`, where an environment gives them.
    """

    name: str
    column: str
    dtype: type[np.float32] | type[np.float64] = np.float32
    source: Literal["generator", "environment"] = "environment"
    per: Literal["token", "turn"] = "token"
    largest: float = LARGEST_FLOAT32
    in_every_attempt: bool = False


ROLLOUT_COLUMNS: tuple[RolloutColumn, ...] = (
    RolloutColumn("logprobs", "rollout_logprobs", source="generator", largest=np.inf, in_every_attempt=True),
    RolloutColumn("rewards", "rewards", np.float64, per="turn", in_every_attempt=True),
    RolloutColumn("teacher_logprobs", "teacher_logprobs"),
)
"""The table. Rows that not every attempt has are at the end, in the order in which they were added: journals are read by it."""


ROLLOUT_STALENESS: Final = "rollout_staleness"
"""Column float32[A] of a run whose groups may be older than the weights they train: the steps between, by token; 0 on what was not sampled."""


def list_required_columns() -> tuple[RolloutColumn, ...]:
    """Return the rows that every attempt has."""
    return tuple(row for row in ROLLOUT_COLUMNS if row.in_every_attempt)


def list_further_columns() -> tuple[RolloutColumn, ...]:
    """Return the rows that an environment may give."""
    return tuple(row for row in ROLLOUT_COLUMNS if not row.in_every_attempt)


def find_unknown_column(names: object) -> str | None:
    """Say what is wrong with names of columns that an environment wants to give; None where nothing is."""
    known = [row.name for row in list_further_columns()]
    if not isinstance(names, tuple | list | frozenset | set):
        return f"columns are {names!r:.80}, where names are due"
    unknown = next((name for name in names if name not in known), None)
    return None if unknown is None else f"there is no column {unknown!r:.80} of rollouts; there is {', '.join(known)}"
