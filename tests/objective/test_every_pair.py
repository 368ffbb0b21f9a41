"""Every first-party loss under every first-party reducer, at the objective: a batch in parts has the loss and the gradient of the whole.

What a model adds to it is held for each loss and each reducer, not for each pair: tests/proof/test_every_loss_and_reducer.py.
"""

import numpy as np
import pytest
import torch
from attrs import evolve

from skyrl_engine.contracts.kinds.reducer import BatchStructure
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.testing.losses.evaluation import evaluate
from skyrl_engine.testing.subject import CONTEXT, select_plugin
from skyrl_engine.testing.tokens.evaluation import join_evaluations
from skyrl_engine.testing.tokens.explicit import make_varied_batch
from skyrl_engine.testing.tokens.token_batches import CutBatch, TokenBatch

PARTS = ((0, 3), (5, 1, 4), (2,))
WHOLE_UNITS = ((1, 0), (5, 4, 2, 3))
"""For who compares the samples of a unit."""


def first_party(kind: str) -> list[str]:
    records = Registry.discover().records(kind)
    return [record.name for record in records if str(record.distribution).startswith("skyrl-engine")]


def weight_batch(batch: TokenBatch, reducer: str) -> TokenBatch:
    """The batch with this reducer's weights. Sequences are of different lengths, and their tokens of different weight."""
    micro_batch = np.zeros(len(batch), np.int64)
    for number, part in enumerate(PARTS):
        micro_batch[list(part)] = number
    weight = np.linspace(0.5, 1.5, batch.tokens, dtype=np.float32)
    structure = BatchStructure(
        weight, offsets_of(batch.lengths), batch.group_ids, batch.unit_ids, micro_batch, CONTEXT.max_sequence_length
    )
    return evolve(batch, weights=select_plugin("reducer", reducer, {}).make(CONTEXT).weights(structure))


def shorten(batch: TokenBatch) -> TokenBatch:
    """Sequences of 4, 3, 2, 1, 4 and 3 tokens."""
    lengths = batch.lengths - np.arange(len(batch)) % 4
    places = np.concatenate(
        [np.arange(first, first + length) for first, length in zip(4 * np.arange(len(batch)), lengths, strict=True)]
    )
    values = {name: array[places] for name, array in batch.values.items()}
    return evolve(batch, lengths=lengths, values=values, weights=batch.weights[places])


@pytest.mark.parametrize("reducer", first_party("reducer"))
@pytest.mark.parametrize("name", first_party("loss"))
def test_parts_add_up_to_the_whole(name: str, reducer: str) -> None:
    loss = select_plugin("loss", name, {}).make(CONTEXT)
    if loss.reducers is not None and reducer not in loss.reducers:
        return
    batch = weight_batch(shorten(make_varied_batch(loss.needs)), reducer)
    whole = evaluate(name, loss, batch)
    assert whole.total == pytest.approx((batch.weights * whole.per_token).sum(), rel=1e-12)
    assert any(gradient.any() for gradient in whole.gradients.values())
    if loss.batch_local:
        return
    cut = PARTS if batch.roles is None else WHOLE_UNITS
    parts = join_evaluations(CutBatch(batch, cut), [evaluate(name, loss, batch.take(part)) for part in cut])
    assert parts.total == pytest.approx(whole.total, rel=1e-12)
    for score, gradient in whole.gradients.items():
        np.testing.assert_allclose(parts.gradients[score], gradient, rtol=1e-12, atol=0)


def test_a_mean_of_its_own_would_be_noticed() -> None:
    class Mean:
        needs = ("logprobs",)
        reducers = None

        def __call__(self, tokens: object) -> torch.Tensor:
            values = -tokens.logprobs  # type: ignore[attr-defined]
            return values / len(values)

    batch = weight_batch(shorten(make_varied_batch(("logprobs",))), "sum")
    whole = evaluate("mean", Mean(), batch)
    parts = join_evaluations(CutBatch(batch, PARTS), [evaluate("mean", Mean(), batch.take(part)) for part in PARTS])
    assert parts.total != pytest.approx(whole.total, rel=1e-2)
