"""`interop.hf_loss` in TRL's SFTTrainer, in `nox -s peers`: the gradient of an optimizer step, however it is accumulated.

With cross-entropy and token_mean it is SFTTrainer's own, float32, to 1e-6 of the whole gradient.
"""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from skyrl_engine.interop import hf_loss
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

ROWS = [
    {"prompt": "a few", "completion": " words"},
    {"prompt": "a", "completion": " few words to learn"},
    {"prompt": "to learn", "completion": " from here and there"},
    {"prompt": "here", "completion": " and"},
]
CUTS = ((4, 1), (2, 2), (1, 4))
"""Rows of a micro-batch, and micro-batches of the step."""


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, "llama")
        write_tokenizer(folder, ["a few words to learn from here and there"])
        whole = find_gradient(folder, None, *CUTS[0])
        for rows, steps in CUTS:
            distance = float((find_gradient(folder, hf_loss(), rows, steps) - whole).norm() / whole.norm())
            print(f"{rows} rows, {steps} micro-batches: {distance:.1e} from SFTTrainer's own gradient of all rows at once")
            assert distance <= 1e-6
        for rows, steps in CUTS:
            print(f"focal, {rows} rows, {steps} micro-batches: {find_gradient(folder, hf_loss('focal'), rows, steps).norm():.7f}")


def find_gradient(
    folder: Path, compute_loss: Any, rows: int, steps: int, *, collator: Any = None, padding_free: bool = False
) -> torch.Tensor:
    """Return the gradient of one step of SFTTrainer, float32, all parameters in a row; None stands for its own loss and collator."""
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
    own = {"compute_loss_func": compute_loss, "data_collator": collator}
    Watched(model=model, args=arguments, train_dataset=Dataset.from_list(ROWS), **own).train()
    return found[-1]


if __name__ == "__main__":
    main()
