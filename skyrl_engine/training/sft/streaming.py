"""Checks and bounds of runs over data that is read while training."""

from typing import Final

import numpy as np
from attrs import evolve

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import DataConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.errors import ConfigError, Problem
from skyrl_engine.training.sft.student_samples import samples_answers

_REMEDY: Final = "Set data.streaming = false, or remove it"


def refuse_what_needs_all_data(resolved: ResolvedConfig) -> None:
    """Raise ConfigError for parts of a run that have to know all of the training data before it begins, where it is streamed."""
    config = resolved.config
    if not config.data.streaming:
        return
    problems = []
    if config.has("reference") and config.reference.precompute:
        problems.append(Problem("reference.precompute", "scores all samples before the run, and data.streaming is on", _REMEDY))
    if samples_answers(resolved):
        problems.append(
            Problem("sampling.share", "needs to know the longest prompt before the run, and data.streaming is on", _REMEDY)
        )
    if problems:
        raise ConfigError(problems)


def stretch_samples(columns: SampleColumns, data: DataConfig) -> SampleColumns:
    """Return a mini-batch like this one whose samples are all as long as `data.max_length` allows: the largest that a stream may give.

    Raises ConfigError where neither the configuration nor the model says how long samples may be.
    """
    longest = data.max_length
    if longest is None:
        raise ConfigError(
            [
                Problem(
                    "data.max_length",
                    "is not set, the model does not say it, and nobody knows the longest sample of a stream",
                    "Set data.max_length",
                )
            ]
        )
    count = len(columns)
    actions = offsets_of([longest] * count)
    total = int(actions[-1])
    return evolve(
        columns,
        input_ids=np.zeros(total, dtype=columns.input_ids.dtype),
        token_offsets=actions,
        action_offsets=actions,
        loss_weight=np.tile((np.arange(longest) > 0).astype(columns.loss_weight.dtype), count),
        columns={name: np.zeros((total, *values.shape[1:]), dtype=values.dtype) for name, values in columns.columns.items()},
        extras={},
    )
