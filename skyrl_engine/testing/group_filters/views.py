"""Groups for filters: of one attempt or several, of equal rewards and others."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.group_filter import GroupView

REWARDS = (0.0, 0.25, 0.5, 1.0, -1.0, 2.0, 0.1, 3.3)


@frozen
class Attempt:
    """The part of an attempt that a filter sees."""

    reward: float
    success: bool
    length: int
    truncated: bool


@frozen
class ShownGroup:
    """A group as rows, which describes itself in words."""

    attempts: tuple[Attempt, ...]
    environment: str = "first"
    staleness: int = 0

    def view(self) -> GroupView:
        """Make the arrays that a filter sees, new ones in every call."""
        return GroupView(
            self.environment,
            np.array([attempt.reward for attempt in self.attempts], dtype=np.float64),
            np.array([attempt.success for attempt in self.attempts], dtype=np.bool_),
            np.array([attempt.length for attempt in self.attempts], dtype=np.int64),
            np.array([attempt.truncated for attempt in self.attempts], dtype=np.bool_),
            self.staleness,
        )

    def __str__(self) -> str:
        lines = [
            f"reward {attempt.reward:g}, {attempt.length} tokens{', right' * attempt.success}{', truncated' * attempt.truncated}"
            for attempt in self.attempts
        ]
        return "\n".join([f"{self.environment}, staleness {self.staleness}", *lines])


def attempts(*, plain: bool = False) -> "st.SearchStrategy[Attempt]":
    """Draw attempts whose rewards are often equal; `plain` ones are of a few lengths and rewards."""
    rewards = st.sampled_from(REWARDS)
    if plain:
        return st.builds(Attempt, rewards, st.booleans(), st.sampled_from((0, 9, 64)), st.booleans())
    rewards |= st.floats(-100, 100)
    return st.builds(Attempt, rewards, st.booleans(), st.integers(0, 2000), st.booleans())


@st.composite
def draw_group(draw: st.DrawFn, *, most: int = 6, plain: bool = False) -> ShownGroup:
    """Draw groups of one to `most` attempts, every third of equal rewards."""
    members = tuple(draw(st.lists(attempts(plain=plain), min_size=1, max_size=most)))
    if draw(st.sampled_from((True, False, False))):
        members = tuple(Attempt(members[0].reward, member.success, member.length, member.truncated) for member in members)
    return ShownGroup(members, draw(st.sampled_from(("first", "second"))), draw(st.integers(0, 3)))


def various_groups() -> list[ShownGroup]:
    """Return 48 groups that differ in all that a reason could name, some of equal rewards."""
    groups = []
    for number in range(48):
        size = 1 + number % 12
        rewards = [number / 48 + (place / 64 if number % 5 else 0.0) for place in range(size)]
        attempts = tuple(
            Attempt(reward, reward > 0.5, 10 * number + place, number % 4 == 0) for place, reward in enumerate(rewards)
        )
        groups.append(ShownGroup(attempts, f"environment {number % 16}", number % 24))
    return groups


def extreme_groups() -> list[ShownGroup]:
    """Return groups whose rewards are as large as a game's score, on both sides of 0, one whose mean depends on the order of a sum, and one
    whose rewards differ in their last bits.
    """
    reward_lists = [(1e9, 1e9, 2e9), (-1e6, -3e6), (-1e6, 1e6, 0.0), (0.7, 0.4, 0.2, 0.7), (10.3, 10.1 + 0.2, 10.3)]
    return [_make_group(rewards) for rewards in reward_lists]


def list_rounding_pairs() -> list[tuple[ShownGroup, ShownGroup]]:
    """Return pairs of groups that differ by no more than a rounding may change, which float64 and a comparison of rewards tell apart.

    Equal rewards whose mean, computed from their sum, is not the reward itself, and the next number whose is; rewards on both sides of the
    number at which float16 or float32 takes them for equal; and equal rewards on both sides of the largest float16.
    """
    pairs = [((near,) * count, (reward,) * count) for count in (3, 6, 11, 100) for near, reward in find_rounding_neighbours(count)]
    pairs += [((base, base, base + less), (base, base, base + more)) for base, less, more in ROUNDED_PAIRS]
    pairs += [((50_000.0,) * 4, (90_000.0,) * 4)]
    return [(_make_group(one), _make_group(other)) for one, other in pairs]


ROUNDED_PAIRS = ((1000.137, 0.1125, 0.1135), (2.0**20 + 0.03, 0.0324, 0.0326))
"""A reward, and what others lie above it: just below and above the next number that float16, and float32, round up. No bound lies between."""


def find_rounding_neighbours(count: int) -> list[tuple[float, float]]:
    """Return two neighbours in float64, of which so many of one have a deviation of 0 and of the other, by rounding, one that is not.

    None are returned where NumPy adds up so many numbers without rounding.
    """
    reward = 0.7123
    for _ in range(1000):
        following = float(np.nextafter(reward, 1.0))
        deviations = [float(np.full(count, each).std()) for each in (reward, following)]
        if deviations[0] == 0 < deviations[1]:
            return [(reward, following)]
        reward = following
    return []


def _make_group(rewards: Sequence[float]) -> ShownGroup:
    return ShownGroup(tuple(Attempt(reward, reward > 0, 12, False) for reward in rewards))


def large_groups() -> list[ShownGroup]:
    """Return groups as large as those of a run: of unequal rewards that come in runs of eight, of rewards that only the last differs in.

    Every second size is of an environment that is never drawn, and ten steps old.
    """
    groups = []
    for number, count in enumerate((16, 32, 64, 100)):
        rewards = [REWARDS[place // 8 % len(REWARDS)] for place in range(count)], [0.5] * (count - 1) + [0.25]
        labels = ("first", 0) if number % 2 else ("a/third one", 10)
        groups += [
            ShownGroup(
                tuple(Attempt(reward, reward > 0.25, 3 * place, place % 5 == 0) for place, reward in enumerate(group_rewards)),
                *labels,
            )
            for group_rewards in rewards
        ]
    return groups
