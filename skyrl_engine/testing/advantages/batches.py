"""Batches for estimators: groups of trajectories in turns, with observations, failed members, and trajectories of no token."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from attrs import evolve, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.advantage import AdvantageBatch
from skyrl_engine.contracts.values.ragged import AnyArray, offsets_of

REWARDS = (0.0, 0.25, 0.5, 1.0, -1.0, 2.0, -0.5)
"""Sums and differences of these are exact, so that a difference in a promise is the estimator's."""

AWKWARD = (0.1, 3.3, -0.7, 1e-3, 1 / 3)
"""Rewards whose mean, computed from several equal ones, is not the reward itself."""


@frozen
class Token:
    """One action token: its loss weight, its reward, and a number that every column is made of."""

    weight: float
    reward: float = 0.0
    number: float = 0.0


@frozen
class DrawnSample:
    """One sample of a batch. `key` names the trajectory in comparisons; the estimator sees `trajectory`."""

    key: int
    group: int
    trajectory: int
    turn: int
    finished: bool
    tokens: tuple[Token, ...]


@frozen
class DrawnRows:
    """A batch as rows, which describes itself in words. `needs` are the columns that it holds."""

    samples: tuple[DrawnSample, ...]
    needs: tuple[str, ...] = ()
    fractions: bool = False

    def batch(self) -> AdvantageBatch:
        """Make the arrays that an estimator sees, new ones in every call."""
        tokens = [token for sample in self.samples for token in sample.tokens]
        dtype = np.float32 if self.fractions else np.uint8
        numbers = np.asarray([token.number for token in tokens], dtype=np.float32)
        return AdvantageBatch(
            rewards=np.asarray([token.reward for token in tokens], dtype=np.float64),
            loss_weight=np.asarray([token.weight for token in tokens], dtype=dtype),
            action_offsets=offsets_of([len(sample.tokens) for sample in self.samples]),
            group_ids=_ids(sample.group for sample in self.samples),
            trajectory_ids=_ids(sample.trajectory for sample in self.samples),
            turn=_ids(sample.turn for sample in self.samples),
            finished=np.asarray([sample.finished for sample in self.samples], dtype=np.bool_),
            columns={name: numbers * np.float32(1 + place) + np.float32(place) for place, name in enumerate(self.needs)},
        )

    def collect_scored(self, values: AnyArray) -> dict[tuple[int, int], float]:
        """Return the values [A] of scored tokens by trajectory and place among its scored tokens, whatever the order of the samples."""
        numbers: dict[tuple[int, int], float] = {}
        starts = offsets_of([len(sample.tokens) for sample in self.samples])
        counts: dict[int, int] = {}
        for position in sorted(range(len(self.samples)), key=lambda index: self.samples[index].turn):
            sample = self.samples[position]
            for place, token in enumerate(sample.tokens):
                if token.weight and sample.finished:
                    ordinal = counts.get(sample.key, 0)
                    numbers[sample.key, ordinal] = float(values[starts[position] + place])
                    counts[sample.key] = ordinal + 1
        return numbers

    def collect_rewards(self) -> dict[int, float]:
        """Return the sum of each trajectory's rewards by its key."""
        rewards: dict[int, float] = {}
        for sample in self.samples:
            rewards[sample.key] = rewards.get(sample.key, 0.0) + sum(token.reward for token in sample.tokens)
        return rewards

    def with_rewards(self, extra_reward: Callable[[int], float]) -> "DrawnRows":
        """Return the batch in which the last token of every trajectory's last sample with tokens has `extra_reward(key)` more reward."""
        last = {sample.key: i for i, sample in sorted(enumerate(self.samples), key=lambda pair: pair[1].turn) if sample.tokens}
        samples = list(self.samples)
        for key, place in last.items():
            *others, final = samples[place].tokens
            rewarded = evolve(final, reward=final.reward + extra_reward(key))
            samples[place] = evolve(samples[place], tokens=(*others, rewarded))
        return evolve(self, samples=tuple(samples))

    def __str__(self) -> str:
        lines = []
        for sample in self.samples:
            tokens = " ".join(f"{'.' if not token.weight else f'{token.weight:g}'}:{token.reward:g}" for token in sample.tokens)
            failed = "" if sample.finished else ", failed"
            label = f"group {sample.group}, trajectory {sample.trajectory}, turn {sample.turn}{failed}"
            lines.append(f"{label}: weight:reward of its tokens {tokens or 'none'}")
        return "\n".join(lines)


def _ids(numbers: Iterable[int]) -> AnyArray:
    return np.asarray(list(numbers), dtype=np.int64)


