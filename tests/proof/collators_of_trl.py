"""`interop.hf_collator` in TRL's SFTTrainer, in `nox -s peers`: the gradient of a step is that of SFTTrainer's own collator, padded and packed.

float32, to 1e-6 of the whole gradient, however the step is accumulated.
"""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from own_losses_of_trl import ROWS
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from skyrl_engine.interop import hf_collator
from skyrl_engine.modeling.tiny import make_parts_differ, write_model, write_tokenizer

WAYS = (("padded", {}, 4, 1), ("padded", {}, 2, 2), ("packed", {}, 2, 2), ("packed", {"varlen": True}, 4, 1))


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, "llama")
        make_parts_differ(folder)
        write_tokenizer(folder, ["a few words to learn from here and there"])
        for padding_free in (False, True):
            theirs = find_gradient(folder, None, 4, 1, padding_free=padding_free)
            for collator, options, rows, steps in WAYS:
                ours = find_gradient(folder, hf_collator(collator, **options), rows, steps)
                distance = float((ours - theirs).norm() / theirs.norm())
                print(
                    f"{collator} {options}, {rows} rows x {steps}: {distance:.1e} from SFTTrainer's own, padding_free = {padding_free}"
                )
                assert distance <= 1e-6


def find_gradient(folder: Path, collator: Any, rows: int, steps: int, *, padding_free: bool = False) -> torch.Tensor:
    """Return the gradient of one step of SFTTrainer, float32, all parameters in a row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[torch.Tensor] = []

    class Watched(SFTTrainer):  # type: ignore[misc] # TRL has no types
        def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
            optimizer = super().create_optimizer(*arguments, **options)
            optimizer.register_step_pre_hook(lambda *_: found.append(torch.cat([p.grad.flatten() for p in model.parameters()])))
            return optimizer

    arguments = SFTConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=steps,
        max_steps=1,
        learning_rate=0.0,
        max_grad_norm=0.0,
        max_length=None,
        padding_free=padding_free,
        train_sampling_strategy="sequential",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    Watched(model=model, args=arguments, train_dataset=Dataset.from_list(ROWS), data_collator=collator).train()
    return found[-1]


if __name__ == "__main__":
    main()
