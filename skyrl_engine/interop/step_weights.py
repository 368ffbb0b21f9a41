"""The weights of one micro-batch's tokens, by a reducer, where the rest of the optimizer step is known by its number of tokens alone.

A reducer computes weights from the structure of a whole mini-batch. A trainer of another project tells how many tokens the step has, and no
more. So the reducer is given the micro-batch's own sequences, and one sequence that stands for the rest. That is exact if the weight of a token
depends on the rest only through its number of tokens: for means over all tokens, and for sums. `refuse_reducer_of_whole_steps` tries several
structures of one size, and refuses a reducer that tells them apart.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.kinds.reducer import BatchStructure, Reducer
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.errors import DataError, UnsupportedError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame

Weights = npt.NDArray[np.float64]

OWN = 3
OF_ONE_SIZE = ((9,), (2, 7), (1,) * 9, (0, 4, 5))
"""Sequences that may lie beside one of `OWN` tokens in a step of 12."""


def weigh_tokens(reducer: BoundPlugin[Reducer], counts: IntArray, num_items_in_batch: Any) -> Weights:
    """Return float64[n], the weight of each of the n tokens of sequences with these `counts`, in a step of `num_items_in_batch` tokens.

    Raises DataError where the step's number of tokens is missing, or less than the micro-batch has.
    """
    own = int(counts.sum())
    needs_step = not getattr(reducer.product, "additive", False)
    rest = _count_step(reducer.label, num_items_in_batch, own) - own if needs_step else 0
    return _weigh(reducer, [*counts.tolist(), rest] if rest else counts.tolist())[:own]


def refuse_reducer_of_whole_steps(reducer: BoundPlugin[Reducer]) -> None:
    """Raise UnsupportedError for a reducer that reads columns, or whose weights depend on more of a step than its number of tokens."""
    product = reducer.product
    if getattr(product, "needs", ()):
        raise UnsupportedError(
            f"{reducer.label} reads {', '.join(product.needs)} of the data, and compute_loss_func is given labels alone",  # type: ignore[attr-defined] # optional, as the Protocol's docstring says
            remedy="Choose the reducer token_mean or sum",
        )
    weights = [_weigh(reducer, [OWN, *rest], together=together)[:OWN] for rest in OF_ONE_SIZE for together in (True, False)]
    if product.batch_local or not all(np.array_equal(weights[0], other) for other in weights):
        raise UnsupportedError(
            f"{reducer.label} needs the sequences of the whole step, and compute_loss_func is told only how many tokens the step has",
            remedy="Choose the reducer token_mean or sum, or train with it by this engine",
        )


def _weigh(reducer: BoundPlugin[Reducer], counts: Sequence[int], *, together: bool = True) -> Weights:
    """Return the weights of tokens that all carry loss, in sequences with these counts, each a group of its own.

    They are `together` in one micro-batch, or each in one of its own.
    """
    ids = np.arange(len(counts), dtype=np.int64)
    structure = BatchStructure(
        loss_weight=np.ones(sum(counts), dtype=np.uint8),
        action_offsets=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64),
        group_ids=ids,
        unit_ids=ids,
        micro_batch=np.zeros_like(ids) if together else ids,
        max_sequence_length=sum(counts),
    )
    with blame(reducer.owner, "weights"):
        return np.asarray(reducer.product.weights(structure), dtype=np.float64)


def _count_step(label: str, num_items_in_batch: Any, own: int) -> int:
    """Return the number of tokens of the step. Raises DataError for none, more than one number, a fraction, or fewer than `own`."""
    remedy = "Pass the number of labels that are not -100, without column 0, of all micro-batches and ranks of the step"
    if num_items_in_batch is None:
        raise DataError(f"{label} divides by the tokens of the step, and num_items_in_batch is missing", remedy=remedy)
    numbers = np.unique(np.asarray(getattr(num_items_in_batch, "tolist", lambda: num_items_in_batch)(), dtype=np.float64))
    if len(numbers) != 1 or not numbers[0].is_integer():
        raise DataError(
            f"num_items_in_batch is {num_items_in_batch}, and {label} divides by one whole number of tokens",
            remedy="Start one process per device (torchrun, not DataParallel), and let no ranks share a sequence",
        )
    total = int(numbers[0])
    if total < own:
        raise DataError(f"num_items_in_batch is {total}, and this micro-batch alone has {own} tokens with loss", remedy=remedy)
    return total
