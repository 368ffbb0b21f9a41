"""Attempts that show how a run went: the best, the median and the worst of its first, its middle and its last step."""

from collections.abc import Iterator

from attrs import frozen

from skyrl_engine.contracts.values.rollout import Group, Trajectory
from skyrl_engine.rollout.arrow_codec import LearnedAttempt
from skyrl_engine.rollout.journal_index import JournalIndex, apply_decision


@frozen(eq=False)
class PlacedAttempt:
    """An attempt with its group, and the step that trained on it or, where none did, that it was sampled for."""

    step: int
    group: Group
    trajectory: Trajectory
    learned: LearnedAttempt | None = None

    @property
    def name(self) -> str:
        attempt = self.trajectory
        return f"step {self.step}, {self.group.environment}: task {self.group.task_key}, attempt {attempt.member} of group {attempt.ticket}"


def list_moments(index: JournalIndex) -> list[int]:
    """Return the first, the middle and the last step that a journal has groups of and that trained on them; fewer where there are fewer."""
    trained = sorted(step for step, tickets in index.trained.items() if any(ticket in index.groups for ticket in tickets))
    return list(dict.fromkeys(trained[place] for place in (0, (len(trained) - 1) // 2, -1))) if trained else []


def choose_by_rank(index: JournalIndex, step: int) -> Iterator[tuple[str, PlacedAttempt]]:
    """Yield the best, the median and the worst attempt that a step trained on, by reward, with what the step learned of each. Only the groups
    of these are read.
    """
    tickets = [ticket for ticket in index.trained.get(step, ()) if ticket in index.groups]
    ranked = [
        (-reward, number, place)
        for number, ticket in enumerate(tickets)
        for place, (reward, status) in enumerate(zip(index.groups[ticket].rewards, index.groups[ticket].statuses, strict=True))
        if status != "failed"
    ]
    if not ranked:
        return
    ranked.sort()
    entry = index.learned.get(step)
    learned = {} if entry is None else {(attempt.ticket, attempt.member): attempt for attempt in entry.read_learned()}
    for name, (_, number, place) in (("best", ranked[0]), ("median", ranked[len(ranked) // 2]), ("worst", ranked[-1])):
        group = apply_decision(index.groups[tickets[number]].group(), trained=True)
        trajectory = group.trajectories[place]
        yield name, PlacedAttempt(step, group, trajectory, learned.get((trajectory.ticket, trajectory.member)))
