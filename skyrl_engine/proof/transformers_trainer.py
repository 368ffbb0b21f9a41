"""transformers' Trainer as a function of rows and cut, for `prove_trainer`: one optimizer step of learning rate 0, whose gradients are read."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from skyrl_engine.errors import ResultError, UnsupportedError
from skyrl_engine.proof.comparison import Gradients
from skyrl_engine.proof.trainer import GradientFunction, read_gradients
from skyrl_engine.proof.trainer_cuts import UNTRAINED, Row, TrainerCut
from skyrl_engine.scratch import scratch_folder

FIXED: Mapping[str, Any] = {
    "learning_rate": 0.0,
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "weight_decay": 0.0,
    "train_sampling_strategy": "sequential",
    "remove_unused_columns": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
"""Arguments of the one step. `per_device_train_batch_size` and `gradient_accumulation_steps` are the cut's."""

CHOSEN = frozenset((*FIXED, "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "use_cpu"))


def adapt_transformers_trainer(model: Any, *, make: Callable[..., Any] | None = None, **arguments: Any) -> GradientFunction:
    """Return the gradient function of transformers' Trainer with `model`, for `prove_trainer`.

    `make` makes the trainer (None: `Trainer`): a subclass of it, or a `functools.partial` with what else it needs, such as
    `compute_loss_func`. `arguments` go to `TrainingArguments`. The trainer gets rows that are collated here, by the cut: right or left of their
    padding, or joined by transformers' `DataCollatorWithFlattening`. It runs in this process: a cut of several ranks raises UnsupportedError.
    Raises UnsupportedError for arguments that the proof chooses.
    """
    if taken := sorted(CHOSEN & set(arguments)):
        raise UnsupportedError(
            f"the proof chooses {taken[0]} of TrainingArguments itself",
            remedy="Leave it out; sizes are the cut's, and one step is made",
        )

    def gradients(rows: Sequence[Row], cut: TrainerCut) -> Gradients:
        if cut.ranks > 1:
            raise UnsupportedError("this adapter runs in one process", remedy="Start ranks yourself, and return a TrainerPass")
        with scratch_folder("trainer") as folder, _keep_random_state():
            return _step(model, make, rows, cut, {**FIXED, **arguments, "output_dir": str(folder)})

    return gradients


def _step(
    model: Any, make: Callable[..., Any] | None, rows: Sequence[Row], cut: TrainerCut, arguments: Mapping[str, Any]
) -> Gradients:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    read: list[Gradients] = []

    class ReadGradients(TrainerCallback):  # type: ignore[misc] # transformers has no types
        def on_pre_optimizer_step(self, *_given: Any, **_named: Any) -> None:
            read.append(read_gradients(model))

    (micro_batches,) = cut.divide(len(rows))
    settings = TrainingArguments(
        per_device_train_batch_size=cut.micro_batch_rows,
        gradient_accumulation_steps=len(micro_batches),
        use_cpu=next(model.parameters()).device.type == "cpu",
        **arguments,
    )
    caches = model.config.use_cache  # which Trainer sets
    trainer = (make or Trainer)(
        model=model,
        args=settings,
        train_dataset=list(rows),
        data_collator=lambda chosen: _collate(chosen, cut),
        callbacks=[ReadGradients()],
        optimizers=(torch.optim.SGD([tensor for tensor in model.parameters() if tensor.requires_grad], lr=0.0), None),
    )
    trainer.remove_callback(PrinterCallback)
    was_training = model.training
    try:
        trainer.train()
    finally:
        model.train(was_training)
        model.config.use_cache = caches
        model.zero_grad()
    if len(read) != 1:
        raise ResultError(
            f"{cut.name}: the trainer made {len(read)} optimizer steps of the rows instead of one",
            remedy="Let it accumulate all micro-batches before it steps",
        )
    return read[0]


def _collate(rows: Sequence[Row], cut: TrainerCut) -> Mapping[str, torch.Tensor]:
    """Return int64[B, T] `input_ids` and `labels`, and with padding `attention_mask`, without it `position_ids`."""
    if cut.form == "packed":
        from transformers import DataCollatorWithFlattening

        plain = [{name: list(row[name]) for name in ("input_ids", "labels")} for row in rows]
        joined: Mapping[str, torch.Tensor] = DataCollatorWithFlattening()(plain)
        return joined
    longest = max(len(row["input_ids"]) for row in rows) + cut.extra_padding
    filling = {"input_ids": 0, "labels": UNTRAINED, "attention_mask": 0}
    padded = {name: torch.full((len(rows), longest), value) for name, value in filling.items()}
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        own = slice(longest - length, None) if cut.padding_side == "left" else slice(length)
        padded["input_ids"][place, own] = torch.as_tensor(row["input_ids"])
        padded["labels"][place, own] = torch.as_tensor(row["labels"])
        padded["attention_mask"][place, own] = 1
    return padded


@contextmanager
def _keep_random_state() -> Iterator[None]:
    """Set the global generators back that Trainer seeds."""
    state, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numbers)
