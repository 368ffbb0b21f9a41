"""Pairs of attempts for losses of preferences: of each group the attempt of the highest reward against the one of the lowest, and so on."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.advantage import FloatArray
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.contracts.values.roles import CHOSEN, REJECTED, ROLE
from skyrl_engine.errors import DataError


@frozen(eq=False)
class PairedAttempts:
    """The samples of a batch that make P pairs, in their order: a unit each, with the value `role`. Without any pair, one sample without loss.

    `margins` float64[P] are the rewards of the chosen attempts minus those of the rejected ones; `tied` of the batch's `groups` have no pair.
    """

    columns: SampleColumns
    margins: FloatArray
    tied: int
    groups: int

    @property
    def signs(self) -> npt.NDArray[np.float32]:
        """float32[A]: 1 at tokens of chosen attempts that carry loss, -1 at those of rejected ones, 0 elsewhere."""
        signs = np.where(self.columns.sample_values[ROLE] == CHOSEN, 1, -1)
        return np.where(self.columns.loss_weight != 0, np.repeat(signs, np.diff(self.columns.action_offsets)), 0).astype(np.float32)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the number of pairs, the share of groups without one, and the mean difference of rewards."""
        margin = {"reward/pair_margin": float(self.margins.mean())} if len(self.margins) else {}
        return {"rollout/pairs": float(len(self.margins)), "rollout/tied": self.tied / max(1, self.groups), **margin}


def choose_pairs(columns: SampleColumns, rewards: FloatArray, per_group: int) -> PairedAttempts:
    """Choose up to `per_group` pairs of every group, while their rewards differ; `rewards` float64[R] are those of attempts, ties made equal.

    The k-th pair is the k-th attempt from above and the k-th from below; of equal ones the first counts as further out. So no attempt is in two
    pairs. Attempts without a token that carries loss are in none, and two of the same tokens make none. Raises DataError for an attempt of
    several samples.
    """
    _refuse_rewritten(columns)
    rewards = rewards[np.unique(columns.trajectory_ids, return_inverse=True)[1]]
    carrying = np.diff(np.concatenate([[0], np.cumsum(columns.loss_weight != 0)])[columns.action_offsets]) > 0
    names, group = np.unique(columns.group_ids, return_inverse=True)
    pairs: list[tuple[int, int]] = []
    tied = 0
    for number in range(len(names)):
        found = list(_pairs_of(columns, rewards, np.flatnonzero(carrying & (group == number)), per_group))
        tied += not found
        pairs += found
    if not pairs:
        return PairedAttempts(_without_loss(columns), np.zeros(0), tied, len(names))
    places = np.array(pairs, dtype=np.int64)
    unit, role = np.full(len(columns), -1, dtype=np.int64), np.full(len(columns), CHOSEN, dtype=np.int64)
    unit[places] = np.arange(len(places), dtype=np.int64)[:, None]
    role[places[:, 1]] = REJECTED
    paired = evolve(columns, unit_ids=unit, sample_values={**columns.sample_values, ROLE: role}).take(np.flatnonzero(unit >= 0))
    return PairedAttempts(paired, rewards[places[:, 0]] - rewards[places[:, 1]], tied, len(names))


def _pairs_of(columns: SampleColumns, rewards: FloatArray, members: IntArray, most: int) -> Iterator[tuple[int, int]]:
    """Yield the chosen and the rejected sample of every pair of a group, whose samples are `members`."""
    best, worst = (members[np.argsort(sign * rewards[members], kind="stable")].tolist() for sign in (-1, 1))
    for chosen, rejected in list(zip(best, worst, strict=True))[:most]:
        if rewards[chosen] <= rewards[rejected]:
            return
        if not np.array_equal(_tokens_of(columns, chosen), _tokens_of(columns, rejected)):
            yield chosen, rejected


def _tokens_of(columns: SampleColumns, sample: int) -> npt.NDArray[Any]:
    tokens: npt.NDArray[Any] = columns.input_ids[columns.token_offsets[sample] : columns.token_offsets[sample + 1]]
    return tokens


def _without_loss(columns: SampleColumns) -> SampleColumns:
    """Return the shortest sample with loss weights of 0: a step on it has a gradient of zeros."""
    shortest = columns.take([int(np.argmin(np.diff(columns.token_offsets)))])
    role = {ROLE: np.full(1, CHOSEN, dtype=np.int64)}
    return evolve(shortest, loss_weight=np.zeros_like(shortest.loss_weight), sample_values={**shortest.sample_values, **role})


def _refuse_rewritten(columns: SampleColumns) -> None:
    _, first, samples = np.unique(columns.trajectory_ids, return_index=True, return_counts=True)
    if (samples > 1).any():
        attempt = int(np.argmax(samples))
        raise DataError(
            f"an attempt of group {int(columns.group_ids[first[attempt]])} is {int(samples[attempt])} samples, because its history was "
            "rewritten, and half of a pair is one",
            remedy="Train on attempts whose histories were appended to, or remove rl.pairs",
        )
