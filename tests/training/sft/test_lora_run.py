"""A run that trains adapters: what it learns, what it leaves, how it resumes, and the backends that cannot."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.testing.adapters import with_adapter
from skyrl_engine.training.export import export_checkpoint
from skyrl_engine.training.sft.trainer import plan_sft, run_sft

Configure = Callable[..., ResolvedConfig]

LORA = {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"], "dropout": 0.1}


def losses(directory: Path) -> list[float]:
    return [record["metrics"]["loss"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]


def load_adapters(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def test_a_run_learns_adapters_resumes_exactly_and_leaves_them_for_peft(
    configure: Configure, material: Path, tmp_path: Path
) -> None:
    model = {"path": str(material / "model"), "lora": LORA}
    constant = {"schedule": "constant"}  # a shorter training has the rates of a longer one's beginning
    whole = run_sft(configure("whole", model=model, optimizer=constant)).directory
    run_sft(configure("interrupted", model=model, optimizer=constant, training={"steps": 4}))
    run = run_sft(configure("interrupted", model=model, optimizer=constant), resume=True).directory
    assert losses(run) == losses(whole)
    assert np.mean(losses(whole)[-3:]) < np.mean(losses(whole)[:3])
    adapters = load_adapters(whole / "model")
    assert len(adapters) == 2 * 3 * 2
    assert all(torch.equal(adapters[name], tensor) for name, tensor in load_adapters(run / "model").items())
    export_checkpoint(whole, tmp_path / "exported")
    assert all(torch.equal(adapters[name], tensor) for name, tensor in load_adapters(tmp_path / "exported").items())

    ids = AutoTokenizer.from_pretrained(whole / "model")("1 + 2 = 3", return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(material / "model").eval()
    before = base(ids).logits
    assert not torch.allclose(with_adapter(base, str(whole / "model")).eval()(ids).logits, before)

    more = run_sft(configure("more", model={**model, "lora": {"path": str(whole / "model")}}, training={"steps": 2})).directory
    assert losses(more)[0] < losses(whole)[0]
    assert load_adapters(more / "model").keys() == adapters.keys()


@pytest.mark.proof
@pytest.mark.usefixtures("without_ray")
def test_two_ranks_learn_the_adapters_of_one(configure: Configure, material: Path, tmp_path: Path) -> None:
    """The same losses and gradient norms, and the same adapters to rounding; without dropout, of which two ranks draw other masks."""
    directory = tmp_path / "model"
    shutil.copytree(material / "model", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    model = {"path": str(directory), "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}}
    short = {
        "training": {"steps": 3},
        "optimizer": {"warmup_steps": 0, "epsilon": 0.1},
        "checkpoint": {"every": "none"},
    }
    alone, together = (
        run_sft(configure(name, model=model, run=run, **short)).directory
        for name, run in (("alone", {}), ("together", {"launch": "ray", "ranks": 2}))
    )
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    adapters = load_adapters(alone / "model")
    assert any(tensor.abs().max() > 0 for name, tensor in adapters.items() if ".lora_B." in name)
    for name, tensor in load_adapters(together / "model").items():
        torch.testing.assert_close(tensor, adapters.pop(name), rtol=1e-4, atol=1e-6)
    assert not adapters


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": {"use": "megatron"}},
        {"backend": {"tensor_parallel": 2}, "run": {"launch": "ray", "ranks": 2}},
    ],
    ids=["megatron", "fsdp-tensor-parallel"],
)
def test_a_layout_that_trains_no_adapters_is_refused_while_planning(
    configure: Configure, material: Path, changes: dict[str, dict[str, object]]
) -> None:
    with pytest.raises(UnsupportedError, match=r"the run needs the capability 'lora', which backend .* does not declare") as caught:
        plan_sft(configure(model={"path": str(material / "model"), "lora": LORA}, **changes))
    assert caught.value.remedy.startswith("Remove model.lora, or choose a backend and a layout that train adapters")
