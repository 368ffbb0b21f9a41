"""Promises of every loss, in the order in which they are checked."""

from typing import Any

from skyrl_engine.testing.another_process import another_process
from skyrl_engine.testing.losses.kind import LOSS
from skyrl_engine.testing.losses.number_promises import gradient, homogeneous, precision, zero_advantages
from skyrl_engine.testing.losses.value_promises import (
    differentiable,
    empty_metrics,
    evaluation,
    learns,
    memory,
    metrics,
    one_finite_value_per_token,
)
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.promise import Promise
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import promises as shared
from skyrl_engine.testing.tokens.kind import list_anything
from skyrl_engine.testing.tokens.oracle import oracle
from skyrl_engine.testing.tokens.token_batches import TokenBatch


def _answer(subject: Subject[Any], batch: TokenBatch) -> object:
    return LOSS.evaluate_or_undecidable(subject, batch).bits


LOSS_PROMISES: tuple[Promise[Any, Any], ...] = (
    shared.process_settings.of(LOSS),  # first: once set they are set
    shared.replicas.of(LOSS),  # soon: what wears off after some calls is seen while it lasts
    shared.needs.of(LOSS),
    one_finite_value_per_token,
    differentiable,
    learns,
    oracle.of(LOSS),
    shared.all_masked.of(LOSS),
    shared.micro_batch_split.of(LOSS),
    shared.rank_split.of(LOSS),
    shared.sample_order.of(LOSS),
    shared.labels.of(LOSS),
    shared.padding.of(LOSS),
    shared.packing.of(LOSS),
    metrics,
    empty_metrics,
    evaluation,
    gradient,
    precision,
    homogeneous,
    zero_advantages,
    shared.devices.of(LOSS),
    shared.global_random_numbers.of(LOSS),
    shared.inputs_unchanged.of(LOSS),
    memory,
    another_process(_answer, list_anything),  # late: it takes seconds to start
    *PLUGIN_PROMISES,
)
