"""The kernel that `model.attention` names: what it is asked, where it is refused, and that all forms of rows go by it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.ragged import Ragged
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling import attention_kernel, document_kernel, tree_kernel
from skyrl_engine.modeling.attention_kernel import attend_segments, refuse_kernel
from skyrl_engine.modeling.load_check import check_loading
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.modeling.micro_batch import score
from skyrl_engine.modeling.segments import Segments
from skyrl_engine.modeling.tiny import make_parts_differ, write_model

DOCUMENTS, TREE = Segments((3, 4)), Segments((3, 2, 2), (-1, 0, 0))


class Recorded:
    """A kernel that takes everything, or nothing, and records that it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, right: bool) -> None:
        self.called: list[str] = []
        for module, name in ((document_kernel, "flash"), (tree_kernel, "flex")):
            monkeypatch.setattr(module, "takes", lambda *_, **__: right)
            monkeypatch.setattr(module, "attend", lambda *_, name=name, **__: self.called.append(name))
        monkeypatch.setattr(attention_kernel, "attend_runs", lambda *_, **__: self.called.append("sdpa"))


def attend(kernel: Any, segments: Segments, *, on_cuda: bool = True, **options: Any) -> Any:
    query: Any = SimpleNamespace(is_cuda=on_cuda, shape=(1, 4, 7, 8), dtype=torch.bfloat16, device="cuda:0")
    return attend_segments(kernel, query, query, query, segments, lambda *_: torch.zeros(0), scaling=None, window=None, **options)


@pytest.mark.parametrize(
    ("kernel", "of_documents", "of_trees"), [("auto", "flash", "flex"), ("sdpa", "sdpa", "sdpa"), ("flex", "flex", "flex")]
)
def test_each_kernel_attends_to_the_rows_that_it_serves(
    monkeypatch: pytest.MonkeyPatch, kernel: str, of_documents: str, of_trees: str
) -> None:
    recorded = Recorded(monkeypatch, right=True)
    attend(kernel, DOCUMENTS)
    attend(kernel, TREE)
    assert recorded.called == [of_documents, of_trees]


def test_documents_go_by_flex_attention_where_flash_attention_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch before 2.13 has no flash attention over documents with grouped heads."""
    recorded = Recorded(monkeypatch, right=True)
    monkeypatch.setattr(document_kernel, "takes", lambda *_, **__: False)
    attend("auto", DOCUMENTS)
    attend("auto", DOCUMENTS, dropout=0.1)
    with pytest.raises(UnsupportedError, match="varlen_attn does not compute"):
        attend("flash", DOCUMENTS)
    assert recorded.called == ["flex", "sdpa"]


def test_a_chosen_kernel_that_is_not_right_is_an_error_where_auto_takes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch, right=False)
    for segments in (DOCUMENTS, TREE):
        attend("auto", segments)
        attend("sdpa", segments)
    assert recorded.called == ["sdpa"] * 4
    for kernel, library in (("flash", "varlen_attn"), ("flex", "FlexAttention")):
        with pytest.raises(UnsupportedError, match=f"{library} does not compute 4 heads of 8 numbers in bfloat16"):
            attend(kernel, DOCUMENTS)
        # checks of a model while it is loaded run on the CPU, for whatever device it is
        attend(kernel, DOCUMENTS, on_cuda=False)
    assert recorded.called == ["sdpa"] * 6


@pytest.mark.parametrize(
    ("attention", "device", "dtype", "rows", "why"),
    [
        ("flash", "cpu", "bfloat16", "packed", "runs on CUDA devices alone"),
        ("flex", "cpu", "bfloat16", "tree", "no backward pass on the CPU"),
        ("flash", "cuda:0", "float32", "packed", "model.dtype is float32"),
        ("flex", "cuda:0", "float64", "packed", "model.dtype is float64"),
        ("flash", "cuda:0", "bfloat16", "tree", "shared prefixes"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_by_name(attention: Any, device: str, dtype: Any, rows: Any, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why) as met:
        refuse_kernel(ModelConfig("m", attention=attention, dtype=dtype), device, rows)
    assert f'model.attention = "{attention}"' in met.value.cause
    for other in ("auto", "sdpa"):
        refuse_kernel(ModelConfig("m", attention=other, dtype=dtype), device, rows)


def test_a_torch_without_the_flash_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig("m", attention="flash", dtype="bfloat16")
    refuse_kernel(model, "cuda:0", "packed")
    monkeypatch.setattr(document_kernel, "load_kernel", lambda: None)
    with pytest.raises(UnsupportedError, match="has no varlen_attn"):
        refuse_kernel(model, "cuda:0", "packed")


def padded_batch() -> MicroBatch:
    ids = torch.randint(1, 128, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    positions = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8])
    lengths = Ragged.from_list([[6], [4]], np.int64)
    return MicroBatch({"input_ids": ids, "attention_mask": mask}, positions, ids.flatten()[positions + 1], lengths, None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_rows_of_one_sequence_go_by_the_kernel_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: Any) -> None:
    """FlexAttention runs in its plain form on the CPU, without gradients."""
    write_model(tmp_path)
    make_parts_differ(tmp_path)
    results, rows = [], []
    for chosen in ("auto", attention):
        _, scorer = load_scorer(ModelConfig(str(tmp_path), attention=chosen))
        if chosen == "flex":
            monkeypatch.setattr(tree_kernel, "takes", lambda query, *_, **__: rows.append(len(query)) or True)
        objective: Any = SimpleNamespace(needs=("logprobs",), temperature=1.0)
        with torch.no_grad():
            scores = score(
                scorer,
                padded_batch(),
                objective,
                computes=scorer.computes,
                vocabulary=128,
                device=torch.device("cpu"),
                backend="fsdp",
                one_row=scorer.one_row,
            )
        results.append(scores["logprobs"])
    assert rows == ([1, 1] if attention == "flex" else []), "one row of both sequences in each of two layers"
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_a_model_with_attention_of_its_own_is_refused_while_planning(tmp_path: Path) -> None:
    write_model(tmp_path, "mamba")
    with pytest.raises(UnsupportedError, match=r'model.attention = "sdpa", and .* keeps its own attention'):
        check_loading(ModelConfig(str(tmp_path), attention="sdpa"), "padded")
    check_loading(ModelConfig(str(tmp_path)), "padded")
