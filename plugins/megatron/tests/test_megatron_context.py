"""Context parallelism: who holds which tokens, and a loss of whole sequences that does not notice that ranks share them."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_tasks import VOCABULARY, sequence_loss_passed

from skyrl_engine.contracts import MicroBatch
from skyrl_engine.testing.backends.batches import Document, build_packed, build_padded, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.context import alignment, order_after_gather, tokens_of_rank
from skyrl_engine_megatron.documents import RowShape
from skyrl_engine_megatron.plugin import MegatronConfig


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([1, 2, 3, 4]))
def test_every_token_is_held_once_and_found_again(chunks: list[int], ranks: int) -> None:
    lengths = [chunk * alignment(ranks) for chunk in chunks]
    held = [tokens_of_rank(lengths, ranks, rank) for rank in range(ranks)]
    gathered = torch.cat(held)
    assert torch.equal(gathered[order_after_gather(lengths, ranks)], torch.arange(sum(lengths)))
    assert {len(share) for share in held} == {sum(lengths) // ranks}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([2, 3, 4]))
def test_every_rank_has_the_same_work(chunks: list[int], ranks: int) -> None:
    """Work is the number of tokens that a token attends to: its place in its document, counted from 1."""
    lengths = [chunk * alignment(ranks) for chunk in chunks]
    places = torch.cat([torch.arange(1, length + 1) for length in lengths])
    assert len({int(places[tokens_of_rank(lengths, ranks, rank)].sum()) for rank in range(ranks)}) == 1


@pytest.mark.parametrize("rows", [build_padded, build_packed])
@pytest.mark.parametrize("shape", [RowShape(), RowShape(tp=2), RowShape(cp=2), RowShape(tp=2, cp=3)])
def test_ranks_score_every_position_once_at_its_own_token(
    shape: RowShape, rows: Callable[[Sequence[Document], int], list[MicroBatch]]
) -> None:
    """The token and the position from which a label is predicted, looked up through the ranks' shares, are those of the document."""
    for micro_batch in rows(documents(VOCABULARY), 3):
        width = shape.tokens_of(micro_batch) + 5
        whole = RowShape().documents_of(micro_batch)
        predicted_from = torch.full((len(micro_batch.labels), 2), -1)
        for rank in range(shape.cp):
            share = shape.documents_of(micro_batch, cp_rank=rank, width=width)
            assert share.input_ids.shape[1] * shape.cp == sum(share.lengths) >= width
            assert share.input_ids.shape[1] % shape.tp == 0
            assert (predicted_from[share.places] == -1).all()
            seen = torch.stack([share.input_ids[0, share.positions], share.position_ids[0, share.positions]], 1)
            predicted_from[share.places] = seen
        assert torch.equal(predicted_from[:, 0], whole.input_ids[0, whole.positions])
        assert torch.equal(predicted_from[:, 1], whole.position_ids[0, whole.positions])


@pytest.mark.usefixtures("alone")
def test_a_loss_of_sequences_does_not_notice_shared_ones(pair: World, models: dict[str, str]) -> None:
    """A ratio per sequence, as GSPO has: a rank that saw its own tokens alone would have another mean, and another gradient everywhere.

    What that would look like is measured too, so that the tolerance is known to tell them apart.
    """
    name = models["qwen3-tied"]
    alone = sequence_loss_passed(name, MegatronConfig())
    for together in pair.run(sequence_loss_passed, name, MegatronConfig(context_parallel=2)):
        assert find_worst_difference(together, alone) <= 1e-5
    for torn in pair.run(sequence_loss_passed, name, MegatronConfig(context_parallel=2), torn=True):
        assert find_worst_difference(torn, alone) > 1e-2
