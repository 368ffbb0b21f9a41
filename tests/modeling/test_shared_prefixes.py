"""Rows of trees against rows that share nothing: segments, attention by runs, FlexAttention's mask, and models in exact float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from by_day import now
from hypothesis import given
from hypothesis import strategies as st
from shared_rows import losses_and_gradients, make_columns
from torch import Tensor
from torch.overrides import TorchFunctionMode

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling import tree_kernel
from skyrl_engine.modeling.load_check import check_loading
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.modeling.run_attention import attend_runs
from skyrl_engine.modeling.segments import Run, Segments
from skyrl_engine.modeling.tiny import VOCABULARY, write_model
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.tree.collator import TreeCollator


def test_runs_follow_first_children_and_paths_are_joined() -> None:
    #     0 ── 1 ── 2
    #     │    └─── 3
    #     └─── 4
    #     5
    segments = Segments((4, 3, 2, 5, 6, 1), parents=(-1, 0, 1, 1, 0, -1))
    assert segments.runs == (Run(0, 9), Run(9, 14, ((0, 7),)), Run(14, 20, ((0, 4),)), Run(20, 21))
    assert segments.longest == 12
    assert segments.starts == (0, 4, 7, 7, 4, 0)
    assert segments.seen_until == (20, 14, 9, 14, 20, 21)
    deep = Segments((4, 3, 2, 5), parents=(-1, 0, 0, 2))
    assert deep.runs == (Run(0, 7), Run(7, 14, ((0, 4),)))
    assert Segments((2, 3), parents=None).runs == (Run(0, 2), Run(2, 5))


@st.composite
def trees(draw: st.DrawFn) -> Segments:
    count = draw(st.integers(1, 9))
    lengths = tuple(draw(st.lists(st.integers(1, 5), min_size=count, max_size=count)))
    parents: list[int] = []
    path: list[int] = []
    for segment in range(count):
        depth = draw(st.integers(0, len(path)))
        del path[depth:]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return Segments(lengths, tuple(parents))


def attend_document(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=0.5
    )
    return output.transpose(1, 2)


@given(trees(), st.none() | st.integers(1, 8), st.integers(0, 2**31))
def test_attention_by_runs_and_by_flex_attention_is_that_of_the_mask(segments: Segments, window: int | None, seed: int) -> None:
    draw, tokens = torch.Generator().manual_seed(seed), sum(segments.lengths)
    shapes = ((1, 4, tokens, 8), (1, 2, tokens, 8), (1, 2, tokens, 8))
    query, key, value = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    due = tree_kernel.attend_by_mask(query, key, value, segments, scaling=0.5, window=window)
    runs = attend_runs(query, key, value, segments, attend_document, scaling=0.5, window=window)
    torch.testing.assert_close(runs, due, rtol=1e-5, atol=1e-5)
    mask = tree_kernel.block_mask(segments, window, torch.device("cpu"))
    place = torch.arange(tokens)
    seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), place[:, None], place)
    assert torch.equal(seen, seen_by_definition(segments, window))


@given(trees(), st.none() | st.integers(1, 8), st.sampled_from([1, 2, 4, 7]))
def test_blocks_that_are_not_asked_are_seen_whole_or_not_at_all(segments: Segments, window: int | None, block: int) -> None:
    with patch.object(tree_kernel, "BLOCK", block):
        mask = tree_kernel.block_mask(segments, window, torch.device("cpu"))
    seen, tokens = seen_by_definition(segments, window), sum(segments.lengths)
    count = -(-tokens // block)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for row in range(count):
        asked = mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist()
        whole = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist()
        assert not {*asked} & {*whole}
        assert row in asked, "the diagonal"
        for column in range(count):
            part = seen[row * block : (row + 1) * block, column * block : (column + 1) * block]
            if column in whole:
                assert part.all()
                assert part.shape == (block, block), "a block that ends beyond the row is asked"
            elif column not in asked:
                assert not part.any()


def seen_by_definition(segments: Segments, window: int | None) -> Tensor:
    """bool[tokens, tokens], one token at a time: the column is on the token's path, up to itself, and within the window."""
    assert segments.parents is not None
    ends = list(accumulate(segments.lengths))
    paths: list[list[int]] = []
    for parent, end, length in zip(segments.parents, ends, segments.lengths, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), *range(end - length, end)])
    seen = torch.zeros(ends[-1], ends[-1], dtype=torch.bool)
    for path in paths:
        for position, column in enumerate(path):
            seen[column, path[max(0, position + 1 - (window or len(path))) : position + 1]] = True
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, tree_kernel.PROBE_WINDOW])
@pytest.mark.parametrize(("heads", "key_heads", "head"), [(8, 8, 64), (16, 8, 128), (4, 1, 256), (4, 2, 16)])
def test_flex_attention_is_right_on_a_device(window: int | None, heads: int, key_heads: int, head: int) -> None:
    tree_kernel.compare(torch.device("cuda", 0), torch.bfloat16, heads, key_heads, head, window)


