"""The model by definition scores what transformers makes of a directory, in float64, mixtures of experts too."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_engine.modeling.tiny import VOCABULARY, make_parts_differ, write_model
from skyrl_engine.proof.plain_model import PlainModel

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(("family", "settings"), [("qwen3", {}), ("qwen3_moe", EXPERTS)])
def test_float64_is_float32_but_for_rounding(tmp_path: Path, family: str, settings: dict[str, int]) -> None:
    """Log-probabilities of a sequence, and a gradient of theirs for every parameter that the tokens reach."""
    write_model(tmp_path, family, **settings)
    make_parts_differ(tmp_path)
    input_ids = torch.arange(3, 40, 3) % VOCABULARY
    logits = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(input_ids[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, input_ids[1:, None])[:, 0]
    model = PlainModel.load(str(tmp_path))
    logprobs = model.scores(input_ids)["logprobs"]
    assert logprobs.dtype == torch.float64
    torch.testing.assert_close(logprobs.float(), expected, rtol=1e-4, atol=1e-4)
    logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters.values())
