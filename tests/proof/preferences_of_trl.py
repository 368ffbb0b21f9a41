"""Losses of pairs beside TRL's own DPOTrainer on one model and batch: loss and gradient of every parameter. Part of `nox -s peers`.

TRL computes a whole step by itself, from its collator's batch to its loss; ours is given log-probabilities of the same tokens. The policy is
its reference with noise on every weight, so that no ratio is 0. Both compute in float32: 1e-5 of the largest gradient is a few dozen roundings.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from skyrl_engine.contracts import LossTokens, Pairs, Sequences
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine_losses import plugin
from skyrl_engine_losses.preference import DpoConfig

BETA, SMOOTHING, TOLERANCE = 0.3, 0.2, 1e-5
FORMS: dict[str, DpoConfig] = {
    "sigmoid": DpoConfig(beta=BETA),
    "hinge": DpoConfig(form="hinge", beta=BETA),
    "ipo": DpoConfig(form="ipo", beta=BETA, length_normalized=True),
    "robust": DpoConfig(form="robust", beta=BETA, label_smoothing=SMOOTHING),
    "apo_zero": DpoConfig(form="apo_zero", beta=BETA),
    "apo_down": DpoConfig(form="apo_down", beta=BETA),
    "sigmoid_norm": DpoConfig(beta=BETA, length_normalized=True),
}
"""TRL's `loss_type`, and what it is called here."""

ROWS = [{"prompt": f"{a} + {a} =", "chosen": f" {2 * a}", "rejected": f" {2 * a + 1} or so"} for a in range(4)]


def logprobs_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[n]: log-probabilities of the completions' tokens, sample after sample."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    scores = logits.float().log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    return scores[batch["completion_mask"][:, 1:].bool()]


def ours(model: Any, reference: Any, batch: dict[str, torch.Tensor], config: DpoConfig) -> torch.Tensor:
    """The objective: every token's value, weighted as `sequence_mean` does."""
    counts = batch["completion_mask"][:, 1:].sum(1)
    samples = len(counts)
    pairs = torch.arange(samples) % (samples // 2)
    roles = (torch.arange(samples) >= samples // 2).long()
    sequences = Sequences(torch.repeat_interleave(torch.arange(samples), counts), counts, pairs, pairs, roles)
    with torch.no_grad():
        known = logprobs_of(reference, batch)
    needs = {"logprobs": logprobs_of(model, batch), "ref_logprobs": known}
    output = plugin.dpo(LossTokens(needs, sequences, torch.Generator, Pairs.of(sequences)), config)
    return (output.token_loss / counts[sequences.index]).sum() / samples


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([each.grad.flatten().clone() for each in model.parameters() if each.grad is not None])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        tokenizer = write_tokenizer(path, [row["prompt"] + row[half] for row in ROWS for half in ("chosen", "rejected")])
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        write_model(path, tokenizer=tokenizer, **sizes)
        for loss_type, config in FORMS.items():
            arguments = DPOConfig(
                folder,
                loss_type=[loss_type],
                beta=BETA,
                label_smoothing=config.label_smoothing,
                per_device_train_batch_size=len(ROWS),
                use_cpu=True,
                bf16=False,
                report_to=[],
                gradient_checkpointing=False,
                disable_tqdm=True,
            )
            trainer = DPOTrainer(str(path), args=arguments, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer)
            model, reference = trainer.model.float(), trainer.ref_model.float()
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
            batch = next(iter(trainer.get_train_dataloader()))
            theirs = trainer.compute_loss(model, dict(batch))
            theirs.backward()
            due = gradient(model)
            model.zero_grad()
            made = ours(model, reference, batch, config)
            made.backward()
            got = gradient(model)
            distance = float((got - due).abs().max() / due.abs().max())
            print(json.dumps({"loss_type": loss_type, "trl": theirs.item(), "ours": made.item(), "gradient": distance}))
            assert abs(made.item() - theirs.item()) <= TOLERANCE * max(1.0, abs(theirs.item())), loss_type
            assert distance <= TOLERANCE, loss_type


if __name__ == "__main__":
    main()
