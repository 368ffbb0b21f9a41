"""Parts of this engine beside Lightning's packages, in `nox -s peers`: `interop.hf_collator` feeds Lightning's Trainer, and
`interop.metric_observer` and `interop.hf_callback` let a metric of torchmetrics and a callback observe a real run.

The gradient of Lightning's step is that of the plain model over single rows, float32, to 1e-6 of the whole gradient; what torchmetrics computes
of a run's losses is the mean of the losses in its `metrics.jsonl`.
"""

import json
import logging
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "running"))
from trainer_rows import ROWS

from skyrl_engine.interop import hf_collator
from skyrl_engine.modeling.tiny import make_parts_differ, write_model, write_tokenizer
from skyrl_engine.run.metrics import read_metrics

OBSERVERS = '''
from torchmetrics import MeanMetric
from transformers import TrainerCallback

from skyrl_engine.contracts import StepFinished
from skyrl_engine.interop import hf_callback, metric_observer


def read_loss(event):
    return (event.metrics["loss"], event.metrics["tokens"]) if isinstance(event, StepFinished) else None


class Told(TrainerCallback):
    """Writes what it is told into the run directory."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        with open(f"{args.output_dir}/told.txt", "a") as stream:
            stream.write(f"{state.global_step} of {state.max_steps}: {logs['loss']!r}\\n")


mean_loss = metric_observer(MeanMetric(), read_loss, name="mean_loss", over=None)
told = hf_callback(Told)
'''


class Module(lightning.LightningModule):  # type: ignore[misc] # Lightning's types need its extras
    """A causal language model whose batches are arguments of its forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.gradient = model, torch.zeros(0)

    def training_step(self, batch: dict[str, Any], _number: int) -> torch.Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return] # transformers has no types

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradient = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train_in_lightning(folder: Path, **collator: Any) -> torch.Tensor:
    """Return the gradient of one step over all rows, float32, all parameters in a row."""
    module = Module(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    loader = DataLoader(ROWS, batch_size=len(ROWS), collate_fn=hf_collator(**collator), num_workers=0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(accelerator="cpu", devices=1, max_steps=1, default_root_dir=folder, **quiet).fit(module, loader)
    return module.gradient


def define_gradient(folder: Path) -> torch.Tensor:
    """Return that of the mean over labelled tokens, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = sum(sum(label != -100 for label in row["labels"][1:]) for row in ROWS)
    for row in ROWS:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        (torch.nn.functional.cross_entropy(logits, torch.tensor(row["labels"][1:]), reduction="sum") / tokens).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def observe_a_run(folder: Path) -> None:
    """Train three steps with both observers, and compare what they wrote with the run's own metrics."""
    (folder / "mine.py").write_text(OBSERVERS)
    rows = [{"prompt": "a few", "completion": " words to learn"}, {"prompt": "from here", "completion": " and there"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    observers = json.dumps(["metrics_jsonl", f"{folder / 'mine.py'}:mean_loss", f"{folder / 'mine.py'}:told"])
    command = [sys.executable, "-m", "skyrl_engine", "sft", "--model", str(folder), "--data", str(folder / "train.jsonl")]
    options = ["--steps", "3", "--output", str(folder / "run"), f"run.observers={observers}", "training.batch_size=2"]
    ended = subprocess.run([*command, *options], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    steps = [record["metrics"] for record in read_metrics(folder / "run" / "metrics.jsonl") if record["kind"] == "step"]
    written = [json.loads(line)["value"] for line in (folder / "run" / "mean_loss.jsonl").read_text().splitlines()]
    for count, value in enumerate(written, 1):
        weights = [step["tokens"] for step in steps[:count]]
        due = sum(step["loss"] * weight for step, weight in zip(steps, weights, strict=False)) / sum(weights)
        assert abs(value - due) <= 1e-6 * due, f"{value} after {count} steps, not {due}"
    told = (folder / "run" / "told.txt").read_text().splitlines()
    assert told == [f"{number} of 3: {step['loss']!r}" for number, step in enumerate(steps, 1)]
    print(f"mean losses of torchmetrics: {written}\na callback was told: {told}")


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, "llama")
        make_parts_differ(folder)
        write_tokenizer(folder, ["a few words to learn from here and there"])
        due = define_gradient(folder)
        for collator in ({"collator": "padded"}, {"collator": "packed"}, {"collator": "packed", "varlen": True}):
            distance = float((train_in_lightning(folder, **collator) - due).norm() / due.norm())
            print(f"{collator} in Lightning {lightning.__version__}: {distance:.1e} from the definition")
            assert distance <= 1e-6
        observe_a_run(folder)


if __name__ == "__main__":
    main()
