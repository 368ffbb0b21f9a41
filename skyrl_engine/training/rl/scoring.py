"""Which passes a step needs before it learns, decided from what the parts of the run read."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Literal

from attrs import frozen

from skyrl_engine.config.schema import RlConfig
from skyrl_engine.contracts.kinds.advantage import REWARD_PARTS, Advantage
from skyrl_engine.contracts.kinds.needs import DIVERGENCE, MODEL_SCORES, ROLE_NEED, model_score
from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.contracts.values.rollout_columns import ROLLOUT_STALENESS, list_further_columns, list_required_columns
from skyrl_engine.engine.capability import needs_of_reducer
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.objective.policy_metrics import OLD_LOGPROBS, ROLLOUT_LOGPROBS, Watched
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.training.reference import REFERENCE
from skyrl_engine.training.rl.entropy_ranks import ENTROPY_QUANTILE
from skyrl_engine.training.teacher import TEACHER

VALUES: Final = "old_values"
BOUND: Final[Mapping[str, str]] = {OLD_LOGPROBS: "logprobs"}
"""The policy as its own old one."""

_GIVEN: Final = (
    *(row.column for row in reversed(list_required_columns())),
    *("advantages", "returns", OLD_LOGPROBS, REFERENCE, TEACHER, VALUES, ENTROPY_QUANTILE),
)
"""Columns that every run has or that the trainer can provide; `returns` where the advantage gives them."""

_VALUES_OF_SAMPLES: Final = ("sample:environment", "sample:staleness", "sample:truncated", "sample:turn", ROLE_NEED)
"""Sample values: the number of their environment, the age of their policy in steps, whether their attempt was cut off, which of its samples
they are, and where pairs are trained on, which half of one."""

LogprobsAvailability = Literal["with_logprobs", "without_logprobs"]
"""True where rollouts that were recorded before hold the sampler's log-probabilities."""


@frozen
class ScoringPasses:
    """The passes of a step.

    `old` says where the old policy's log-probabilities come from, None where nobody reads them. `scores` are scores of the trained model before
    the first update, by the column that they become; `reference` and `teacher` say that these are scored.
    """

    old: Literal["current", "score", "rollout"] | None
    scores: Mapping[str, str]
    reference: bool
    teacher: bool

    @property
    def watch(self) -> frozenset[Watched]:
        """Metrics of the policy. Where the sampler's own log-probabilities are the old ones, its distance is measured from the present ones."""
        return frozenset({"policy", "present_gap"} if self.old == "rollout" else {"policy"})

    @property
    def bound(self) -> Mapping[str, str]:
        """Columns that the learning pass's own scores stand for."""
        return BOUND if self.old == "current" else {}


def plan_scoring_passes(
    config: RlConfig,
    objective: ObjectiveParts,
    advantage: BoundPlugin[Advantage] | None,
    *,
    recorded: LogprobsAvailability | None = None,
    reducer: BoundPlugin[Reducer] | None = None,
    of_rollouts: AbstractSet[str] = frozenset(),
) -> ScoringPasses:
    """Choose the passes of every step.

    `advantage` is None where pairs are trained on. `recorded` says what of the sampler was recorded, where nothing is sampled, and
    `of_rollouts` are the further columns that all environments, or the recording, give: those of a teacher's need no teacher on the ranks.

    Raises UnsupportedError for what a part needs and no pass gives, and for contradictions.
    """
    weighing = {} if reducer is None else needs_of_reducer(reducer)
    estimating = {} if advantage is None else {advantage.label: advantage.product.needs}
    _refuse_unknown({**objective.needs, **estimating, **weighing}, advantage, of_rollouts, stale=config.staleness > 0)
    if advantage is not None:
        _refuse_hidden_parts(config, advantage)
    if recorded == "without_logprobs":
        _refuse_sampler(config, {**objective.needs, **estimating})
    _refuse_two_penalties(config, objective)
    before_learning = tuple(name for needs in (*estimating.values(), *weighing.values()) for name in needs)
    early = {*before_learning, *(("ref_logprobs",) if config.kl is not None else ())}
    read = {*objective.columns, *early}
    old = _old(
        config,
        read=OLD_LOGPROBS in read or config.kl is not None,
        early=OLD_LOGPROBS in early,
        recorded=recorded,
        corrects=ROLLOUT_LOGPROBS in objective.columns,
    )
    scores = {
        **({OLD_LOGPROBS: "logprobs"} if old == "score" else {}),
        **({VALUES: "values"} if VALUES in read else {}),
        **({ENTROPY_QUANTILE: "entropy"} if ENTROPY_QUANTILE in read else {}),
    }
    return ScoringPasses(old, scores, REFERENCE in read, TEACHER in read - of_rollouts)