@st.composite
def rows(
    draw: st.DrawFn,
    needs: Sequence[str] = (),
    *,
    rewards: Sequence[float] = REWARDS,
    turns: int = 2,
    failures: bool = True,
    empty: bool = True,
    least_group: int = 1,
    even: bool = False,
) -> DrawnRows:
    """Draw batches of up to three groups of `least_group` to four trajectories of up to `turns` samples, in any order.

    `failures` allows trajectories that failed, `empty` samples and trajectories without scored tokens; `even` gives every trajectory one
    sample of two scored tokens, whose last one is rewarded.
    """
    samples, key = [], 0
    fractions = draw(st.booleans())
    weights: tuple[float, ...] = (1.0, 1.0, 0.5) if fractions else (1.0,)
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(least_group, 4))):
            finished = not failures or draw(st.sampled_from((True, True, True, True, False)))
            for turn in range(1 if even else draw(st.integers(1, turns))):
                tokens = _tokens(draw, rewards, weights, empty=empty, even=even)
                samples.append(DrawnSample(key, group, key, turn, finished, tokens))
            key += 1
    order = draw(st.permutations(samples))
    return DrawnRows(tuple(order), tuple(needs), fractions)


def _tokens(draw: st.DrawFn, rewards: Sequence[float], weights: Sequence[float], *, empty: bool, even: bool) -> tuple[Token, ...]:
    numbers = st.sampled_from((0.0, 0.5, -1.0, 0.25))
    reward = draw(st.sampled_from(tuple(rewards)))
    if even:
        return (Token(1.0, 0.0, draw(numbers)), Token(1.0, reward, draw(numbers)))
    scored = draw(st.lists(st.booleans(), min_size=0 if empty else 1, max_size=4))
    if not empty and not any(scored):
        scored[0] = True
    tokens = [Token(draw(st.sampled_from(tuple(weights))) if is_scored else 0.0, 0.0, draw(numbers)) for is_scored in scored]
    last = max((place for place, is_scored in enumerate(scored) if is_scored), default=None)
    if last is not None:
        tokens[last] = evolve(tokens[last], reward=reward)
    return tuple(tokens)


@st.composite
def draw_equal(draw: st.DrawFn, needs: Sequence[str] = ()) -> DrawnRows:
    """Draw one group of up to 13 trajectories that all have the same reward, of any size, at once or in two turns of whole tenths."""
    size = draw(st.integers(1, 13))
    if draw(st.booleans()):
        return _make_group([(draw(st.sampled_from(AWKWARD) | st.floats(-1e4, 1e4)),)] * size, needs)
    tenths = draw(st.integers(-200, 200))
    shares = st.none() | st.integers(-200, 200)
    return _make_group([_split_into_turns(tenths, draw(shares)) for _ in range(size)], needs)


def _split_into_turns(tenths: int, first: int | None) -> tuple[float, ...]:
    return (tenths / 10,) if first is None else (first / 10, (tenths - first) / 10)


def list_tied(needs: Sequence[str] = ()) -> list[DrawnRows]:
    """Return groups of equal rewards whose sums differ in their last bits, since one earns in two turns what others earn at once."""
    groups = [(10.3,), (10.1, 0.2), (10.3,)], [(-0.3,), (-0.1, -0.2)], [(0.3, -0.3), (0.1, 0.2, -0.3)]
    return [_make_group(group, needs) for group in groups]


def _make_group(turns: Sequence[tuple[float, ...]], needs: Sequence[str]) -> DrawnRows:
    """Return a group of a trajectory per tuple, of the rewards of its turns."""
    samples = [
        DrawnSample(key, 0, key, turn, True, (Token(1.0), Token(1.0, reward)))
        for key, own in enumerate(turns)
        for turn, reward in enumerate(own)
    ]
    return DrawnRows(tuple(samples), tuple(needs))


FAR = 1 << 52
"""Ids above it are closer than float32 can tell apart, and no table has a place for each up to them."""


CROWD_GROUPS = (65, 33, 16, 16)
"""Trajectories of each group: more than a word of 64 or 32 bits counts."""
CROWD = sum(CROWD_GROUPS)


