"""Models that keep residuals or buffers in float32 are computed in bfloat16, or refused when they are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.modeling.parity import check_parity
from skyrl_engine.modeling.precision import computing_in
from skyrl_engine.modeling.tiny import write_model

MAMBA2 = {"num_heads": 8, "head_dim": 12, "expand": 2, "n_groups": 1, "state_size": 8, "chunk_size": 4}
FAMILIES: dict[str, dict[str, Any]] = {"mamba": {}, "mamba2": MAMBA2, "minimax": {}, "qwen3": {}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_load_tries_the_model_in_the_runs_precision(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, family, **FAMILIES[family])
    tried: list[torch.dtype] = []

    def note_name(model: Any, scorer: Any, *, name: str) -> None:
        tried.append(model.get_output_embeddings().weight.dtype)
        check_parity(model, scorer, name=name)

    monkeypatch.setattr("skyrl_engine.modeling.loading.check_parity", note_name)
    model, _ = load_scorer(ModelConfig(str(tmp_path), dtype="bfloat16"))
    assert tried == [torch.float32, torch.bfloat16]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}, "weights stay as they were read"


def test_a_model_whose_code_cannot_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its buffers in bfloat16, MiniMax multiplies matrices of two precisions."""
    write_model(tmp_path, "minimax")
    monkeypatch.setattr("skyrl_engine.modeling.loading.compute_buffers_in", lambda *_: None)
    with pytest.raises(ModelError, match=r"\(MiniMaxForCausalLM\) cannot be computed in bfloat16: .*dtype") as caught:
        load_scorer(ModelConfig(str(tmp_path), dtype="bfloat16"))
    assert "float32" in caught.value.remedy


def test_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    model, scorer = load_scorer(ModelConfig(str(tmp_path)))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    ids, seen = torch.arange(1, 7)[None], []
    scorer.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with computing_in(scorer, torch.bfloat16), torch.no_grad():
        scorer({"input_ids": ids}, torch.arange(5), ids[0, 1:])
    assert seen == [torch.bfloat16]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.dtype == torch.float32


def test_frequencies_stay_float32(tmp_path: Path) -> None:
    write_model(tmp_path, "minimax")
    model, _ = load_scorer(ModelConfig(str(tmp_path), dtype="bfloat16"))
    dtypes = {name.rpartition(".")[2]: buffer.dtype for name, buffer in model.named_buffers()}
    assert (dtypes["inv_freq"], dtypes["slope_rate"]) == (torch.float32, torch.bfloat16)
