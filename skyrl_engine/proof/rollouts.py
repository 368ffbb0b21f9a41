"""The batch that proofs run on: recorded rollouts with everything in them that has ever made a cut visible."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.kinds.needs import ROLE_NEED, ColumnForm, column_forms, sample_value
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import AnyArray, offsets_of
from skyrl_engine.contracts.values.roles import ROLE
from skyrl_engine.modeling.tiny import VOCABULARY

LONGEST = 40
"""Tokens of the longest sample."""

GROUPS, GROUP_SIZE = 4, 4

PROMPTS = (5, 16, 17, 16)
"""Tokens of each group's prompt: of one that is too short to be shared, and of three that are shared."""

WIDTH = 3
"""Numbers per token of a column that holds several."""

Numbers = np.random.Generator
Draw = Callable[[Numbers, int], npt.NDArray[np.float64]]


def make_rollouts(needed: Iterable[str], seed: int = 0) -> SampleColumns:
    """16 rollouts, four to a prompt, of 5 to 40 tokens, with the columns and values of samples that these needs name.

    A group's rollouts begin with the same prompt, and two of the last group with the same response tokens. Responses differ in length by a
    factor of ten, one is empty, one carries no loss at all; some tokens in the middle are masked and some count half. Log-probabilities lie
    around those of an untrained model, so that ratios fall on both sides of any clipping bound. Where roles are asked for, samples 2 i and
    2 i + 1 are a pair.
    """
    needs = tuple(needed)
    numbers = np.random.default_rng(seed)
    prompts = np.repeat(PROMPTS, GROUP_SIZE)
    responses = numbers.integers(3, LONGEST - prompts.max() + 1, len(prompts))
    responses[5] = 0
    responses[2] = LONGEST - prompts[2]
    responses[11] = 1
    responses[13] = 9
    lengths = prompts + responses
    actions = int(responses.sum())
    action_offsets = offsets_of(responses)
    weight = numbers.choice(np.array([0.0, 0.5, 1.0], dtype=np.float32), p=[0.1, 0.2, 0.7], size=actions)
    weight[action_offsets[9] : action_offsets[10]] = 0.0
    samples = np.arange(len(prompts), dtype=np.int64)
    group_ids = np.repeat(np.arange(GROUPS, dtype=np.int64), GROUP_SIZE)
    token_offsets = offsets_of(lengths)
    input_ids = numbers.integers(1, VOCABULARY, int(lengths.sum()))
    for sample, first in enumerate(np.repeat(token_offsets[:-1:GROUP_SIZE], GROUP_SIZE).tolist()):
        input_ids[token_offsets[sample] :][: prompts[sample]] = input_ids[first : first + prompts[sample]]
    common = int(prompts[12]) + 5
    input_ids[token_offsets[13] :][:common] = input_ids[token_offsets[12] :][:common]
    return SampleColumns.create(
        input_ids=input_ids,
        token_offsets=token_offsets,
        action_offsets=action_offsets,
        loss_weight=weight,
        columns={name: _draw_column(name, form, numbers, actions) for name, form in sorted(column_forms(needs).items())},
        sample_values={
            name: samples % 2 if name == ROLE else numbers.integers(0, 3, len(prompts))
            for name in sorted(filter(None, map(sample_value, needs)))
        },
        group_ids=group_ids,
        unit_ids=samples // 2 if ROLE_NEED in needs else None,
    )


def _draw_column(name: str, form: ColumnForm, numbers: Numbers, actions: int) -> AnyArray:
    if form == "number":
        return _DRAWS.get(name, _anything)(numbers, actions).astype(np.float32)
    if form == "token ids":
        return numbers.integers(0, VOCABULARY, (actions, WIDTH))
    draw = _log_probability if name.endswith("logprobs") else _anything
    return draw(numbers, actions * WIDTH).astype(np.float32).reshape(actions, WIDTH)


def _log_probability(numbers: Numbers, count: int) -> npt.NDArray[np.float64]:
    return np.minimum(numbers.normal(-np.log(VOCABULARY), 0.5, count), 0.0)


def _anything(numbers: Numbers, count: int) -> npt.NDArray[np.float64]:
    return numbers.normal(0.0, 1.0, count)


_DRAWS: Mapping[str, Draw] = dict.fromkeys(("old_logprobs", "rollout_logprobs", "ref_logprobs"), _log_probability)
