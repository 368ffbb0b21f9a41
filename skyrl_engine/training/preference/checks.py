"""Checks of a run on preferences: of the configuration, of the parts that learn, and of the data under KTO's baseline."""

from typing import Final

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.needs import ROLE_NEED
from skyrl_engine.errors import ConfigError, Problem, UnsupportedError
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.objective.policy_metrics import scores_for
from skyrl_engine.training.preference.baseline import refuse_single_prompts
from skyrl_engine.training.reference import REFERENCE, plan_reference, refuse_dropout, refuse_unread_reference
from skyrl_engine.training.sft.checks import ConfigCheck, DataDraft, DraftCheck
from skyrl_engine.training.sft.order import SampleOrder
from skyrl_engine.training.sft.prepare import PreparedRun

BASELINE: Final = "kl_baseline"
"""The column of KTO's baseline, which the trainer computes for every mini-batch."""

GIVEN: Final = frozenset((REFERENCE, BASELINE))
"""Columns that the trainer provides."""


def reads_reference(objective: ObjectiveParts) -> bool:
    """Say whether a part of the loss compares with a reference; KTO's baseline does."""
    return not {REFERENCE, BASELINE}.isdisjoint(objective.columns)


def refuse_precomputed_moving_reference(resolved: ResolvedConfig) -> None:
    """Raise ConfigError for scores of a reference that follows training, computed before it."""
    table = resolved.config.reference
    if table.refresh_every is not None and table.precompute:
        raise ConfigError(
            [
                Problem(
                    "reference.refresh_every",
                    "changes the reference, and reference.precompute keeps the scores of the first one",
                    "Remove one of them",
                )
            ]
        )


def refuse_no_preference(draft: DataDraft) -> None:
    """Raise UnsupportedError for losses none of which tells chosen from rejected answers."""
    objective = draft.assembly.objective
    if not any(ROLE_NEED in part.product.needs or part.on is not None for part in objective.losses):
        raise UnsupportedError(
            f"{objective.main.label} does not tell chosen from rejected answers, so it would learn both alike",
            remedy='Set loss.use = "dpo", or another loss of preferences, or train on single answers: trainer = "sft"',
        )


def refuse_single_pair_baseline(draft: DataDraft) -> None:
    """Raise ConfigError for KTO's baseline over mini-batches of one sample."""
    size = draft.resolved.config.training.batch_size
    if BASELINE in draft.assembly.objective.columns and size < 2 and not draft.resolved.config.reference.precompute:
        raise ConfigError(
            [
                Problem(
                    "training.batch_size",
                    f"is {size}, and the baseline compares answers of several prompts of a mini-batch",
                    "Set training.batch_size to 2 or more",
                )
            ]
        )


def refuse_unknown_logits(draft: DataDraft) -> None:
    """Raise UnsupportedError for metrics of the vocabulary with a backend that lacks the scores they are made of."""
    assembly = draft.assembly
    if not draft.resolved.config.preference.vocabulary_metrics:
        return
    if lacking := sorted(scores_for({"entropy", "logits"}) - {"entropy"} - assembly.description.capabilities):
        raise UnsupportedError(
            f"preference.vocabulary_metrics is true, and the backend does not declare {' and '.join(map(repr, lacking))}",
            remedy="Set preference.vocabulary_metrics = false, or choose another backend, such as fsdp",
        )


def check_reference(draft: DataDraft) -> None:
    """Refuse a reference that cannot be, and one that nothing reads. Raises as `plan_reference` and `refuse_unread_reference` do."""
    if reads_reference(draft.assembly.objective):
        refuse_dropout(draft.files.facts, "the reference is scored without it: the first log-ratios would not be 0")
        plan_reference(draft.resolved, draft.assembly, draft.files)
    else:
        refuse_unread_reference(draft.resolved)


def check_baseline(run: PreparedRun) -> None:
    """Raise DataError where KTO's baseline would find no answer to another prompt in some mini-batch or, precomputed, in the data."""
    if BASELINE not in run.assembly.objective.columns or run.resolved.assumed.lengths is not None:
        return
    if run.stream is not None:
        raise UnsupportedError(
            "a part of the loss reads KTO's baseline, which needs answers to several prompts in every mini-batch, and what "
            "mini-batches a stream gives is not known before it is read",
            remedy="Set data.streaming = false, or choose another loss",
        )
    order, evaluated = run.order, run.evaluation
    # precomputed, answers are mismatched over the whole dataset
    apart = not run.resolved.config.reference.precompute
    refuse_single_prompts(run.train.columns, order, run.total_steps if apart else 0, name=run.train.name)
    if evaluated is not None:
        held_out = SampleOrder.of(evaluated.columns, batch_size=order.batch_size, shuffle=False)
        refuse_single_prompts(evaluated.columns, held_out, held_out.steps_per_epoch if apart else 0, name=evaluated.name)


BEFORE_BUILDING: Final[tuple[ConfigCheck, ...]] = (refuse_precomputed_moving_reference,)

AFTER_BUILDING: Final[tuple[DraftCheck, ...]] = (
    refuse_no_preference,
    refuse_single_pair_baseline,
    refuse_unknown_logits,
    check_reference,
)
