"""KTO's baseline: how far the model is from the reference on answers to other prompts (Ethayarajh et al. 2024, arXiv:2402.01306, section 4)."""

import numpy as np

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import BatchOutput
from skyrl_engine.contracts.values.ragged import IntArray, offsets_of


def mismatched(columns: SampleColumns, longest: int | None) -> SampleColumns | None:
    """Put behind every prompt the answer to another one of the mini-batch, cut to rows of `longest` tokens; None where there is no other.

    Sample i gets the answer of sample i + 1, or where units have u samples that of i + u, the last ones those of the first.
    """
    count = len(columns)
    _, sizes = np.unique(columns.unit_ids, return_counts=True)
    shift = int(sizes.max(initial=1))
    if count <= shift:
        return None
    tokens, actions = np.diff(columns.token_offsets), np.diff(columns.action_offsets)
    ids, weights, lengths, responses = [], [], [], []
    for sample in range(count):
        other = (sample + shift) % count
        prompt = columns.input_ids[columns.token_offsets[sample] :][: tokens[sample] - actions[sample]]
        answer = columns.input_ids[: columns.token_offsets[other + 1]][tokens_before(columns, other) :]
        weight = columns.loss_weight[columns.action_offsets[other] : columns.action_offsets[other + 1]]
        room = len(answer) if longest is None else max(0, min(len(answer), longest - len(prompt)))
        ids += [prompt, answer[:room]]
        weights.append(weight[:room])
        lengths.append(len(prompt) + room)
        responses.append(room)
    return SampleColumns.create(
        input_ids=np.concatenate(ids),
        token_offsets=offsets_of(lengths),
        action_offsets=offsets_of(responses),
        loss_weight=np.concatenate(weights),
    )


def tokens_before(columns: SampleColumns, sample: int) -> int:
    """Return the place in `input_ids` where the answer of a sample begins."""
    actions: IntArray = columns.action_offsets
    return int(columns.token_offsets[sample + 1] - (actions[sample + 1] - actions[sample]))


def baseline_of(policy: BatchOutput, reference: BatchOutput) -> float:
    """Return max(0, mean over answers of log p(y) - log ref(y)), in nats, of scores of the same mismatched samples."""
    gaps = policy.fields["logprobs"].values.astype(np.float64) - reference.fields["logprobs"].values.astype(np.float64)
    return max(0.0, float(gaps.sum()) / len(policy.sample_ids))
