"""Samples as columns: flat NumPy values and offsets, validated once, never lists of Python ints.

N samples; sample i has T_i tokens of which the last A_i are actions (response tokens); A = sum of A_i.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import Factory, evolve, frozen

from skyrl_engine.contracts.values import ingest
from skyrl_engine.contracts.values.extras import EXPERT_ROUTES, OF_IMAGES, check_extras
from skyrl_engine.contracts.values.plan import SampleLengths
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Join, Ragged, RaggedView, join_fresh, take_segments
from skyrl_engine.contracts.values.wide_columns import check_wide_column
from skyrl_engine.errors import DataError

RESERVED_NAMES = frozenset(
    (
        *("input_ids", "attention_mask", "position_ids", "response_mask", "loss_weight"),
        *(EXPERT_ROUTES, "router_padding_mask", *OF_IMAGES),
    )
)
"""Fields that every collator makes; no column may take their names."""

REWARDS = "rewards"
"""Name of the one column that may be float64: sums of rewards are compared with each other."""


@frozen(eq=False)
class SampleColumns:
    """A batch of samples at the source.

    `input_ids` int32 or int64, flat over tokens, with `token_offsets` int64[N+1]; `loss_weight` uint8 (0/1) or float32 on the action axis,
    with `action_offsets` int64[N+1]; `columns` by name (rewards, advantages, old_logprobs, ... : an open set), float32[A], or [A, k] of k
    numbers per token: float32, or int64 token ids. `rewards` may be float64, which estimators of advantages read: ranks get float32;
    `sample_values` arrays [N] by name; `sample_ids`, `group_ids`, `unit_ids` int64[N] (samples of one unit stay in one micro-batch);
    `trajectory_ids` int64[N] name the attempt that a sample is a stretch of (each its own, unless it is said);
    `extras` ragged per sample (expert routes, images; `contracts.extras` says what each holds), which choosing samples does not copy.

    Position 0 of a sample has no predecessor and is never scored: its loss weight is 0 from construction on, and
    `unscored_first_tokens` counts the weights that were cleared for it. `grouped` says whether group ids were given; without them every
    sample is a group of its own. Build one with `create` or a `from_` constructor, which validate.
    """

    input_ids: AnyArray
    token_offsets: IntArray
    action_offsets: IntArray
    loss_weight: AnyArray
    columns: Mapping[str, AnyArray]
    sample_values: Mapping[str, AnyArray]
    sample_ids: IntArray
    group_ids: IntArray
    unit_ids: IntArray
    extras: Mapping[str, RaggedView] = Factory(dict)
    unscored_first_tokens: int = 0
    grouped: bool = False
    trajectory_ids: IntArray = Factory(lambda columns: np.arange(len(columns), dtype=np.int64), takes_self=True)

    def __len__(self) -> int:
        return len(self.token_offsets) - 1

    @classmethod
    def create(
        cls,
        *,
        input_ids: AnyArray,
        token_offsets: IntArray,
        action_offsets: IntArray,
        loss_weight: AnyArray | None = None,
        columns: Mapping[str, AnyArray] | None = None,
        sample_values: Mapping[str, AnyArray] | None = None,
        sample_ids: IntArray | None = None,
        group_ids: IntArray | None = None,
        unit_ids: IntArray | None = None,
        trajectory_ids: IntArray | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> "SampleColumns":
        """Validate flat arrays and make columns of them; arrays that already fit are not copied.

        Ids (lists will do) default to 0..N-1, every sample its own group and unit; loss weights to 1 on every action. `extras` are flat
        (`Ragged`), and those of `contracts.extras` may be one nested list, array or tensor per sample.
        Raises DataError naming the first offending sample.
        """
        _check_offsets("token_offsets", token_offsets, len(input_ids))
        count = len(token_offsets) - 1
        if len(action_offsets) - 1 != count:
            raise DataError(
                f"action_offsets describe {len(action_offsets) - 1} samples, token_offsets {count}",
                remedy="Give every sample both its tokens and its number of response tokens",
            )
        actions_total = int(action_offsets[-1])
        _check_offsets("action_offsets", action_offsets, actions_total)
        token_ids = _check_token_ids(input_ids, token_offsets)
        lengths, actions = np.diff(token_offsets), np.diff(action_offsets)
        _refuse_first(lengths < 1, "sample {sample} has no token", "Drop empty samples before training")
        _refuse_first(
            actions > lengths,
            "sample {sample} has more response tokens than tokens",
            "Count only tokens that are in input_ids as response tokens",
        )
        weight = _check_loss_weight(loss_weight, actions_total, action_offsets)
        weight, cleared = _without_first_tokens(weight, lengths, actions, action_offsets)
        own_ids = np.arange(count, dtype=np.int64)
        ids = own_ids if sample_ids is None else _check_ids("sample_ids", sample_ids, count)
        return cls(
            input_ids=token_ids,
            token_offsets=token_offsets,
            action_offsets=action_offsets,
            loss_weight=weight,
            columns={name: _check_column(name, values, actions_total) for name, values in (columns or {}).items()},
            sample_values={name: _per_sample(name, values, count) for name, values in (sample_values or {}).items()},
            sample_ids=ids,
            group_ids=own_ids if group_ids is None else _check_ids("group_ids", group_ids, count),
            unit_ids=own_ids if unit_ids is None else _check_ids("unit_ids", unit_ids, count),
            extras=check_extras(extras or {}, lengths),
            unscored_first_tokens=cleared,
            grouped=group_ids is not None,
            trajectory_ids=own_ids if trajectory_ids is None else _check_ids("trajectory_ids", trajectory_ids, count),
        )

    @classmethod
    def from_lists(
        cls,
        *,
        input_ids: ingest.Rows,
        num_actions: Sequence[int] | None = None,
        loss_mask: ingest.Rows | None = None,
        columns: Mapping[str, ingest.Rows] | None = None,
        routes: ingest.Rows | None = None,
        reader: ingest.ListReader | None = None,
        **per_sample: Any,
    ) -> "SampleColumns":
        """Columns of a supervised batch: one list, NumPy array or torch tensor per sample.

        The last `num_actions[i]` of `input_ids[i]` are the response; `loss_mask[i]` and every row of `columns` hold one number per
        response token; a column may hold a list of k numbers per token, which are token ids where all are integers of 0 or more. Without
        `num_actions` the mask's length says it, without both every token is response. `routes[i]` are the experts
        [captured tokens, layers, topk] of a sample's first tokens, and become the extra `expert_routes`. `per_sample` takes `sample_ids`,
        `group_ids`, `unit_ids`, `trajectory_ids`, `sample_values` and `extras` as `create` does. `reader` reads plain lists, into the
        same values as Python does; None: the one that an installed distribution offers (`skyrl-engine-collators` does). Raises DataError
        naming sample and field.
        """
        flat = ingest.from_lists(
            input_ids=input_ids, num_actions=num_actions, loss_mask=loss_mask, columns=columns or {}, reader=reader
        )
        return cls.create(**{**flat, **_with_routes(per_sample, routes)})

    @classmethod
    def from_rollouts(
        cls,
        *,
        prompts: ingest.Rows,
        responses: ingest.Rows,
        rewards: ingest.Rows | None = None,
        loss_masks: ingest.Rows | None = None,
        logprobs: ingest.Rows | None = None,
        columns: Mapping[str, ingest.Rows] | None = None,
        routes: ingest.Rows | None = None,
        reader: ingest.ListReader | None = None,
        **per_sample: Any,
    ) -> "SampleColumns":
        """Columns of a reinforcement-learning batch: one list, NumPy array or torch tensor per sample.

        `rewards`, `loss_masks`, `logprobs` and every row of `columns` hold one number per response token. Rewards become the column
        `rewards`, the sampler's log-probabilities the column `rollout_logprobs`; None and absent are the same. `routes`, `per_sample`
        and `reader` as in `from_lists`. Raises DataError naming sample and field.
        """
        named = {name: rows for name, rows in (("rewards", rewards), ("rollout_logprobs", logprobs)) if rows is not None}
        further = columns or {}
        for name in named.keys() & further.keys():
            raise DataError(f"column {name!r} is given twice, by its own argument and in columns", remedy="Give it once")
        flat = ingest.from_rollouts(
            prompts=prompts, responses=responses, loss_masks=loss_masks, columns={**named, **further}, reader=reader
        )
        return cls.create(**{**flat, **_with_routes(per_sample, routes)})

    @classmethod
    def from_arrow(
        cls, table: Any, *, columns: Sequence[str] = (), sample_values: Sequence[str] = (), **per_sample: Any
    ) -> "SampleColumns":
        """Columns of a pyarrow Table, RecordBatch, mapping of arrays by name, or list array (`input_ids` alone).

        Reads the list column `input_ids`, and where there are any `loss_mask` (list), `num_actions`, `sample_ids`, `group_ids`,
        `unit_ids`, and the extras of `contracts.extras` (nested lists, null for none); `columns` names further list columns on the action
        axis, `sample_values` columns of one value per sample. A column of one chunk with the right type is not copied: the result views
        Arrow's memory, read-only. Raises DataError naming sample and field.
        """
        from skyrl_engine.contracts.values import arrow  # needed by those alone who have Arrow data

        flat = arrow.from_arrow(table, columns=columns, sample_values=sample_values)
        extras = {**flat["extras"], **(per_sample.get("extras") or {})}
        return cls.create(**{**flat, **per_sample, "extras": extras})

    @property
    def lengths(self) -> SampleLengths:
        """The lengths and ids that planning may look at."""
        return SampleLengths(
            tokens=self.token_offsets[1:] - self.token_offsets[:-1],
            actions=self.action_offsets[1:] - self.action_offsets[:-1],
            sample_ids=self.sample_ids,
            group_ids=self.group_ids,
            unit_ids=self.unit_ids,
            trajectory_ids=self.trajectory_ids,
        )

    def with_columns(self, columns: Mapping[str, AnyArray | Ragged]) -> "SampleColumns":
        """The same samples with these columns in addition to, or in the place of, those there are.

        A column is float32[A] (`rewards` also float64) or [A, k] on the action axis, or a `Ragged` of such values with one row of a
        sample's response tokens per sample, in order.
        Raises DataError for other shapes and types.
        """
        actions = int(self.action_offsets[-1])
        extended = dict(self.columns)
        for name, values in columns.items():
            if isinstance(values, Ragged) and not np.array_equal(values.offsets, self.action_offsets):
                raise DataError(
                    f"column {name!r} has other numbers of response tokens than the samples",
                    remedy="Give one value per response token of every sample, in the order of the samples",
                )
            extended[name] = _check_column(name, values.values if isinstance(values, Ragged) else values, actions)
        return evolve(self, columns=extended)

    def take(self, samples: npt.ArrayLike, join: Join = join_fresh) -> "SampleColumns":
        """The chosen samples (positions) in the chosen order, copied but for `extras`; already valid, so not validated again.

        Long samples are copied into the memory that `join` gives.
        """
        chosen = np.asarray(samples, dtype=np.int64)
        (input_ids,), token_offsets = take_segments([self.input_ids], self.token_offsets, chosen, join)
        on_actions = [self.loss_weight, *self.columns.values()]
        (weight, *columns), action_offsets = take_segments(on_actions, self.action_offsets, chosen, join)
        return SampleColumns(
            input_ids=input_ids,
            token_offsets=token_offsets,
            action_offsets=action_offsets,
            loss_weight=weight,
            columns=dict(zip(self.columns, columns, strict=True)),
            sample_values={name: values[chosen] for name, values in self.sample_values.items()},
            sample_ids=self.sample_ids[chosen],
            group_ids=self.group_ids[chosen],
            unit_ids=self.unit_ids[chosen],
            extras={name: view.take(chosen) for name, view in self.extras.items()},
            grouped=self.grouped,
            trajectory_ids=self.trajectory_ids[chosen],
        )


def _with_routes(per_sample: Mapping[str, Any], routes: ingest.Rows | None) -> Mapping[str, Any]:
    if routes is None:
        return per_sample
    extras = per_sample.get("extras") or {}
    if EXPERT_ROUTES in extras:
        raise DataError("expert routes are given twice, by their own argument and in extras", remedy="Give them once")
    return {**per_sample, "extras": {**extras, EXPERT_ROUTES: routes}}


def _check_offsets(name: str, offsets: IntArray, total: int) -> None:
    if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 1:
        raise DataError(f"{name} must be int64[N+1], not {offsets.dtype}{list(offsets.shape)}", remedy="Pass int64 offsets")
    if offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
        raise DataError(
            f"{name} must rise from 0 to {total}, the number of values; it goes from {offsets[0]} to {offsets[-1]}",
            remedy="Build offsets as the running sum of the samples' lengths",
        )


def _refuse_first(wrong: npt.NDArray[np.bool_], cause: str, remedy: str) -> None:
    """Raise for the first sample marked wrong; `cause` may name it as {sample}."""
    if wrong.any():
        raise DataError(cause.format(sample=int(np.argmax(wrong))), remedy=remedy)


def _check_token_ids(input_ids: AnyArray, token_offsets: IntArray) -> AnyArray:
    if input_ids.dtype not in (np.int32, np.int64):
        raise DataError(
            f"input_ids must be int32 or int64, not {input_ids.dtype}", remedy="Pass the tokenizer's integer ids unchanged"
        )
    negative = input_ids < 0
    if negative.any():
        place = int(np.argmax(negative))
        sample = int(np.searchsorted(token_offsets, place, side="right")) - 1
        raise DataError(
            f"sample {sample} has the negative token id {int(input_ids[place])} at position {place - int(token_offsets[sample])}",
            remedy="Pass real token ids; say what carries no loss with loss_weight, not with -100",
        )
    return np.ascontiguousarray(input_ids)


def _check_loss_weight(loss_weight: AnyArray | None, total: int, action_offsets: IntArray) -> AnyArray:
    if loss_weight is None:
        return np.ones(total, dtype=np.uint8)
    if loss_weight.shape != (total,):
        raise DataError(
            f"loss_weight has shape {list(loss_weight.shape)} where the samples have {total} response tokens",
            remedy="Give one weight per response token",
        )
    if loss_weight.dtype == np.bool_:
        return loss_weight.astype(np.uint8)
    if loss_weight.dtype not in (np.uint8, np.float32):
        raise DataError(
            f"loss_weight must be uint8 (0 and 1) or float32, not {loss_weight.dtype}", remedy="Cast the weights before the call"
        )
    wrong = loss_weight > 1 if loss_weight.dtype == np.uint8 else ~np.isfinite(loss_weight)
    if wrong.any():
        place = int(np.argmax(wrong))
        sample = int(np.searchsorted(action_offsets, place, side="right")) - 1
        raise DataError(
            f"sample {sample} has the loss weight {loss_weight[place]} at response token {place - int(action_offsets[sample])}",
            remedy="Use 0 and 1 as uint8, or finite numbers as float32",
        )
    return np.ascontiguousarray(loss_weight)


def _without_first_tokens(weight: AnyArray, lengths: IntArray, actions: IntArray, action_offsets: IntArray) -> tuple[AnyArray, int]:
    """The weights with position 0 of every sample at 0, and how many were not 0 before."""
    places = action_offsets[:-1][lengths == actions]  # the response starts at position 0
    first = weight[places]
    if first.view(np.uint8).any():  # any bit: -0.0 becomes 0 as well
        weight = weight.copy()
        weight[places] = 0
    return weight, int(np.count_nonzero(first))


def _check_ids(name: str, ids: AnyArray, count: int) -> IntArray:
    ids = np.asarray(ids)
    if ids.shape != (count,) or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"{name} must be {count} integers, not {ids.dtype}{list(ids.shape)}", remedy="Give one id per sample")
    if name == "sample_ids":
        _refuse_first(ids < 0, "sample {sample} has a negative id; those mark padding", "Number samples from 0")
        _refuse_duplicates(ids)
    return ids.astype(np.int64, copy=False)


def _refuse_duplicates(ids: IntArray) -> None:
    values, counts = np.unique(ids, return_counts=True)
    repeated = values[counts > 1]
    if len(repeated):
        raise DataError(f"sample ids occur more than once: {repeated[:5].tolist()}", remedy="Give every sample its own id")


def _check_column(name: str, values: AnyArray, total: int) -> AnyArray:
    if name in RESERVED_NAMES:
        raise DataError(f"a column cannot be called {name!r}; collators make a field of that name", remedy="Rename the column")
    if values.ndim == 2:
        return check_wide_column(name, values, total)
    if values.shape != (total,):
        raise DataError(
            f"column {name!r} has shape {list(values.shape)} where the samples have {total} response tokens",
            remedy="Give one value per response token",
        )
    if values.dtype != np.float32 and not (name == REWARDS and values.dtype == np.float64):
        raise DataError(f"column {name!r} must be float32, not {values.dtype}", remedy="Cast it before the call")
    return np.ascontiguousarray(values)


def _per_sample(name: str, values: AnyArray, count: int) -> AnyArray:
    if len(values) != count:
        raise DataError(f"{name!r} has {len(values)} entries for {count} samples", remedy="Give one entry per sample")
    return values
