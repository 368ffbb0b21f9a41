"""Steps whose gradient is exactly 0: the first is logged with its reason, and a run that has too many in a row ends."""

import logging
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ties import equalize_ties
from skyrl_engine.errors import RolloutError
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.rollout.columns import Truncated

logger = logging.getLogger(__name__)


@frozen
class Reason:
    """The cause of a step without gradient, as a clause, and what helps, with the key that changes it."""

    cause: str
    remedy: str


@define
class IdleSteps:
    """Counts steps in a row whose gradient is exactly 0, in `count`; at `most` of them the run ends, None: never."""

    most: int | None = None
    count: int = 0
    _logged: bool = field(default=False, init=False)

    def look(self, step: int, metrics: Mapping[str, float], explain: Callable[[], Reason]) -> RolloutError | None:
        """Take a step's metrics. The session's first step without gradient is logged. Returns the error that ends the run, if it must end."""
        if metrics["grad_norm"] != 0:
            self.count = 0
            return None
        self.count += 1
        if not self._logged:
            self._logged = True
            reason = explain()
            logger.warning("the gradient of step %s is exactly 0: %s; %s", step, reason.cause, reason.remedy)
        if self.most is None or self.count < self.most:
            return None
        reason = explain()
        return RolloutError(
            f"the gradient was exactly 0 in {self.count} steps in a row, up to step {step}: {reason.cause}",
            remedy=f"{reason.remedy}; then resume. rl.max_idle_steps says how many such steps are too many",
        )


def explain_idle_rollouts(
    columns: SampleColumns,
    advantages: npt.NDArray[np.float32],
    objective: ObjectiveParts,
    *,
    truncated: Truncated,
    max_tokens: int,
    estimator: str | None,
    filtered: bool,
) -> Reason:
    """Say why nothing is learned from a step's rollouts.

    `columns` are the step's, `advantages` float32[A]. `estimator` names what estimated these, None where they are 0
    because there is no pair of attempts; `filtered` says that group filters are configured, which kept what they would have dropped.
    """
    _, first, attempt = np.unique(columns.trajectory_ids, return_index=True, return_inverse=True)
    cut = np.asarray(columns.sample_values["truncated"], dtype=np.bool_)[first]
    scored = columns.loss_weight != 0
    longer = 'raise rl.max_tokens, which counts all turns and observations of an attempt, or set rl.truncated = "keep"'
    if truncated != "keep" and len(cut) and cut.all():
        lost = "no loss" if truncated == "mask" else "no reward"
        cause = f'all {len(cut)} attempts ended at rl.max_tokens = {max_tokens}, and rl.truncated = "{truncated}" gives them {lost}'
        return Reason(cause, longer)
    if not scored.any():
        masked = f", and rl.truncated = {truncated!r} masks {int(cut.sum())} of {len(cut)} attempts" if truncated == "mask" else ""
        return Reason(f"no token of its attempts carries loss: nothing was sampled{masked}", f"See rl.stop_strings; {longer}")
    if not advantages[scored].any():
        counts = np.diff(columns.action_offsets)
        totals = np.zeros(len(first))
        np.add.at(totals, np.repeat(attempt, counts), columns.columns["rewards"])
        _, group = np.unique(columns.group_ids[first], return_inverse=True)
        equal = equalize_ties(totals, np.abs(totals), group)
        groups = int(group.max(initial=-1)) + 1
        if all(len(set(equal[group == number].tolist())) == 1 for number in range(groups)):
            common_reward = f", {equal[0]:g} in all of them" if len(set(equal.tolist())) == 1 else ""
            alone = " (of one attempt each)" if len(first) == groups else ""
            zeroed = (
                f", where {int(cut.sum())} cut attempts got none (rl.truncated)" if truncated == "zero_reward" and cut.any() else ""
            )
            filter_note = "; group filters kept them, as more than rollouts.max_drop_share were dropped" if filtered else ""
            return Reason(
                f"the attempts of each of its {groups} groups{alone} have the same reward{common_reward}{zeroed}{filter_note}",
                "look at the attempts (`skyrl-engine rollouts show`), choose tasks that the model solves now and then, or raise rl.group_size "
                "or rl.temperature",
            )
        if estimator is None:
            return Reason(
                "no group has two attempts with loss that differ in reward and in tokens",
                "look at the attempts (`skyrl-engine rollouts show`), see rl.truncated, or raise rl.group_size or rl.temperature",
            )
        return Reason(
            f"{estimator} estimates advantages of 0 from rewards that differ", "choose another estimator (table [advantage])"
        )
    return explain_idle_objective(columns, objective)


def explain_idle_objective(columns: SampleColumns, objective: ObjectiveParts) -> Reason:
    """Say why the objective has no gradient on these samples."""
    if not columns.loss_weight.any():
        return Reason(
            f"none of its {len(columns)} samples has a token that carries loss",
            "look at them (`skyrl-engine data preview`), and see data.loss_on",
        )
    parts = [*(part.label for part in objective.losses), *(part.label for part in objective.corrections)]
    return Reason(
        f"{' and '.join(parts)} {'has' if len(parts) == 1 else 'have'} no gradient at any token: everything is clipped, masked or at its best",
        "look at the metrics of the step, and loosen bounds in the tables [loss] and [[corrections]]",
    )


def warn_of_cuts(cut: int, attempts: int, max_tokens: int) -> None:
    """Log that most attempts of the first step ended at `rl.max_tokens`, where they did."""
    if 2 * cut > attempts:
        logger.warning(
            "rl.max_tokens = %s (--max-tokens) cut %s of the %s attempts of step 1: it counts all tokens after an attempt's prompt, those of "
            "all turns and of all observations; raise it, or see rl.truncated",
            max_tokens,
            cut,
            attempts,
        )
