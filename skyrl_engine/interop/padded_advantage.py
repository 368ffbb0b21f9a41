"""`padded_advantage`: use another engine's estimator of advantages, which takes padded rewards and a mask, unchanged."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from attrs import define, frozen

from skyrl_engine import advantage
from skyrl_engine.contracts import AdvantageBatch, AdvantageClaims, AdvantageOutput
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.errors import ContractError
from skyrl_engine.hooks.decorators import AdvantagePlugin
from skyrl_engine.interop.arguments import OPTION, match_meanings
from skyrl_engine.interop.options import options_class

if TYPE_CHECKING:
    import torch

REWARDS, MASK, GROUPS, CONFIG, VALUES = "rewards", "mask", "groups", "config", "old_values"

NAMES = {
    REWARDS: ("token_level_rewards", "token_rewards", "rewards"),
    MASK: ("response_mask", "eos_mask", "action_mask", "loss_mask", "mask"),
    GROUPS: ("index", "uid", "group_ids"),
    CONFIG: ("config", "cfg"),
    VALUES: ("values", "old_values"),
}
"""Known names of arguments by their meaning, in verl and SkyRL."""


def padded_advantage(
    function: Callable[..., Any],
    *,
    config: type[Any] | Mapping[str, Any] | None = None,
    arguments: Mapping[str, str] | None = None,
    claims: AdvantageClaims | None = None,
    name: str | None = None,
) -> AdvantagePlugin:
    """Make an advantage plugin of `function(token_level_rewards, response_mask, index, ...) -> (advantages, returns)`.

    The function is called once per batch, with a row per trajectory that finished: rewards [R, T] float64, the mask [R, T] float64 of scored
    tokens, the numbers of groups as a NumPy array [R], and values [R, T] where it takes them; T is that of the longest. A reward at a token
    that is not scored stands at the scored one before it. It returns advantages [R, T], alone or first in a tuple, whose second are returns.

    `config` is an attrs class of options, or a mapping of options to defaults; an argument with an option's name takes that option, one
    named `config` takes all. `arguments` gives the meaning of arguments whose names are unknown: "rewards", "mask", "groups" or
    "old_values". `claims` are as in `skyrl_engine.advantage`; where they say `outcome`, all of a trajectory's reward stands at its last scored
    token. Raises TypeError for arguments that cannot be matched.
    """
    called = name or str(getattr(function, "__name__", type(function).__name__))
    schema: type[Any] | None = options_class(f"{called}_options", config) if isinstance(config, Mapping) else config
    options = () if schema is None else tuple(field.name for field in attrs.fields(schema))
    matched = match_meanings(called, function, arguments or {}, options, NAMES)
    for meaning in (REWARDS, MASK):
        if meaning not in matched.values():
            raise TypeError(f"{called} takes no {meaning} ({', '.join(NAMES[meaning])})")
    own = AdvantageClaims() if claims is None else claims
    needs = ("old_values",) if VALUES in matched.values() else ()
    return advantage(needs=needs, config=schema, claims=own)(PaddedAdvantage(called, function, matched, own.outcome, own.returns))


@frozen(eq=False)
class _Rows:
    """Finished trajectories as rows: `trajectories` int64[R], and the row and column of each of the S scored tokens at `tokens` int64[S]."""

    trajectories: IntArray
    tokens: IntArray
    row: IntArray
    column: IntArray
    width: int

    @classmethod
    def of(cls, batch: AdvantageBatch) -> "_Rows":
        finished = np.flatnonzero(batch.finished_trajectories)
        tokens, bounds = batch.walk()
        lengths = np.diff(bounds)
        row_of = np.full(len(lengths), -1, dtype=np.int64)
        row_of[finished] = np.arange(len(finished))
        column = np.arange(len(tokens)) - np.repeat(bounds[:-1], lengths)
        return cls(finished, tokens, np.repeat(row_of, lengths), column, max(1, int(lengths.max(initial=0))))

    def pad(self, values: np.ndarray) -> np.ndarray:
        """Return `values` [S] at their places in float64[R, T]."""
        padded = np.zeros((len(self.trajectories), self.width))
        padded[self.row, self.column] = values
        return padded


@define(eq=False)
class PaddedAdvantage:
    """The function that `skyrl_engine.advantage` decorates, made of another engine's estimator."""

    __name__: str
    function: Callable[..., Any]
    arguments: Mapping[str, str]
    outcome: bool
    returns: bool

    def __call__(self, batch: AdvantageBatch, config: Any) -> AdvantageOutput:
        """Return advantages [A], and returns where the function gives them. Raises ContractError for results of another form."""
        import torch

        rows = _Rows.of(batch)
        nothing = np.zeros(len(batch.rewards))
        if not len(rows.trajectories):
            return AdvantageOutput(nothing, nothing.copy() if self.returns else None)
        tensors: dict[str, Any] = {
            REWARDS: torch.from_numpy(self._place_rewards(batch, rows)),
            MASK: torch.from_numpy(rows.pad(np.ones(len(rows.tokens)))),
            GROUPS: batch.group_of_trajectory[rows.trajectories].astype(object),
            CONFIG: config,
        }
        if VALUES in self.arguments.values():
            tensors[VALUES] = torch.from_numpy(rows.pad(batch.columns["old_values"][rows.tokens].astype(np.float64)))
        keywords = {
            argument: getattr(config, argument) if meaning.startswith(OPTION) else tensors[meaning]
            for argument, meaning in self.arguments.items()
        }
        result = self.function(**keywords)
        padded = result if isinstance(result, tuple) else (result,)
        advantages, *others = (self._flatten(each, batch, rows) for each in padded[:2])
        return AdvantageOutput(advantages, others[0] if others else None)

    def _place_rewards(self, batch: AdvantageBatch, rows: _Rows) -> np.ndarray:
        """Return float64[R, T]: every reward of a trajectory, at its own token or at the scored one before it."""
        lengths = np.bincount(rows.row, minlength=len(rows.trajectories))
        totals = batch.trajectory_rewards()[rows.trajectories]
        placed = np.zeros((len(rows.trajectories), rows.width))
        if not self.outcome:
            placed[rows.row, rows.column] = batch.rewards[rows.tokens]
            row_of = np.full(len(batch.finished_trajectories), -1, dtype=np.int64)
            row_of[rows.trajectories] = np.arange(len(rows.trajectories))
            own = row_of[batch.trajectory_index[batch.sample_index]]
            in_turns = np.lexsort((batch.turn[batch.sample_index], own))
            scored = batch.scored[in_turns]
            before = np.cumsum(scored) - np.concatenate([[0], np.cumsum(lengths)])[own[in_turns]]
            astray = ~scored & (own[in_turns] >= 0)
            places = own[in_turns][astray], np.maximum(before[astray] - 1, 0)
            np.add.at(placed, places, batch.rewards[in_turns][astray])
            return placed
        placed[np.arange(len(totals)), np.maximum(lengths - 1, 0)] = totals
        return placed

    def _flatten(self, value: "torch.Tensor", batch: AdvantageBatch, rows: _Rows) -> np.ndarray:
        shape = (len(rows.trajectories), rows.width)
        if tuple(getattr(value, "shape", ())) != shape:
            raise ContractError(
                f"{self.__name__} returns {tuple(getattr(value, 'shape', ()))}, where {shape}, trajectories x tokens, is due",
                remedy="Let it return advantages, or (advantages, returns), of the shape of its rewards",
            )
        flat = np.zeros(len(batch.rewards))
        flat[rows.tokens] = value.detach().double().numpy()[rows.row, rows.column]
        return flat
