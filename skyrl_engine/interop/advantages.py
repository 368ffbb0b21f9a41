"""Advantages of plain NumPy arrays by an estimator of this engine, for a training loop of one's own. No torch is imported for it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.kinds.advantage import REWARD_PARTS, Advantage, AdvantageBatch, as_advantage_output
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.errors import DataError, UnsupportedError
from skyrl_engine.interop.selection import NO_OPTIONS, Options, select_plugin

if TYPE_CHECKING:
    from skyrl_engine.registry.bound_plugin import BoundPlugin

NO_COLUMNS: Mapping[str, Any] = {}


def compute_advantages(
    rewards: npt.ArrayLike,
    groups: npt.ArrayLike,
    advantage: object = "grpo",
    *,
    options: Options = NO_OPTIONS,
    lengths: npt.ArrayLike | None = None,
    columns: Mapping[str, npt.ArrayLike] = NO_COLUMNS,
) -> npt.NDArray[np.float32]:
    """Return the advantage of each of n attempts, float32[n], from their `rewards` [n] and their `groups` [n], any labels of their tasks.

    `advantage` is a name as in a configuration ("grpo", "rloo", "./mine.py:own") or the plugin itself, `options` are its own. With `lengths`
    int[n], attempts have tokens: `rewards` and the result are [sum of lengths], attempt after attempt, and so are `columns`, what the estimator
    reads beside rewards, such as `old_values` for `gae`.

    Raises DataError for arrays that do not fit and rewards that are not finite, UnsupportedError for an estimator that needs a column that is
    missing, parts of rewards, or other attempts in a group of one, PluginBrokenError where it fails, and what selecting a plugin raises.
    """
    from skyrl_engine.contracts.kinds.context import FactoryContext
    from skyrl_engine.registry.owner import blame
    from skyrl_engine.registry.resolve import Registry

    bound: BoundPlugin[Advantage] = select_plugin(Registry.discover(), "advantage", advantage, options).bind(
        "advantage", FactoryContext()
    )
    batch = _make_batch(rewards, groups, lengths, columns)
    _refuse_missing(bound, batch)
    with blame(bound.owner, "its call"):
        estimate = bound.product(batch)
    output = as_advantage_output(bound.label, estimate, batch, returns=bound.product.claims.returns)
    return np.asarray(output.advantages, dtype=np.float32)


def _make_batch(
    rewards: npt.ArrayLike, groups: npt.ArrayLike, lengths: npt.ArrayLike | None, columns: Mapping[str, npt.ArrayLike]
) -> AdvantageBatch:
    labels = np.asarray(groups)
    if labels.ndim != 1 or not len(labels):
        raise DataError(
            f"groups have the shape {list(labels.shape)}", remedy="Give one label per attempt, as a list or an array [n]"
        )
    count = len(labels)
    tokens = _read_lengths(lengths, count)
    total = int(tokens.sum())
    values = _read_numbers("rewards", rewards, total, np.float64)
    attempts = np.arange(count, dtype=np.int64)
    return AdvantageBatch(
        rewards=values,
        loss_weight=np.ones(total, dtype=np.uint8),
        action_offsets=offsets_of(tokens),
        group_ids=np.unique(labels, return_inverse=True)[1].astype(np.int64),
        trajectory_ids=attempts,
        turn=np.zeros(count, dtype=np.int64),
        finished=np.ones(count, dtype=np.bool_),
        columns={name: _read_numbers(name, own, total, np.float32) for name, own in columns.items()},
    )


def _read_lengths(lengths: npt.ArrayLike | None, count: int) -> npt.NDArray[np.int64]:
    if lengths is None:
        return np.ones(count, dtype=np.int64)
    tokens = np.asarray(lengths)
    if tokens.shape != (count,) or tokens.dtype.kind not in "iu" or (tokens < 1).any():
        raise DataError(
            f"lengths are {tokens.tolist()!s:.80} for {count} attempts", remedy="Give every attempt its number of tokens, 1 or more"
        )
    return tokens.astype(np.int64)


def _read_numbers(name: str, values: npt.ArrayLike, total: int, dtype: Any) -> Any:
    array = np.asarray(values)
    if array.shape != (total,) or array.dtype.kind not in "iufb":
        raise DataError(
            f"{name} are {array.dtype}{list(array.shape)} where {total} numbers are due",
            remedy="Give one number per attempt, or with lengths one per token",
        )
    wrong = ~np.isfinite(array)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise DataError(
            f"{name} have {array[place]} at place {place}", remedy="Leave out attempts that failed, or give them a reward"
        )
    return array.astype(dtype)


def _refuse_missing(bound: "BoundPlugin[Advantage]", batch: AdvantageBatch) -> None:
    product = bound.product
    if REWARD_PARTS in product.needs:
        raise UnsupportedError(
            f"{bound.label} reads the parts of rewards, and compute_advantages is given their sum",
            remedy="Choose an advantage of whole rewards, or train with it by this engine",
        )
    missing = [need for need in product.needs if need not in batch.columns]
    if missing:
        raise UnsupportedError(
            f"{bound.label} needs {', '.join(missing)}", remedy=f"Give columns={{{missing[0]!r}: [one number per token]}}"
        )
    unread = sorted(batch.columns.keys() - set(product.needs))
    if unread:
        raise UnsupportedError(f"{bound.label} does not read the column {unread[0]!r}", remedy="Leave it out")
    counts = np.bincount(batch.group_ids)
    if product.claims.groups == "needed" and counts.min() < 2:
        raise UnsupportedError(
            f"{bound.label} compares the attempts of a group, and one group has a single attempt",
            remedy="Leave it out, or choose an advantage without groups, such as reinforce_pp",
        )