def _old(
    config: RlConfig, *, read: bool, early: bool, recorded: LogprobsAvailability | None, corrects: bool
) -> Literal["current", "score", "rollout"] | None:
    one_step = config.mini_batches * config.epochs == 1
    if not read:
        # after the first of several steps only a score from before them tells the sampler's distance from the model it sampled for
        return None if one_step else "score"
    if config.old == "auto" and recorded == "with_logprobs":
        # another policy sampled, which the model is at a distance from already
        return "rollout"
    if config.old == "auto" and config.staleness:
        # a correction reads the sampler's own; without one, the ratio to the policy that sampled is the correction
        return "score" if corrects else "rollout"
    if config.old == "auto":
        # the sampler's own log-probabilities would do for a penalty, but their last bits depend on what was sampled at the same time
        return "current" if one_step and not early and config.kl is None else "score"
    if config.old == "current" and (early or not one_step):
        why = "the advantage reads them before that pass" if early else "later optimizer steps of the batch need those of its first"
        raise UnsupportedError(
            f'rl.old = "current" takes the old log-probabilities of the training pass itself, and {why}',
            remedy='Set rl.old = "auto" or "score"',
        )
    return config.old


def _refuse_sampler(config: RlConfig, needs: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse what reads the sampler's log-probabilities, where they were not recorded; `needs` are those of every part, by its label."""
    readers = [label for label, names in needs.items() if ROLLOUT_LOGPROBS in names]
    readers += ['rl.old = "rollout"'] if config.old == "rollout" else []
    if readers:
        raise UnsupportedError(
            f"{readers[0]} reads the sampler's log-probabilities, and the rollouts of rl.rollouts hold none",
            remedy="Write them into the column logprobs, or train without that",
        )


def _refuse_hidden_parts(config: RlConfig, advantage: BoundPlugin[Advantage]) -> None:
    """Refuse what changes rewards and shows no part of them, where the advantage reads parts."""
    if REWARD_PARTS not in advantage.product.needs:
        return
    changes = {
        "[rl.kl]": config.kl is not None,
        "[rl.overlong]": config.overlong is not None,
        "rl.missing_eos_penalty": config.missing_eos_penalty is not None,
        'rl.truncated = "zero_reward"': config.truncated == "zero_reward",
    }
    for key, is_set in changes.items():
        if is_set:
            raise UnsupportedError(
                f"{advantage.label} reads the parts of rewards, which {key} does not change",
                remedy=f"Remove {key}, or choose an advantage of whole rewards, such as grpo",
            )


def _refuse_two_penalties(config: RlConfig, objective: ObjectiveParts) -> None:
    readers = [label for label, needs in objective.needs.items() if REFERENCE in needs]
    if config.kl is not None and readers:
        raise UnsupportedError(
            f"[rl.kl] takes the distance from the reference off the rewards, and {readers[0]} adds it to the loss: it would count twice",
            remedy=f"Remove [rl.kl], or {readers[0]}",
        )


def _refuse_unknown(
    needs_of: Mapping[str, tuple[str, ...]], advantage: BoundPlugin[Advantage] | None, of_rollouts: AbstractSet[str], *, stale: bool
) -> None:
    known = {*_GIVEN, *MODEL_SCORES, *_VALUES_OF_SAMPLES, *of_rollouts, *((ROLLOUT_STALENESS,) if stale else ())}
    may_be_given = {row.column: row.name for row in list_further_columns()}
    for label, needs in needs_of.items():
        for name in needs:
            if name == REWARD_PARTS and advantage is not None and label == advantage.label:
                continue
            if name not in known and name in may_be_given:
                raise UnsupportedError(
                    f"{label} needs the column {name!r}, which not all environments or rollouts of this run give",
                    remedy=f"Choose environments whose claims name the column {may_be_given[name]!r}, or another part",
                )
            if name not in known and model_score(name) != DIVERGENCE:
                raise UnsupportedError(
                    f"{label} needs the column {name!r}, which no rollout has",
                    remedy=f"Choose a part that reads some of {', '.join(_GIVEN)}",
                )
            if name == "returns" and advantage is not None and not advantage.product.claims.returns:
                raise UnsupportedError(
                    f"{label} needs returns, and {advantage.label} gives none", remedy='Set advantage.use = "gae"'
                )
