"""Advantage: what every sampled token was worth, computed on the controller from the rewards of a whole batch. No torch."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
from attrs import Factory, define, field, frozen
from attrs.validators import in_, instance_of, optional

from skyrl_engine.contracts.values.outputs import Metric, refuse_other_metrics
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, offsets_of, segment_indices
from skyrl_engine.contracts.values.returned import describe_returned
from skyrl_engine.contracts.values.ties import equalize_ties
from skyrl_engine.errors import ResultError

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Groups = Literal["needed", "ignored"]
REWARD_PARTS: Final = "reward_parts"
"""The need of an estimator that reads `AdvantageBatch.parts`."""


@frozen(eq=False, slots=False)
class AdvantageBatch:
    """The rewards of one batch: N samples with A action tokens, R trajectories in groups, all ranks together.

    `rewards` float64[A] are per token, any penalty already in them; `loss_weight` uint8 or float32 [A] with `action_offsets` int64[N+1];
    `group_ids`, `trajectory_ids` int64[N]; `turn` int64[N] orders the samples of one trajectory; `finished` bool[N] is False for samples of
    trajectories that failed, which are not trained on and count in no baseline; `columns` float32[A] hold the estimator's needs by name.
    `parts` float64[N] by name are the summands of the reward of a sample's trajectory, such as those of several reward functions; NaN where it
    has none of that name. They are there for an estimator that needs `REWARD_PARTS`.

    A token is scored where its loss weight is not 0. Trajectories are numbered 0..R-1 in the order of their ids, groups likewise.
    """

    rewards: FloatArray
    loss_weight: AnyArray
    action_offsets: IntArray
    group_ids: IntArray
    trajectory_ids: IntArray
    turn: IntArray
    finished: BoolArray
    columns: Mapping[str, npt.NDArray[np.float32]] = Factory(dict)
    parts: Mapping[str, FloatArray] = Factory(dict)

    def __len__(self) -> int:
        return len(self.action_offsets) - 1

    @cached_property
    def sample_index(self) -> IntArray:
        """int64[A]: the sample of every action token."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.action_offsets))

    @cached_property
    def scored(self) -> BoolArray:
        """bool[A]: tokens that carry loss, of trajectories that finished."""
        return np.asarray((self.loss_weight != 0) & self.finished[self.sample_index])

    @cached_property
    def trajectory_index(self) -> IntArray:
        """int64[N]: the number of every sample's trajectory."""
        return np.unique(self.trajectory_ids, return_inverse=True)[1].astype(np.int64, copy=False)

    @cached_property
    def group_of_trajectory(self) -> IntArray:
        """int64[R]: the number of every trajectory's group."""
        return np.unique(self.group_ids, return_inverse=True)[1].astype(np.int64, copy=False)[self._first_samples]

    @cached_property
    def finished_trajectories(self) -> BoolArray:
        """bool[R]: trajectories that finished."""
        return self.finished[self._first_samples]

    @property
    def _first_samples(self) -> IntArray:
        return np.unique(self.trajectory_ids, return_index=True)[1]

    def trajectory_rewards(self) -> FloatArray:
        """float64[R]: the sum of each trajectory's rewards over all its samples, scored or not.

        Sums of finished trajectories of a group that are a tie (`contracts.values.ties`) are the same number.
        """
        count = int(self.trajectory_index.max(initial=-1)) + 1
        of_tokens = self.trajectory_index[self.sample_index]
        totals = np.bincount(of_tokens, weights=self.rewards, minlength=count).astype(np.float64, copy=False)
        largest = np.zeros(count)
        np.maximum.at(largest, of_tokens, np.abs(self.rewards))
        finished = self.finished_trajectories
        totals[finished] = equalize_ties(totals[finished], largest[finished], self.group_of_trajectory[finished])
        return totals

    def trajectory_parts(self) -> dict[str, FloatArray]:
        """float64[R] by name, in its order: the parts of each trajectory's reward; the reward itself, as `reward`, where there are no parts.

        Parts of finished trajectories of a group that are a tie are the same number.
        """
        if not self.parts:
            return {"reward": self.trajectory_rewards()}
        parts = {}
        for name in sorted(self.parts):
            values = self.parts[name][self._first_samples].astype(np.float64)
            here = self.finished_trajectories & ~np.isnan(values)
            values[here] = equalize_ties(values[here], np.abs(values[here]), self.group_of_trajectory[here])
            parts[name] = values
        return parts

    def spread(self, values: FloatArray) -> FloatArray:
        """float64[A]: every scored token gets its trajectory's entry of `values` [R]; all others get 0."""
        return np.where(self.scored, values[self.trajectory_index[self.sample_index]], 0.0)

    def walk(self) -> tuple[IntArray, IntArray]:
        """int64[S], int64[R+1]: the places of all scored tokens, trajectory by trajectory in the order of its turns, and their bounds."""
        in_turns = np.lexsort((self.turn, self.trajectory_index))
        tokens = segment_indices(self.action_offsets, in_turns)
        tokens = tokens[self.scored[tokens]]
        count = int(self.trajectory_index.max(initial=-1)) + 1
        lengths = np.bincount(self.trajectory_index[self.sample_index[tokens]], minlength=count)
        return tokens, offsets_of(lengths)


