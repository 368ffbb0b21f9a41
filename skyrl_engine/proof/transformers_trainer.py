"""transformers' Trainer as a function of rows and cut, for `prove_trainer`: one optimizer step of learning rate 0, whose gradients are read.

`TrainerStep` is what all adapters of trainers over Trainer share; those of TRL are in `trl_trainers`.
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
from attrs import evolve, frozen

from skyrl_engine.errors import ResultError, UnsupportedError
from skyrl_engine.proof.comparison import Gradients
from skyrl_engine.proof.forwards import watch_forwards
from skyrl_engine.proof.row_kinds import UNTRAINED, Row, find_kind
from skyrl_engine.proof.trainer import TrainerPass, read_gradients
from skyrl_engine.proof.trainer_cuts import TrainerCut
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


class Ranks(Protocol):
    """Processes in one process group of gloo, each of which calls a function; `run` returns the results by rank."""

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]: ...


class BuildTrainer(Protocol):
    """Make a trainer of `model` over `rows`, in the order of the batch. `settings` and `keywords` go to its arguments and to itself."""

    def __call__(
        self, model: Any, rows: Sequence[Row], cut: TrainerCut, settings: Mapping[str, Any], keywords: Mapping[str, Any]
    ) -> Any: ...


@frozen(eq=False)
class TrainerStep:
    """A gradient function: one step of a trainer that `build` makes of a copy of `model`, for rows of one `kind`.

    `start_ranks` returns so many `Ranks`; None refuses cuts of several. On ranks, the model, what `build` holds and the rows are pickled.
    """

    model: Any
    kind: str
    build: BuildTrainer
    start_ranks: Callable[[int], Ranks] | None = None

    def __call__(self, rows: Sequence[Row], cut: TrainerCut) -> TrainerPass:
        if (kind := find_kind(rows[0])) != self.kind:
            raise UnsupportedError(f"the trainer takes {self.kind} rows, and these are {kind} rows", remedy="Give rows of its kind")
        if cut.ranks == 1:
            return self.compute(rows, cut)
        if self.start_ranks is None:
            raise UnsupportedError(
                "this adapter runs in one process",
                remedy="Give start_ranks, such as skyrl_engine.testing.ranks.world.start_shared_world",
            )
        if any(len(members) != cut.micro_batch_rows for rank in cut.divide(len(rows)) for members in rank):
            raise UnsupportedError(
                "accelerate fills up micro-batches that are not even among ranks with rows from the start, so rows would count twice",
                remedy="Give a number of rows that ranks and micro-batches divide",
            )
        passes = self.start_ranks(cut.ranks).run(_compute_on_rank, evolve(self, start_ranks=None), list(rows), cut)
        return TrainerPass(passes[0].gradients, [forward for made in passes for forward in made.forwards])

    def compute(self, rows: Sequence[Row], cut: TrainerCut) -> TrainerPass:
        """Compute the step in this process, which is one of the cut's ranks."""
        from transformers import PrinterCallback, TrainerCallback

        model = deepcopy(self.model)
        read: list[Gradients] = []

        class ReadGradients(TrainerCallback):  # type: ignore[misc] # transformers has no types
            def on_pre_optimizer_step(self, *_given: Any, **_named: Any) -> None:
                read.append(read_gradients(model))

        settings = {
            **FIXED,
            "per_device_train_batch_size": cut.micro_batch_rows,
            "gradient_accumulation_steps": len(cut.divide(len(rows))[0]),
            "use_cpu": next(model.parameters()).device.type == "cpu",
        }
        optimizer = torch.optim.SGD([tensor for tensor in model.parameters() if tensor.requires_grad], lr=0.0)
        keywords = {"callbacks": [ReadGradients()], "optimizers": (optimizer, None)}
        with scratch_folder("trainer") as folder, _keep_random_state(), watch_forwards(model) as forwards:
            trainer = self.build(model, rows, cut, {**settings, "output_dir": str(folder)}, keywords)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        if len(read) != 1:
            raise ResultError(
                f"{cut.name}: the trainer made {len(read)} optimizer steps of the rows instead of one",
                remedy="Let it accumulate all micro-batches before it steps",
            )
        return TrainerPass(read[0], forwards)


def adapt_transformers_trainer(
    model: Any,
    *,
    make: Callable[..., Any] | None = None,
    start_ranks: Callable[[int], Ranks] | None = None,
    **arguments: Any,
) -> TrainerStep:
    """Return the gradient function of transformers' Trainer with a copy of `model`, for `prove_trainer`, over supervised rows.

    `make` makes the trainer (None: `Trainer`): a subclass of it, or a `functools.partial` with what else it needs, such as
    `compute_loss_func`. `arguments` go to `TrainingArguments`. The trainer gets rows that are collated here, by the cut: right or left of their
    padding, or joined by transformers' `DataCollatorWithFlattening`. `start_ranks` as in `TrainerStep`: without it a cut of several ranks
    raises UnsupportedError. Raises UnsupportedError for arguments that the proof chooses.
    """
    refuse_chosen(arguments, CHOSEN, "TrainingArguments")
    return TrainerStep(model, "supervised", partial(_build_trainer, make, arguments), start_ranks)


def refuse_chosen(arguments: Mapping[str, Any], chosen: frozenset[str], where: str) -> None:
    """Raise UnsupportedError for an argument that the proof chooses."""
    if taken := sorted(chosen & set(arguments)):
        raise UnsupportedError(
            f"the proof chooses {taken[0]} of {where} itself", remedy="Leave it out; sizes are the cut's, and one step is made"
        )


def order_for_samplers(rows: Sequence[Row], cut: TrainerCut) -> list[Row]:
    """Return rows as a sequential sampler takes them: accelerate gives each rank a micro-batch in turn."""
    ranks = cut.divide(len(rows))
    return [rows[place] for step in range(len(ranks[0])) for rank in ranks for place in rank[step]]


def _build_trainer(
    make: Callable[..., Any] | None,
    arguments: Mapping[str, Any],
    model: Any,
    rows: Sequence[Row],
    cut: TrainerCut,
    settings: Mapping[str, Any],
    keywords: Mapping[str, Any],
) -> Any:
    from transformers import Trainer, TrainingArguments

    return (make or Trainer)(
        model=model,
        args=TrainingArguments(**{**settings, **arguments}),
        train_dataset=order_for_samplers(rows, cut),
        data_collator=lambda chosen: _collate(chosen, cut),
        **keywords,
    )


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


def _compute_on_rank(step: TrainerStep, rows: Sequence[Row], cut: TrainerCut) -> TrainerPass:
    """Compute a rank's part, in whose process group accelerate finds itself by the variables that torchrun sets."""
    from accelerate.state import AcceleratorState
    from torch.distributed import get_rank, get_world_size

    rank, size = str(get_rank()), str(get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, {**launched, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}):
        AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 - the only way back from an earlier step's number of processes
        try:
            return step.compute(rows, cut)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001


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
