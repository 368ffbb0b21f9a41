"""The teacher of a run: a frozen model on the ranks that scores the student's rows, or that a loss compares the student with."""

import logging
from collections.abc import Mapping
from typing import Final

import numpy as np

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import TeacherConfig
from skyrl_engine.contracts.kinds.needs import TEACHER_MODEL, asks_a_teacher, is_aligned
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.objective.policy_metrics import OLD_LOGPROBS, ROLLOUT_LOGPROBS
from skyrl_engine.training.frozen_model_compat import plan_frozen_model
from skyrl_engine.training.teacher_endpoint import EndpointTeacher, make_decode

_FEW_ALIGNED: Final = 0.1
"""A share of aligned tokens below which a person is told."""

logger = logging.getLogger(__name__)

TEACHER: Final = "teacher_logprobs"
"""The column of its log-probabilities of the tokens that the student is trained on."""


def plan_teacher(
    resolved: ResolvedConfig, assembly: Assembly, files: ModelFiles, *, read: bool, longest: int, shorter: str
) -> FrozenModel | None:
    """Choose the frozen model that `[teacher]` names; None where there is none, and in trainers that have no such table.

    `read` says that a part of the run reads its column; `longest` counts the tokens of the longest row, and `shorter` says how to make rows
    shorter. Raises UnsupportedError for a teacher that nobody reads or that nobody named, for another vocabulary, and for what the backend does
    not allow; ModelError for a model that cannot be used.
    """
    table = resolved.config.teacher if resolved.config.has("teacher") else None
    compared = asks_a_teacher(assembly.objective.scores)
    if table is not None and table.url is not None:
        _refuse_unasked_endpoint(table, read=read, compared=compared)
        return None
    if table is None or table.path is None:
        if read or compared:
            use = "compares the model with a teacher" if compared else f"reads {TEACHER}"
            raise UnsupportedError(
                f"a part of the run {use}, and there is no teacher",
                remedy="Choose parts that do without" if table is None else "Set teacher.path, or choose parts that do without",
            )
        return None
    if not read and not compared:
        raise UnsupportedError(
            f"teacher.path is set, and no part of the run reads {TEACHER} or compares the model with the teacher: nothing would be learned "
            "from it",
            remedy='Set loss.use = "divergence", add the loss term teacher_kl, set rl.preset = "on_policy_distill" in trainer rl, or remove '
            "teacher.path",
        )
    own_tokens = any(map(is_aligned, assembly.objective.scores))
    if own_tokens:
        _refuse_mixed_tokens(assembly, files, read=read)
    planned, teacher_files = plan_frozen_model(
        "the teacher",
        TEACHER_MODEL,
        resolved,
        assembly,
        files,
        path=table.path,
        revision=table.revision,
        own_tokens=own_tokens,
    )
    positions = teacher_files.facts.extended_length
    if positions is not None and longest > positions:
        raise UnsupportedError(
            f"rows may have up to {longest:,} tokens, and the teacher {table.path} has {positions:,} positions", remedy=shorter
        )
    if compared and not own_tokens:
        _refuse_other_width(teacher_files, files)
    return planned


def plan_endpoint(resolved: ResolvedConfig, files: ModelFiles) -> EndpointTeacher | None:
    """Choose the server that `[teacher]` names; None where it names none. Raises UnsupportedError where the environment lacks its key."""
    table = resolved.config.teacher if resolved.config.has("teacher") else None
    if table is None or table.url is None:
        return None
    return EndpointTeacher.of(table, make_decode(files.tokenizer), files.facts.vocabulary_size)


def _refuse_unasked_endpoint(table: TeacherConfig, *, read: bool, compared: bool) -> None:
    """Refuse a server that nobody reads, and a part that compares whole distributions, which no server tells."""
    if compared:
        raise UnsupportedError(
            "a part of the run compares the model with a teacher over the whole vocabulary, and a server tells a few tokens",
            remedy='Set loss.use = "top_k_divergence" with teacher.top_k, or "teacher_kl", or teacher.path instead of teacher.url',
        )
    if not read:
        raise UnsupportedError(
            f"teacher.url is set, and no part of the run reads {TEACHER}: nothing would be learned from {table.url}",
            remedy='Set loss.use = "top_k_divergence" with teacher.top_k, add the loss term teacher_kl, set rl.preset = '
            '"on_policy_distill" in trainer rl, or remove teacher.url',
        )


def _refuse_mixed_tokens(assembly: Assembly, files: ModelFiles, *, read: bool) -> None:
    """Refuse, beside a loss that aligns tokens, parts that compare token by token, and tokenizers that do not say where tokens stand."""
    others = sorted(score for score in assembly.objective.scores if asks_a_teacher((score,)) and not is_aligned(score))
    if read or others:
        raise UnsupportedError(
            f"a loss aligns the teacher's own tokens with the student's, and another part of the run reads {others[0] if others else TEACHER}, "
            "of equal tokens",
            remedy="Use the losses uld and gold alone, and in trainer rl an advantage that reads no teacher, such as advantage.use = "
            '"grpo", or losses of equal tokens',
        )
    if assembly.collator.product.rows == "tree":
        raise UnsupportedError(
            f"a loss aligns the teacher's own tokens with the student's, which needs whole samples, and {assembly.collator.label} shares their "
            "beginnings",
            remedy='Set collator.use = "packed" or "padded"',
        )
    if not files.tokenizer.is_fast:
        raise UnsupportedError(
            f"the tokenizer of {files.facts.model.path} does not tell where in a text its tokens stand, by which they are aligned",
            remedy="Use a model with a tokenizer.json",
        )


def _refuse_other_width(files: ModelFiles, trained: ModelFiles) -> None:
    """Refuse a teacher with logits for more tokens, or fewer, than the trained model: a divergence is over the same tokens."""
    theirs, ours = files.facts.vocabulary_size, trained.facts.vocabulary_size
    if theirs != ours and theirs is not None and ours is not None:
        raise UnsupportedError(
            f"the teacher {files.facts.model.path} has logits for {theirs:,} tokens, and the trained model for {ours:,}: the first token that "
            f"only one of them knows is number {min(theirs, ours)}",
            remedy="Set teacher.path to a model with as many, or read one token's log-probability alone, by the loss teacher_kl",
        )


def warn_of_few_aligned(step: int, metrics: Mapping[str, float]) -> bool:
    """Log that the teacher's texts aligned nearly none of a step's tokens, where they did not; returns True if it logged."""
    share = metrics.get("teacher/aligned_share", 1.0)
    if share >= _FEW_ALIGNED:
        return False
    logger.warning(
        "the teacher's tokens stand for the same text as %.2g of the tokens with loss of step %s (teacher/aligned_share): nearly nothing is "
        "learned; the tokenizers write texts in different ways, or the chat template's answers are not the teacher's texts",
        share,
        step,
    )
    return True


def teacher_metrics(columns: SampleColumns) -> dict[str, Metric]:
    """Return `teacher/divergence`: the mean of log p - log q over the tokens that carry loss, p the policy that sampled and q the teacher.

    It estimates the reverse divergence, KL(p, q), in nats per token. Where neither the old policy nor the sampler is known there is none.
    """
    available = columns.columns
    policy = available.get(OLD_LOGPROBS, available.get(ROLLOUT_LOGPROBS))
    if policy is None or TEACHER not in available:
        return {}
    scored = columns.loss_weight != 0
    differences = policy[scored].astype(np.float64) - available[TEACHER][scored].astype(np.float64)
    return {"teacher/divergence": Metric.mean(float(differences.sum()), len(differences))}
