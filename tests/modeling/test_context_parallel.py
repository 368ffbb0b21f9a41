"""Who computes which tokens of a row, and what they see: every token once, even work, and the attention of whole segments.

Ranks are computed one after another in one process; plugins/fsdp/tests/test_fsdp_context.py has them in processes of their own.
"""

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.modeling.context_parallel import ContextRanks, DividedSegments, cut_chunks, divide_in_process, divide_row
from skyrl_engine.modeling.model_inputs import ModelInputs
from skyrl_engine.modeling.run_attention import attend_runs
from skyrl_engine.modeling.segments import Segments

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=8).map(tuple)
RANKS = st.integers(2, 5)


def divide(segments: Segments, ranks: int) -> list[tuple[ModelInputs, torch.Tensor]]:
    """The shares of all ranks of a row whose token ids are 100 and more, and which is scored at every other token."""
    tokens = torch.arange(sum(segments.lengths))
    row = ModelInputs({"input_ids": tokens[None] + 100, "position_ids": tokens[None] + 1000}, tokens[::2], segments)
    group: Any = None
    return [divide_row(row, ContextRanks(group, ranks, rank)) for rank in range(ranks)]


@given(LENGTHS, RANKS)
def test_every_token_is_computed_once_and_scored_at_its_place(lengths: tuple[int, ...], ranks: int) -> None:
    shares = divide(Segments(lengths), ranks)
    assert len({share.inputs["input_ids"].shape[1] for share, _ in shares}) == 1
    count = len(range(0, sum(lengths), 2))
    scored = torch.full((count,), -1)
    for share, places in shares:
        assert (scored[places] == -1).all()
        scored[places] = share.inputs["input_ids"][0, share.positions]
        real = share.inputs["input_ids"] != 0
        assert torch.equal(share.inputs["position_ids"][real], share.inputs["input_ids"][real] + 900)
        assert int((~real).sum()) <= 1
    assert torch.equal(scored, torch.arange(0, sum(lengths), 2) + 100)
    of_all = torch.cat([share.inputs["input_ids"][0] for share, _ in shares])
    for share, _ in shares:
        assert isinstance(share.segments, DividedSegments)
        row = of_all[share.segments.order]
        assert torch.equal(row[: sum(lengths)], torch.arange(sum(lengths)) + 100)
        assert (row[sum(lengths) :] == 0).all()


@given(LENGTHS, RANKS)
def test_ranks_differ_by_one_token_at_most(lengths: tuple[int, ...], ranks: int) -> None:
    chunks = cut_chunks(lengths, ranks)
    assert (chunks >= 0).all()
    assert chunks.sum(1).tolist() == list(lengths)
    of_rank = chunks[:, :ranks] + chunks[:, ranks:][:, ::-1]
    assert np.ptp(of_rank.sum(0)) <= 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_work_of_long_segments_is_even(ranks: int) -> None:
    """Work is the number of tokens that a token attends to; a rank's is within 1 % of the mean, where halves would differ by a factor of 3."""
    shares = divide(Segments((4001, 2500, 3217)), ranks)
    work = []
    for share, _ in shares:
        assert isinstance(share.segments, DividedSegments)
        runs = [(run.stop - run.start, run.prefix) for run in share.segments.runs]
        work.append(sum(length * prefix + length * (length + 1) / 2 for length, prefix in runs))
    assert np.ptp(work) <= 0.01 * np.mean(work)


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("parents", [None, (-1, 0, 1, 1, 0, -1)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_divided_tokens_attend_as_whole_segments_do(ranks: int, parents: tuple[int, ...] | None, window: int | None) -> None:
    """Output and gradients, in float64; a document, chains of shared prefixes and branches of them."""
    whole = Segments((7, 4, 6, 5, 1, 9), parents)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 32, 8, generator=draw, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )

    def attend_document(own_query: Any, seen_key: Any, seen_value: Any, mask: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            own_query, seen_key, seen_value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        ).transpose(1, 2)

    due = attend_runs(query, key, value, whole, attend_document, scaling=None, window=window)
    tokens, segments = divide_in_process(whole, ranks)
    own = [tensor.index_select(2, tokens) for tensor in (query, key, value)]
    got = attend_runs(own[0], *segments.gather(own[1], own[2]), segments, attend_document, scaling=None, window=window)
    torch.testing.assert_close(got, due.index_select(1, tokens), rtol=1e-12, atol=1e-12)
    upstream = torch.randn(due.shape, generator=draw, dtype=torch.float64)
    expected = torch.autograd.grad(due, (query, key, value), upstream, retain_graph=True)
    for gradient, other in zip(
        torch.autograd.grad(got, (query, key, value), upstream.index_select(1, tokens)), expected, strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-11)


def test_lengths_are_those_of_whole_documents() -> None:
    """A model's limit of positions is about documents, and not about a rank's part of them."""
    ((share, _), _) = divide(Segments((7, 4), (-1, 0)), 2)
    assert share.segments is not None
    assert share.segments.longest == 11
    assert evolve(share.segments, order=None).longest == 11
