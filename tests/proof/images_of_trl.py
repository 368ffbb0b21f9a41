"""Preferences about images against TRL's DPOTrainer, in `nox -s peers`: one step of a whole run, from rows with pictures to weights.

TRL's trainer gives the loss and the gradient of every parameter; the run here takes a step of plain SGD, so that weights move by the gradient
times the rate. Both read one model, a reference with noise on every weight, and the same pictures. Both compute in float32: 1e-5 of the largest
gradient is a few dozen roundings.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from trl import DPOConfig, DPOTrainer

from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.preference.trainer import run_preference

sys.path.insert(0, str(Path(__file__).parents[1] / "running"))
from pair_runs import runs_over
from seeing_model import PICTURES, write_seeing_model

BETA, RATE, TOLERANCE = 0.3, 1.0, 1e-5
ASKED = [("a.png",), ("b.png", "c.png"), ("c.png",), ("a.png", "b.png", "c.png")]
ANSWERS = [("a cat", "a dog"), ("it is a tree", "it is a dog"), ("a dog", "a cat"), ("a tree", "it is a cat")]


class ImageProcessor(Qwen3VLProcessor):  # type: ignore[misc] # transformers has no types
    """The model's processor without its part for videos, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **options: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template, **options)


def pair_of(number: int) -> dict[str, Any]:
    """A question about pictures, whose places the parts mark, with a right and a wrong answer."""
    chosen, rejected = ANSWERS[number]
    parts = [*({"type": "image"} for _ in ASKED[number]), {"type": "text", "text": "what is it"}]
    return {
        "prompt": [{"role": "user", "content": parts}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "images": list(ASKED[number]),
    }


def step_of_trl(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient by parameter of TRL's trainer over all rows."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    images = AutoImageProcessor.from_pretrained(folder / "model", use_fast=False)
    processor = ImageProcessor(images, tokenizer, chat_template=tokenizer.chat_template)
    pictures = {name: Image.open(folder / name).convert("RGB") for name in PICTURES}
    rows = [{**pair_of(number), "images": [pictures[name] for name in ASKED[number]]} for number in range(len(ASKED))]
    arguments = DPOConfig(
        str(folder / "trl"),
        per_device_train_batch_size=len(rows),
        beta=BETA,
        max_length=None,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    model, reference = (
        AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float32) for name in ("model", "other")
    )
    trainer = DPOTrainer(model, reference, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=processor)
    loss = trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    return loss.item(), {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


def step_of_ours(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of the step, and the change of every weight over the rate, of a run of one step."""
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair_of(number)) + "\n" for number in range(len(ASKED))))
    ran = run_preference(
        runs_over(folder, "preference", folder)(
            "ours",
            data={"train": str(folder / "pairs.jsonl"), "eval": None},
            loss={"use": "dpo", "beta": BETA},
            reference={"path": str(folder / "other")},
            training={"steps": 1, "batch_size": 2 * len(ASKED), "shuffle": False},
            optimizer={"use": "sgd", "learning_rate": RATE, "max_grad_norm": None, "weight_decay": 0.0},
        )
    )
    (step,) = (row for row in read_metrics(ran.directory / "metrics.jsonl") if row["kind"] == "step")
    before, after = load_file(folder / "model" / "model.safetensors"), load_file(ran.directory / "model" / "model.safetensors")
    return step["metrics"]["loss"], {name: (before[name] - after[name]) / RATE for name in before}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_seeing_model(folder)
        other = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        other.save_pretrained(folder / "other")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"):
            if (folder / "model" / name).exists():
                (folder / "other" / name).write_bytes((folder / "model" / name).read_bytes())
        theirs, due = step_of_trl(folder)
        loss, moved = step_of_ours(folder)
        largest = max(float(part.abs().max()) for part in due.values())
        missing = due.keys() - moved.keys()
        assert not missing, missing
        distance = max(float((moved[name] - part).abs().max()) for name, part in due.items()) / largest
        vision = max(float(part.abs().max()) for name, part in due.items() if "visual" in name) / largest
        print(
            json.dumps({"images": "dpo", "trl": theirs, "ours": loss, "gradient": distance, "of the vision tower": vision}),
            flush=True,
        )
        assert vision > 0, "the pictures have a share in the gradient"
        assert abs(loss - theirs) <= TOLERANCE * max(1.0, abs(theirs))
        assert distance <= TOLERANCE


if __name__ == "__main__":
    main()
