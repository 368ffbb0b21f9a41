"""KTO's baseline: how far the model is from the reference on answers to other prompts (Ethayarajh et al. 2024, arXiv:2402.01306, section 4)."""

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.values.bundles import inseparable
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.extras import TOKEN_TYPES
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged, RaggedView, offsets_of
from skyrl_engine.data.dataset import TokenizedDataset
from skyrl_engine.data.table.filling import PROMPT
from skyrl_engine.errors import DataError
from skyrl_engine.training.sft.order import SampleOrder

NUMBER: Final = "place_in_dataset"
"""Name of the value of a sample that is its place."""

ROW: Final = "row"
"""Name of the value of a sample that is the number of its row in the data."""

_log = logging.getLogger(__name__)


def refuse_single_prompts(columns: SampleColumns, order: SampleOrder, steps: int, *, name: str) -> None:
    """Refuse data of which one of the first `steps` mini-batches has a single prompt: it has no answers to other prompts.

    The last mini-batch of an epoch may be smaller than the others; its baseline is 0 where it has a single prompt, which is logged. Raises
    DataError naming the step.
    """
    labels = prompt_labels(columns)
    if not (labels != labels[0]).any():
        raise DataError(
            f"all {len(labels)} answers of {name} are to one prompt, and KTO's baseline compares answers to other prompts",
            remedy="Add answers to other prompts, or choose another loss",
        )
    different = len(np.unique(labels)) == len(labels) > 1 and order.mixture is None
    if different and order.batch_size > 1 and order.samples % order.batch_size != 1:
        return
    position, without = order.start(), 0
    for step in range(1, steps + 1):
        epoch = position.epoch
        chosen, position = order.mini_batch(position)
        if (labels[chosen] != labels[chosen[0]]).any():
            continue
        if position.epoch == epoch:
            raise DataError(
                f"the mini-batch of step {step} holds {len(chosen)} answers of {name} to one prompt, and KTO's baseline compares answers to "
                "other prompts of the mini-batch",
                remedy="Raise training.batch_size, or set training.shuffle = true",
            )
        without += 1
    if without:
        _log.warning(
            "%s of %s mini-batches of %s, each the last one of an epoch, hold a single prompt: their KTO baseline is 0; set "
            "training.drop_last = true to leave them out",
            without,
            steps,
            name,
        )


def prompt_labels(columns: SampleColumns) -> IntArray:
    """int64[N]: equal for samples with one prompt, by its tokens or as the data says, and for samples of one unit."""
    starts = columns.token_offsets[:-1]
    ends = columns.token_offsets[1:] - np.diff(columns.action_offsets)
    numbers: dict[bytes, int] = {}
    ids = columns.input_ids
    tokens = [
        numbers.setdefault(ids[start:end].tobytes(), len(numbers))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    prompt_values = [columns.sample_values[PROMPT]] if PROMPT in columns.sample_values else []
    return inseparable(np.asarray(tokens, dtype=np.int64), columns.unit_ids, *prompt_values)


def other_answers(labels: IntArray) -> IntArray | None:
    """int64[N]: for every sample one whose answer is to another prompt; None where all samples have one prompt.

    Every answer is taken once where that is possible: samples are sorted by prompt, and each takes the answer that is as many places
    after it as the most frequent prompt has samples. Where more than half of the samples have one prompt, these share the others' answers.
    """
    count = len(labels)
    distinct, first, inverse, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    if len(distinct) < 2:
        return None
    ranks = np.argsort(np.argsort(first))[inverse]  # prompts in the order of their first samples
    order = np.argsort(ranks, kind="stable")
    most = int(sizes.max())
    taken = np.empty(count, dtype=np.int64)
    if 2 * most <= count:
        taken[order] = np.roll(order, -most)
        return taken
    frequent = inverse == int(np.argmax(sizes))
    many, few = np.flatnonzero(frequent), np.flatnonzero(~frequent)
    taken[many] = np.resize(few, len(many))
    taken[few] = many[: len(few)]
    return taken


def mismatch_answers(columns: SampleColumns, longest: int | None) -> SampleColumns | None:
    """Put after every prompt the answer to another one of the mini-batch, cut to rows of `longest` tokens; None where there is no other.

    `other_answers` chooses the answers: the next sample's where all prompts are different.
    """
    partners = other_answers(prompt_labels(columns))
    if partners is None:
        return None
    tokens, actions = np.diff(columns.token_offsets), np.diff(columns.action_offsets)
    ids, weights, lengths, responses = [], [], [], []
    for sample, partner in enumerate(partners.tolist()):
        prompt = columns.input_ids[columns.token_offsets[sample] :][: tokens[sample] - actions[sample]]
        answer = columns.input_ids[: columns.token_offsets[partner + 1]][tokens_before(columns, partner) :]
        weight = columns.loss_weight[columns.action_offsets[partner] : columns.action_offsets[partner + 1]]
        room = len(answer) if longest is None else max(0, min(len(answer), longest - len(prompt)))
        ids += [prompt, answer[:room]]
        weights.append(weight[:room])
        lengths.append(len(prompt) + room)
        responses.append(room)
    mismatched = SampleColumns.create(
        input_ids=np.concatenate(ids),
        token_offsets=offsets_of(lengths),
        action_offsets=offsets_of(responses),
        loss_weight=np.concatenate(weights),
        # the row that holds a prompt's images
        sample_values={name: columns.sample_values[name] for name in (ROW,) if name in columns.sample_values},
    )
    return evolve(mismatched, extras=_keep_extras_of_prompts(columns, lengths, tokens - actions))


def _keep_extras_of_prompts(columns: SampleColumns, lengths: Sequence[int], prompts: IntArray) -> dict[str, RaggedView]:
    """Return the images of the samples, which all stand in their first `prompts` tokens, int64[N], for rows of other lengths."""
    extras = dict(columns.extras)
    if TOKEN_TYPES in extras:
        offsets = offsets_of(lengths)
        types = np.zeros(int(offsets[-1]), dtype=extras[TOKEN_TYPES].values.dtype)
        for sample, prompt in enumerate(prompts.tolist()):
            types[offsets[sample] : offsets[sample] + prompt] = extras[TOKEN_TYPES][sample][:prompt]
        extras[TOKEN_TYPES] = RaggedView.of(Ragged(types, offsets))
    return extras


def number_samples(dataset: TokenizedDataset) -> TokenizedDataset:
    """Return the dataset whose samples know their places in it, as the value `NUMBER`: a mini-batch says by it which samples it holds."""
    columns = dataset.columns
    return evolve(
        dataset, columns=evolve(columns, sample_values={**columns.sample_values, NUMBER: np.arange(len(columns), dtype=np.int64)})
    )


def tokens_before(columns: SampleColumns, sample: int) -> int:
    """Return the place in `input_ids` where the answer of a sample begins."""
    actions: IntArray = columns.action_offsets
    return int(columns.token_offsets[sample + 1] - (actions[sample + 1] - actions[sample]))


def compute_baseline(policy: AnyArray, reference: AnyArray, answers: int) -> float:
    """Return max(0, mean over so many answers of log p(y) - log ref(y)), in nats, of float32[A] per response token of mismatched samples."""
    return max(0.0, float((policy.astype(np.float64) - reference.astype(np.float64)).sum()) / answers)