def make_crowd(needs: Sequence[str] = ()) -> DrawnRows:
    """Return four groups of up to 65 trajectories of two scored tokens, in mixed order.

    Their ids are large, and neighbours of each other or alike in their last 32 bits.
    """
    groups = [FAR + group % 2 + group // 2 * 2**32 for group, size in enumerate(CROWD_GROUPS) for _ in range(size)]
    trajectories = [FAR - key % 32 - key // 32 * 2**32 for key in range(CROWD)]
    samples = [
        DrawnSample(key, groups[key], trajectories[key], 0, True, (Token(1.0, 0.0, 0.5), Token(1.0, REWARDS[key * key % 7], -0.25)))
        for key in range(CROWD)
    ]
    return DrawnRows(tuple(samples[key * 11 % CROWD] for key in range(CROWD)), tuple(needs))


def make_long_and_failed(needs: Sequence[str] = ()) -> DrawnRows:
    """Return a trajectory of eight turns, a turn without a token and observed tokens among them, one of 300 scored tokens and one of none, in
    a group with one that failed; and a group of which all failed.
    """
    observed, scored = Token(0.0, 0.0, 0.5), Token(1.0, 0.0, -0.5)
    turns = [() if turn == 3 else (observed, scored, observed, evolve(scored, reward=0.25)) for turn in range(8)]
    samples = [DrawnSample(0, 0, 0, turn, True, tokens) for turn, tokens in enumerate(turns)]
    samples += [
        DrawnSample(1, 0, 1, 0, True, (*[scored] * 299, evolve(scored, reward=1.0))),
        DrawnSample(2, 0, 2, 0, True, ()),
        DrawnSample(3, 0, 3, 0, False, (scored, evolve(scored, reward=2.0))),
        *(DrawnSample(key, 1, key, 0, False, (evolve(scored, reward=-1.0),)) for key in (4, 5)),
    ]
    return DrawnRows(tuple(samples[::-1]), tuple(needs))


def make_batch_of_failures(needs: Sequence[str] = ()) -> DrawnRows:
    """Return two groups of which all trajectories failed: nobody is left to learn from."""
    tokens = (Token(1.0), Token(1.0, 0.5))
    return DrawnRows(tuple(DrawnSample(key, key // 2, key, 0, False, tokens) for key in range(4)), tuple(needs))


def make_large(needs: Sequence[str] = ()) -> DrawnRows:
    """Return a group of four trajectories whose rewards are as large as those of a game's score, beyond what float16 and int16 hold."""
    rewards = (1e6, -1e6, 250_000.0, 0.0)
    samples = [DrawnSample(key, 0, key, 0, True, (Token(1.0), Token(1.0, reward))) for key, reward in enumerate(rewards)]
    return DrawnRows(tuple(samples), tuple(needs))


def relabel(batch: DrawnRows) -> DrawnRows:
    """Return the batch under other ids of groups and trajectories, which do not rise where those of the batch do.

    Ids less than `_NAMES` apart keep apart, and so do those of `make_crowd`.
    """
    samples = [evolve(sample, group=_rename(sample.group), trajectory=_rename(sample.trajectory)) for sample in batch.samples]
    return evolve(batch, samples=tuple(samples))


_NAMES = 199


def _rename(number: int) -> int:
    return (90 - 40 * number) % _NAMES


def scale_weights(batch: DrawnRows, key: int, factor: float) -> DrawnRows:
    """Return the batch in which the loss weights of one trajectory are so many times as large."""
    samples = [
        evolve(sample, tokens=tuple(evolve(token, weight=factor * token.weight) for token in sample.tokens))
        if sample.key == key
        else sample
        for sample in batch.samples
    ]
    return evolve(batch, samples=tuple(samples), fractions=True)


def join_turns(batch: DrawnRows) -> DrawnRows:
    """Return the batch in which every trajectory is one sample."""
    first: dict[int, DrawnSample] = {}
    for sample in sorted(batch.samples, key=lambda sample: sample.turn):
        if sample.key in first:
            before = first[sample.key]
            first[sample.key] = evolve(before, tokens=before.tokens + sample.tokens)
        else:
            first[sample.key] = evolve(sample, turn=0)
    return evolve(batch, samples=tuple(first.values()))


def with_observations(batch: DrawnRows, number: float) -> DrawnRows:
    """Return the batch with two tokens of no weight and no reward before every token of every sample."""
    observed = (Token(0.0, 0.0, number), Token(0.0, 0.0, -number))
    samples = [
        evolve(sample, tokens=tuple(inserted for token in sample.tokens for inserted in (*observed, token)))
        for sample in batch.samples
    ]
    return evolve(batch, samples=tuple(samples))


def move_rewards_behind(batch: DrawnRows) -> DrawnRows:
    """Return the batch in which each sample's rewards stand at a token of no weight behind its last one."""
    samples = [
        evolve(
            sample,
            tokens=(
                *(evolve(token, reward=0.0) for token in sample.tokens),
                Token(0.0, sum(token.reward for token in sample.tokens), 0.5),
            ),
        )
        for sample in batch.samples
    ]
    return evolve(batch, samples=tuple(samples))