@pytest.mark.gpu
def test_one_program_serves_rows_of_all_trees() -> None:
    """Every row has a mask of its own; a program for each would take longer to make than to run."""
    device, draw = torch.device("cuda", 0), torch.Generator().manual_seed(0)
    made = []
    for number in range(12):
        lengths = tuple(torch.randint(1, 400, (7,), generator=draw).tolist())
        segments = Segments(lengths, (-1, 0, 1, 1, 0, -1, 5) if number % 2 else None)
        tensors = [torch.randn(1, heads, sum(lengths), 64, generator=draw).to(device, torch.bfloat16) for heads in (8, 2, 2)]
        query, key, value = (tensor.requires_grad_() for tensor in tensors)
        got = tree_kernel.attend(query, key, value, segments, scaling=None, window=None)
        torch.autograd.grad(got, (query, key, value), torch.ones_like(got))
        due = tree_kernel.attend_by_mask(query, key, value, segments, scaling=None, window=None)
        assert (got - due).abs().max() <= tree_kernel.TOLERANCE * due.abs().max()
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert made[-1] == made[3], made


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, tree_kernel.PROBE_WINDOW])
def test_flex_attention_in_its_plain_form_attends_by_the_mask(window: int | None) -> None:
    """On the CPU it has no backward pass; `tree_kernel.compare` looks at gradients where it runs."""
    draw, segments = torch.Generator().manual_seed(0), Segments(tree_kernel.PROBE.lengths, tree_kernel.PROBE.parents)
    query, key, value = (torch.randn(1, heads, sum(segments.lengths), 16, generator=draw) for heads in (4, 2, 2))
    due = tree_kernel.attend_by_mask(query, key, value, segments, scaling=0.3, window=window)
    torch.testing.assert_close(tree_kernel.attend(query, key, value, segments, scaling=0.3, window=window), due)


class InDouble(TorchFunctionMode):
    """Leaves float64 as it is where a model's code asks for float32, as norms and softmax do: what remains is arithmetic alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func is Tensor.to and args[0].dtype == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        if named.get("dtype") is torch.float32 and func is torch.nn.functional.softmax:
            named["dtype"] = torch.float64
        return func(*args, **named)


@contextmanager
def without_rounding(exact: bool) -> Iterator[None]:
    if not exact:
        yield
        return
    with InDouble():
        yield


FAMILIES = {
    "qwen3": {},
    "llama": {},
    "gemma3_text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 7},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("family", now(list(FAMILIES), "qwen3", "gemma3_text"))
def test_a_model_in_exact_float64_gives_the_gradient_of_samples_apart(tmp_path: Path, family: str) -> None:
    """1e-12: nothing but sums in another order is left. Windows are shorter than trunks."""
    write_model(tmp_path, family, **FAMILIES[family])
    _, scorer = load_scorer(ModelConfig(str(tmp_path), dtype="float64"))
    scorer.refuse_rows_unless_supported("tree")
    scorer.eval()
    for seed, depth in ((0, 1), (1, 4)):
        columns = make_columns(seed, depth=depth)
        with without_rounding(exact=True):
            due, expected = losses_and_gradients(scorer, columns, PackedCollator(), Layout())
            for layout in (Layout(), Layout(micro_batch_tokens=70), Layout(dp=2, micro_batch_tokens=120)):
                got, gradients = losses_and_gradients(scorer, columns, TreeCollator(), layout)
                assert got.keys() == due.keys()
                for sample, values in due.items():
                    torch.testing.assert_close(got[sample], values, rtol=1e-11, atol=1e-11)
                for name, gradient in expected.items():
                    worst = (gradients[name] - gradient).abs().max() / gradient.abs().max()
                    assert worst <= 1e-12, (layout, name, float(worst))


def test_samples_that_share_nothing_give_the_bits_of_packed_rows(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    _, scorer = load_scorer(ModelConfig(str(tmp_path)))
    numbers = np.random.default_rng(0)
    columns = SampleColumns.from_lists(
        input_ids=[numbers.integers(1, VOCABULARY, length) for length in (5, 30, 18, 40)], num_actions=[3, 12, 9, 20]
    )
    packed, gradients = losses_and_gradients(scorer, columns, PackedCollator(policy="concat"), Layout(micro_batch_tokens=100))
    tree, others = losses_and_gradients(scorer, columns, TreeCollator(), Layout(micro_batch_tokens=100))
    for sample, values in packed.items():
        assert torch.equal(values, tree[sample])
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_model_that_drops_numbers_is_refused_while_planning(tmp_path: Path) -> None:
    write_model(tmp_path / "dropping", "llama", attention_dropout=0.1)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn\.attention_dropout drops at the rate 0\.1"):
        check_loading(ModelConfig(str(tmp_path / "dropping")), "tree")
    check_loading(ModelConfig(str(tmp_path / "dropping")), "packed")
    write_model(tmp_path / "plain", "llama")
    check_loading(ModelConfig(str(tmp_path / "plain")), "tree")
    with pytest.raises(UnsupportedError, match="drops at the rate"):
        check_loading(ModelConfig(str(tmp_path / "plain"), lora=LoraConfig(rank=2, dropout=0.2)), "tree")


def test_a_model_whose_layers_keep_a_state_is_refused_while_planning(tmp_path: Path) -> None:
    write_model(tmp_path, "jamba", mamba_d_state=4)
    with pytest.raises(UnsupportedError, match="tree rows"):
        check_loading(ModelConfig(str(tmp_path)), "tree")
