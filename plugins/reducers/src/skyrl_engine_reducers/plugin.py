"""Entry points of the reducers.

In formulas, w is a token's loss weight, m the sum of a sequence's w in float64, M the sum of m over the mini-batch on every rank, n the
number of sequences, and [x] is x, or 1 where x is 0. Every reducer divides a token's loss weight by a number that depends on the token's
sequence alone, and returns these numbers.
"""

import numpy as np
from attrs import field, frozen
from attrs.validators import ge, in_, optional

from skyrl_engine import BatchStructure, DataError, UnsupportedError, reducer
from skyrl_engine.contracts import EmptySequence, IntArray, PerSequence


@frozen
class MeanConfig:
    """Options of a mean. A mean over tokens ignores `empty_sequence`, and accepts it so that a config can switch between means freely."""

    empty_sequence: EmptySequence = field(default="count", validator=in_(("count", "skip")))
    """A sequence in which every loss weight is 0, and a group or micro-batch of only such sequences: `count` it in the mean, or `skip` it."""


@frozen
class TokenSumNormConfig(MeanConfig):
    """Options of a mean over sequences of sums that a constant divides."""

    max_sequence_length: int | None = field(default=None, validator=optional(ge(1)))
    """The constant, in tokens, that divides each sequence's sum; none: the run's `data.max_length`."""


@reducer(negative_weights=True, additive=True)
def sum_reducer(structure: BatchStructure, _config: None) -> PerSequence:
    """The weight w itself, unchanged: the caller normalises, as with the loss functions of Tinker."""
    return _constant_divisor(structure, 1.0)


@reducer(config=MeanConfig)
def token_mean(structure: BatchStructure, _config: MeanConfig) -> PerSequence:
    """The weight w / [M]: every loss-carrying token of the mini-batch counts alike, whatever its sequence, micro-batch or rank.

    The token-level objective of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.3), with one denominator for all prompts.
    """
    total = structure.mass.sum()
    return _constant_divisor(structure, total or 1.0)


@reducer(config=MeanConfig)
def batch_token_mean(structure: BatchStructure, _config: MeanConfig) -> PerSequence:
    """The weight w / [B / S]: B the sum of w over the whole batch, S the number of its mini-batches, which are optimizer steps.

    Every token of the batch counts alike, also between the steps, of which one with more tokens then goes further. It is `token_mean` where a
    batch is one step, and TRL's `dapo` of several updates per generation (GRPOTrainer of TRL 1.16, `num_items_in_batch`).
    """
    total = structure.mass.sum() if structure.mean_mass is None else structure.mean_mass
    return _constant_divisor(structure, total or 1.0)


@reducer(config=MeanConfig, batch_local=True)
def token_mean_legacy(structure: BatchStructure, config: MeanConfig) -> PerSequence:
    """The weight w / (K [M_k]): K micro-batches over all ranks, M_k the mass of the token's own. It depends on their cut.

    It reproduces gradient accumulation in which every micro-batch divides by its own token count, as in Hugging Face Trainer before
    https://github.com/huggingface/transformers/pull/34191. K counts the last, smaller micro-batch of a batch like any other, but not those
    without a sequence that only give ranks equally many.
    """
    return _mean_of_means(structure, structure.micro_batch, config.empty_sequence)


@reducer(config=MeanConfig)
def sequence_mean(structure: BatchStructure, config: MeanConfig) -> PerSequence:
    """The weight w / (n [m]): the mean over sequences of each one's mean over tokens.

    The objective of GRPO (Shao et al. 2024, arXiv:2402.03300, equation 3).
    """
    return _mean_of_means(structure, np.arange(len(structure), dtype=np.int64), config.empty_sequence)


@reducer(config=MeanConfig)
def trajectory_mean(structure: BatchStructure, config: MeanConfig) -> PerSequence:
    """The weight w / (R [M_r]): the mean over R trajectories of each one's mean over all its tokens, `sequence_mean` of whole attempts.

    A trajectory whose history was rewritten lies in several sequences, and counts once all the same.
    """
    return _mean_of_means(structure, structure.trajectory_ids, config.empty_sequence)


@reducer(config=TokenSumNormConfig)
def sequence_mean_token_sum_norm(structure: BatchStructure, config: TokenSumNormConfig) -> PerSequence:
    """The weight w / (n L): the mean over sequences of each one's sum over tokens, divided by the constant L = `max_sequence_length`.

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), which divides by the generation budget so that no response's own length enters.
    Raises UnsupportedError where neither the reducer nor the run has a maximum length.
    """
    length = structure.max_sequence_length if config.max_sequence_length is None else config.max_sequence_length
    if length is None:
        raise UnsupportedError(
            "the reducer 'sequence_mean_token_sum_norm' divides by a maximum length, and none is set",
            remedy="Set reducer.max_sequence_length (or data.max_length) to a number of tokens",
        )
    count = len(structure) if config.empty_sequence == "count" else np.count_nonzero(~structure.empty)
    return _constant_divisor(structure, float(count or 1) * length)


@reducer(config=MeanConfig)
def group_mean(structure: BatchStructure, config: MeanConfig) -> PerSequence:
    """The weight w / (G [M_g]): the mean over G groups (the responses to one prompt) of each one's mean over all its tokens.

    The objective of DAPO as written, an expectation over prompts (Yu et al. 2025, arXiv:2503.14476, equation 8); the prompt average of
    Khatri et al. 2025 (arXiv:2510.13786). Raises DataError where the data has no group ids.
    """
    if not structure.grouped:
        raise DataError(
            "the data has no group ids, and the reducer 'group_mean' averages over groups",
            remedy="Give every sample a group id (group_ids), or choose the reducer 'sequence_mean'",
        )
    return _mean_of_means(structure, structure.group_ids, config.empty_sequence)


def _mean_of_means(structure: BatchStructure, part_ids: IntArray, empty_sequence: EmptySequence) -> PerSequence:
    """The weight w / (K [M_k]), the mean over parts of each part's mean over tokens; `part_ids` int64[n] names each sequence's part.

    K counts the parts that have a sequence; with "skip", one that has a loss-carrying token.
    """
    _, part = np.unique(part_ids, return_inverse=True)
    mass = np.bincount(part, weights=structure.mass)
    count = len(mass) if empty_sequence == "count" else np.count_nonzero(np.bincount(part, weights=~structure.empty))
    denominator = np.where(mass == 0, 1.0, mass) * (count or 1)
    return PerSequence(denominator[part])


def _constant_divisor(structure: BatchStructure, number: float) -> PerSequence:
    return PerSequence(np.full(len(structure), number, dtype=np.float64))
