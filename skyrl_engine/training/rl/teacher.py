"""The teacher of a run: a frozen model on the ranks that scores what the student sampled, for distillation on the student's own samples."""

from typing import Final

import numpy as np

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.objective.policy_metrics import OLD, SAMPLED
from skyrl_engine.training.model_beside import planned_beside

TEACHER_MODEL: Final = "teacher"
"""The frozen model's name on the ranks, and its table in the configuration."""

TEACHER: Final = "teacher_logprobs"
"""The column of its log-probabilities of the sampled tokens."""


def planned_teacher(resolved: ResolvedConfig, assembly: Assembly, files: ModelFiles, *, read: bool) -> FrozenModel | None:
    """Choose the frozen model that `[teacher]` names; None where there is none. `read` says that a part of the run reads its column.

    Raises UnsupportedError for a teacher that nobody reads or that nobody named, and for what the backend does not allow; ModelError for a
    model that cannot be used.
    """
    table = resolved.config.teacher
    if table.path is None:
        if read:
            raise UnsupportedError(
                f"a part of the run reads {TEACHER}, and there is no teacher",
                remedy="Set teacher.path, or choose parts that do not read it",
            )
        return None
    if not read:
        raise UnsupportedError(
            f"teacher.path is set, and no part of the run reads {TEACHER}: nothing would be learned from the teacher",
            remedy='Set rl.preset = "on_policy_distill", add the loss term teacher_kl, or remove teacher.path',
        )
    planned, own = planned_beside("the teacher", TEACHER_MODEL, resolved, assembly, files, path=table.path, revision=table.revision)
    longest, positions = resolved.config.rl.max_prompt_tokens + resolved.config.rl.max_tokens, own.facts.extended_length
    if positions is not None and longest > positions:
        raise UnsupportedError(
            f"attempts may have up to {longest:,} tokens, and the teacher {table.path} has {positions:,} positions",
            remedy="Lower rl.max_prompt_tokens or rl.max_tokens",
        )
    return planned


def teacher_metrics(columns: SampleColumns) -> dict[str, Metric]:
    """Return `teacher/divergence`: the mean of log p - log q over the tokens that carry loss, p the policy that sampled and q the teacher.

    It estimates the reverse divergence, KL(p, q), in nats per token. Where neither the old policy nor the sampler is known there is none.
    """
    given = columns.columns
    policy = given.get(OLD, given.get(SAMPLED))
    if policy is None or TEACHER not in given:
        return {}
    scored = columns.loss_weight != 0
    differences = policy[scored].astype(np.float64) - given[TEACHER][scored].astype(np.float64)
    return {"teacher/divergence": Metric.mean(float(differences.sum()), len(differences))}
