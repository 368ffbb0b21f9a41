"""Backends whose ranks divide the tokens of samples wrongly, each in one way."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import attrs
from backends_made_wrong import Wrong, overriding


def _with(target: str, make: Callable[[Any], Any]) -> Wrong:
    """A backend that scores with `make(original)` in the place of the function `target` ("module.name")."""

    def score(self: Any, original: Any, *arguments: Any) -> Any:
        function, _ = patch(target).get_original()
        with patch(target, make(function)):
            return original(*arguments)

    return Wrong(overriding(forward=score, forward_backward=score))


def _place_own(segments: Any, tensor: Any) -> Any:
    """The row, with zeros for the tokens of other ranks."""
    size, rank, count = segments.ranks.size, segments.ranks.rank, tensor.shape[2]
    of_all = tensor.new_zeros(*tensor.shape[:2], size * count, tensor.shape[3])
    of_all[:, :, rank * count : (rank + 1) * count] = tensor
    return of_all.index_select(2, segments.order)


def _own_keys(_gather: Any) -> Any:
    return lambda segments, key, value: (_place_own(segments, key), _place_own(segments, value))


def _keys_that_learn_from_own_queries(gather: Any) -> Any:
    def call(segments: Any, key: Any, value: Any) -> tuple[Any, ...]:
        gathered = gather(segments, key.detach(), value.detach())
        own = (_place_own(segments, tensor) for tensor in (key, value))
        return tuple(part + (whole - part).detach() for part, whole in zip(own, gathered, strict=True))

    return call


def _count_anew(divide: Any) -> Any:
    def call(arguments: Any, ranks: Any) -> tuple[Any, Any]:
        import torch

        divided, places = divide(arguments, ranks)
        counted = torch.arange(divided.inputs["input_ids"].shape[1])[None]
        return attrs.evolve(divided, inputs={**divided.inputs, "position_ids": counted}), places

    return call


def _add_up(_gather: Any) -> Any:
    from skyrl_engine.modeling.context_scores import gather_states

    return gather_states


GATHER = "skyrl_engine.modeling.context_parallel.DividedSegments.gather"
sees_own_keys_alone = _with(GATHER, _own_keys)
keys_learn_from_own_queries = _with(GATHER, _keys_that_learn_from_own_queries)
counts_positions_anew = _with("skyrl_engine.modeling.micro_batch.divide_row", _count_anew)
adds_gradients_of_scores = _with("skyrl_engine.modeling.context_scores.gather_scores", _add_up)
