"""Through the engine: another backend and other layouts, named in the same configuration, give one loss curve; exports load."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import rarely
from megatron_tasks import save_tiny
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from skyrl_engine import UnsupportedError
from skyrl_engine.config import ResolvedConfig, from_dict, resolve
from skyrl_engine.training.export import export_checkpoint
from skyrl_engine.training.sft.trainer import run_sft

pytestmark = pytest.mark.usefixtures("without_ray")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model/`, tokenizer and all, and `train.jsonl`: sums of one-digit numbers."""
    directory = tmp_path_factory.mktemp("material")
    rows = [{"prompt": f"{first} + {second} =", "completion": f" {first + second}"} for first in range(6) for second in range(6)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:23]))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=64, special_tokens=["<unk>", "<pad>", "<end>"], show_progress=False)
    tokenizer.train_from_iterator([row["prompt"] + row["completion"] for row in rows], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<end>")
    save_tiny(directory / "model", "qwen3", tied=True, vocab_size=len(wrapped), pad_token_id=wrapped.pad_token_id)
    wrapped.save_pretrained(directory / "model")
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "vocab_size": len(wrapped)}
    save_tiny(directory / "mixture", "qwen3_moe", tied=True, pad_token_id=wrapped.pad_token_id, **sizes)
    wrapped.save_pretrained(directory / "mixture")
    return directory


def build_config(material: Path, run: Path, ranks: int, backend: dict[str, Any], **changes: dict[str, Any]) -> ResolvedConfig:
    """Ten steps of AdamW with clipping and a schedule."""
    table: dict[str, dict[str, Any]] = {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl"), "cache": str(material / "cache")},
        "run": {"seed": 5, "device": "cpu", "directory": str(run), "ranks": ranks, "launch": "inline" if ranks == 1 else "ray"},
        "training": {"steps": 10, "batch_size": 8, "micro_batch_rows": 3},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "schedule": "cosine"},
        "checkpoint": {"every": "none", "at_end": False},
        "backend": backend,
    }
    for key, change in changes.items():
        table[key] = {**table.get(key, {}), **change}
    return resolve(from_dict(table, "test"))


def curve(config: ResolvedConfig) -> Any:
    """float64[10, 2]: loss and gradient norm of every step."""
    result = run_sft(config)
    records = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [record["metrics"] for record in records if record["kind"] == "step"]
    assert len(steps) == 10
    return np.array([[step["loss"], step["grad_norm"]] for step in steps])


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "dp2": (2, {}),
    "tp2xpp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
}
PACKING: dict[str, dict[str, Any]] = {
    "collator": {"use": "packed"},
    "training": {"micro_batch_rows": None, "micro_batch_tokens": 64},
}


@pytest.fixture(scope="module")
def expected(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The curve of fsdp on one rank."""
    return curve(build_config(material, tmp_path_factory.mktemp("runs") / "fsdp", 1, {"use": "fsdp"}))


def test_one_rank_learns_as_fsdp_does(material: Path, tmp_path: Path, expected: Any) -> None:
    assert expected[-1, 0] < expected[0, 0]
    np.testing.assert_allclose(curve(build_config(material, tmp_path / "megatron", 1, {"use": "megatron"})), expected, rtol=1e-4)


def test_losses_of_routers_do_not_depend_on_the_cut(material: Path, tmp_path: Path) -> None:
    """The first step of two cuts shows what the engine tells the backend of a step, and what it reports of the routers."""
    backend = {"use": "megatron", "router_balance_coefficient": 10.0, "router_z_coefficient": 1.0}
    changes = {"model": {"path": str(material / "mixture")}, "optimizer": {"warmup_steps": 0}}
    results = []
    for name, cut in (("rows", {"training": {}}), ("packed", PACKING)):
        training = {**cut["training"], "steps": 1}
        result = run_sft(build_config(material, tmp_path / name, 1, backend, **{**changes, **cut, "training": training}))
        records = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
        (step,) = [record["metrics"] for record in records if record["kind"] == "step"]
        results.append({key: value for key, value in step.items() if key in ("loss", "grad_norm") or key.startswith("router")})
    assert results[0].keys() == {"loss", "grad_norm", "router_balance", "router_z", *(f"router_load/{layer}" for layer in range(4))}
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_a_layout_that_cannot_be_is_refused_while_planning(material: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="3 ranks cannot be laid out as tensor_parallel = 2"):
        run_sft(build_config(material, tmp_path, 3, {"use": "megatron", "tensor_parallel": 2}))
    with pytest.raises(UnsupportedError, match="needs the capability 'load_in_4bit', which backend megatron does not declare"):
        run_sft(build_config(material, tmp_path, 1, {"use": "megatron"}, model={"lora": {"rank": 2, "load_in_4bit": True}}))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("layout", "collator"),
    [("tp2xpp2", "packed"), *(rarely(layout, "padded") for layout in ("tp2", "pp2", "dp2")), rarely("cp2", "packed")],
)
def test_every_layout_gives_the_curve_of_fsdp(material: Path, tmp_path: Path, expected: Any, layout: str, collator: str) -> None:
    """Gradients of different cuts agree to about 1e-6; AdamW's division by the root of the second moment magnifies that where a gradient is
    close to 0, so after ten steps the losses agree to 1e-4 and not to the last bit.
    """
    ranks, sizes = LAYOUTS[layout]
    config = build_config(material, tmp_path, ranks, {"use": "megatron", **sizes}, **(PACKING if collator == "packed" else {}))
    np.testing.assert_allclose(curve(config), expected, rtol=1e-4)


@pytest.mark.proof
def test_a_run_over_ranks_is_exported_on_one(material: Path, tmp_path: Path) -> None:
    """By `skyrl-engine export`, which starts one rank whatever the run had; equal to the model that the run wrote itself."""
    config = build_config(
        material, tmp_path / "run", 2, {"use": "megatron", "tensor_parallel": 2}, checkpoint={"every": 5, "at_end": True}
    )
    result = run_sft(config)
    export_checkpoint(result.directory, tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    start = AutoModelForCausalLM.from_pretrained(material / "model")
    assert not torch.equal(exported.lm_head.weight, start.lm_head.weight)
    assert exported.lm_head.weight.data_ptr() == exported.model.embed_tokens.weight.data_ptr()
