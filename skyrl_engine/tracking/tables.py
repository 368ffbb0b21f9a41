"""Attempts of a step of reinforcement learning as a table with texts."""

from collections.abc import Callable, Sequence

from attrs import frozen

from skyrl_engine.contracts.values.rollout import Group, Trajectory
from skyrl_engine.tracking.flat_config import hide_secrets

LONGEST_TEXT = 20_000
"""Characters of a text in a table."""

COLUMNS = ("environment", "task", "attempt", "reward", "status", "turns", "tokens", "prompt", "answer")

Cell = str | int | float


@frozen
class TrackedTable:
    """Rows of texts and numbers under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def to_markdown(self) -> str:
        """Return the table for a viewer of Markdown, every text in one line."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(_to_cell(cell) for cell in line)} |" for line in lines)


def _to_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        for special, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\r", ""), ("\n", "<br>")):
            cell = cell.replace(special, written)
        return cell
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def tabulate_attempts(groups: Sequence[Group], count: int, decode: Callable[[Sequence[int]], str]) -> TrackedTable:
    """Return `count` attempts, or all if there are fewer: the first of every group, then the second, and on."""
    attempts = [(attempt.member, place, attempt) for place, group in enumerate(groups) for attempt in group.trajectories]
    chosen = sorted(attempts, key=lambda item: item[:2])[:count]
    return TrackedTable(COLUMNS, tuple(_to_row(groups[place], attempt, decode) for _, place, attempt in chosen))


def _to_row(group: Group, attempt: Trajectory, decode: Callable[[Sequence[int]], str]) -> tuple[Cell, ...]:
    end = int(attempt.segment_offsets[1]) if len(attempt.segment_offsets) > 1 else 0
    ids = attempt.token_ids.tolist()
    texts = (_shorten(hide_secrets(decode(part))) for part in (ids[:end], ids[end:]))
    facts = (group.environment, group.task_key, attempt.member, attempt.reward, attempt.status, attempt.turns, len(ids))
    return (*facts, *texts)


def _shorten(text: str) -> str:
    left_out = len(text) - LONGEST_TEXT
    return text if left_out <= 0 else f"{text[:LONGEST_TEXT]} ... ({left_out:,} more characters)"