@frozen(eq=False)
class AdvantageOutput:
    """`advantages` and, where the estimator gives them, `returns` (what values learn), [A] each, in any float type; metrics by name."""

    advantages: AnyArray
    returns: AnyArray | None = None
    metrics: Mapping[str, Metric] = Factory(dict)


@frozen
class AdvantageClaims:
    """The facts that an estimator declares about itself: planning reads the first two, and the kit holds it to all of them.

    `groups` "needed" compares trajectories of one group, so that a group needs two; `returns` says that it gives returns. `whole_batch` says
    that groups reach each other, by nature. `shift` says that a constant added to all rewards of a group changes nothing; `scale` that
    rewards times c > 0 give advantages times c ("linear") or the same ones ("invariant"); `zero_sum` that the values of a group's
    trajectories add up to 0; `outcome` that a trajectory's tokens share one value, which follows from the rewards' sum.
    """

    groups: Groups = field(default="needed", validator=in_(("needed", "ignored")))
    returns: bool = field(default=False, validator=instance_of(bool))
    whole_batch: bool = field(default=False, validator=instance_of(bool))
    shift: bool = field(default=False, validator=instance_of(bool))
    scale: Literal["linear", "invariant"] | None = field(default=None, validator=optional(in_(("linear", "invariant"))))
    zero_sum: bool = field(default=False, validator=instance_of(bool))
    outcome: bool = field(default=False, validator=instance_of(bool))


class Advantage(Protocol):
    """The product of `skyrl_engine_make_advantage`. `needs` names the columns on the action axis that it reads in addition to rewards."""

    needs: tuple[str, ...]
    claims: AdvantageClaims

    def __call__(self, batch: AdvantageBatch) -> AdvantageOutput | AnyArray:
        """Advantages [A], 0 where a token is not scored. A pure function: it draws nothing and leaves the batch as it is."""


@define
class FunctionAdvantage:
    """An estimator made of a plain function and its config; the product of the `advantage` decorator."""

    name: str
    function: Callable[..., AdvantageOutput | AnyArray]
    config: object
    needs: tuple[str, ...]
    claims: AdvantageClaims

    def __call__(self, batch: AdvantageBatch) -> AdvantageOutput | AnyArray:
        return self.function(batch, self.config)


def as_advantage_output(label: str, result: AdvantageOutput | AnyArray, batch: AdvantageBatch, *, returns: bool) -> AdvantageOutput:
    """Take what an estimator returned as float32 [A] of finite numbers, 0 where no token is scored; `label` names it in errors.

    Float64 is rounded to float32 here, once. Raises ResultError for other shapes and types, for values that are not finite, for an
    advantage on a token that is not scored, where `returns` are claimed and missing, and for a metric of the engine's names.
    """
    output = result if isinstance(result, AdvantageOutput) else AdvantageOutput(result)
    advantages = _column(label, "advantages", output.advantages, batch)
    astray = (advantages != 0) & ~batch.scored
    if astray.any():
        place = int(np.argmax(astray))
        raise ResultError(
            f"{label} gave the advantage {advantages[place]:g} to action token {place}, which is not scored",
            remedy="Give 0 to tokens that the model did not sample: batch.spread, or np.where(batch.scored, values, 0)",
        )
    if returns and output.returns is None:
        raise ResultError(f"{label} claims returns and gave none", remedy="Return AdvantageOutput(advantages, returns)")
    returns_column = None if output.returns is None else _column(label, "returns", output.returns, batch)
    refuse_other_metrics(label, output.metrics)
    return AdvantageOutput(advantages, returns_column, output.metrics)


def _column(label: str, name: str, values: AnyArray, batch: AdvantageBatch) -> npt.NDArray[np.float32]:
    expected = batch.rewards.shape
    shape, dtype = getattr(values, "shape", None), getattr(values, "dtype", None)
    if not isinstance(values, np.ndarray) or shape != expected or dtype not in (np.float32, np.float64):
        got = describe_returned(values)
        raise ResultError(
            f"{label} returned {name} as {got} for {expected[0]} action tokens",
            remedy=f"Return a float NumPy array of shape [{expected[0]}], one value per action token",
        )
    column = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(column).all():
        place = int(np.argmin(np.isfinite(column)))
        raise ResultError(
            f"{label} returned {column[place]} among its {name}, at action token {place}",
            remedy="Guard divisions: a group may hold one trajectory, or equal rewards",
        )
    return column
