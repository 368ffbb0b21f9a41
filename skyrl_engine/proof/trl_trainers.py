"""TRL's SFTTrainer, DPOTrainer and GRPOTrainer as functions of rows and cut, for `prove_trainer`.

Each is the real trainer with its own collator; tokens are given, so nothing is tokenized or sampled. `tokenizer` only gives the token that
pads. `arguments` go to the trainer's config, `make` makes the trainer: a subclass, or a `functools.partial` with what else it needs.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.proof.row_kinds import Row, list_groups, list_sequences
from skyrl_engine.proof.trainer_cuts import TrainerCut
from skyrl_engine.proof.transformers_trainer import CHOSEN, Ranks, TrainerStep, order_for_samplers, refuse_chosen

DEFAULTS: Mapping[str, Any] = {"bf16": False, "gradient_checkpointing": False}
"""Arguments in the place of TRL's defaults, which the caller may change: bfloat16 is no type for a proof."""

OF_CUTS: Mapping[str, frozenset[str]] = {
    "SFTConfig": CHOSEN | {"packing", "padding_free", "pad_to_multiple_of", "max_length", "shuffle_dataset"},
    "DPOConfig": CHOSEN | {"padding_free", "pad_to_multiple_of", "max_length", "precompute_ref_log_probs"},
    "GRPOConfig": CHOSEN
    | {"num_generations", "pad_to_multiple_of", "steps_per_generation", "generation_batch_size", "shuffle_dataset"},
}
"""Arguments that the proof chooses: those of Trainer, and those that follow from rows and cut."""

Make = Callable[..., Any]
StartRanks = Callable[[int], Ranks]


def adapt_sft_trainer(
    model: Any, tokenizer: Any, *, make: Make | None = None, start_ranks: StartRanks | None = None, **arguments: Any
) -> TrainerStep:
    """Return the gradient function of SFTTrainer over supervised rows. A packed cut is `padding_free`.

    TRL pads on the right; for a cut that pads on the left, the rows of its batch are moved. Raises UnsupportedError for arguments that the
    proof chooses.
    """
    refuse_chosen(arguments, OF_CUTS["SFTConfig"], "SFTConfig")
    return TrainerStep(model, "supervised", partial(_build_sft, make, tokenizer, arguments), start_ranks)


def adapt_dpo_trainer(
    model: Any,
    tokenizer: Any,
    *,
    reference: Any,
    make: Make | None = None,
    start_ranks: StartRanks | None = None,
    **arguments: Any,
) -> TrainerStep:
    """Return the gradient function of DPOTrainer over preferences, of which each is two sequences of a forward pass.

    `reference` is the frozen model; it should differ from `model`, or all log-ratios are 0. TRL pads on the right; for a cut that pads on the
    left, the rows of its batch are moved. Packed cuts raise UnsupportedError when they are computed: 1.16 has switched `padding_free` off.
    Raises UnsupportedError for arguments that the proof chooses.
    """
    refuse_chosen(arguments, OF_CUTS["DPOConfig"], "DPOConfig")
    return TrainerStep(model, "preference", partial(_build_dpo, make, tokenizer, reference, arguments), start_ranks)


def adapt_grpo_trainer(
    model: Any, tokenizer: Any, *, make: Make | None = None, start_ranks: StartRanks | None = None, **arguments: Any
) -> TrainerStep:
    """Return the gradient function of GRPOTrainer over rollouts, which its `rollout_func` gives it in the place of sampling.

    Rollouts of a prompt stand one after the other, equally many of each prompt. Prompts are padded on the left and completions on the right, as
    TRL does, and the trainer shuffles a rank's rollouts before it cuts them. `max_completion_length` is that of the longest completion unless
    `arguments` name it. Packed cuts, and those with a smaller last micro-batch, raise UnsupportedError when they are computed. Raises
    UnsupportedError for arguments that the proof chooses.
    """
    refuse_chosen(arguments, OF_CUTS["GRPOConfig"], "GRPOConfig")
    return TrainerStep(model, "rollout", partial(_build_grpo, make, tokenizer, arguments), start_ranks)


def _build_sft(
    make: Make | None,
    tokenizer: Any,
    arguments: Mapping[str, Any],
    model: Any,
    rows: Sequence[Row],
    cut: TrainerCut,
    settings: Mapping[str, Any],
    keywords: Mapping[str, Any],
) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    own = {"max_length": None, "padding_free": cut.form == "packed", **_pad_longer(rows, cut)}
    tokens = [{name: list(row[name]) for name in ("input_ids", "labels")} for row in order_for_samplers(rows, cut)]
    trainer = (make or SFTTrainer)(
        model=model,
        args=SFTConfig(**{**settings, **DEFAULTS, **own, **arguments}),
        train_dataset=Dataset.from_list(tokens),
        processing_class=tokenizer,
        **keywords,
    )
    return _pad_on_side(trainer, cut)


def _build_dpo(
    make: Make | None,
    tokenizer: Any,
    reference: Any,
    arguments: Mapping[str, Any],
    model: Any,
    rows: Sequence[Row],
    cut: TrainerCut,
    settings: Mapping[str, Any],
    keywords: Mapping[str, Any],
) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    if cut.form == "packed":
        raise UnsupportedError("DPOTrainer has switched padding_free off", remedy="Take cuts whose form is padded")
    trainer = (make or DPOTrainer)(
        model=model,
        ref_model=deepcopy(reference),
        args=DPOConfig(**{**settings, **DEFAULTS, "max_length": None, **_pad_longer(rows, cut), **arguments}),
        train_dataset=Dataset.from_list([{"prompt": "", "chosen": "", "rejected": ""}] * len(rows)),
        processing_class=tokenizer,
        **keywords,
    )
    fields = ("prompt_ids", "chosen_ids", "rejected_ids")  # which the trainer makes of texts when it is made
    trainer.train_dataset = Dataset.from_list([{name: list(row[name]) for name in fields} for row in order_for_samplers(rows, cut)])
    return _pad_on_side(trainer, cut)


def _build_grpo(
    make: Make | None,
    tokenizer: Any,
    arguments: Mapping[str, Any],
    model: Any,
    rows: Sequence[Row],
    cut: TrainerCut,
    settings: Mapping[str, Any],
    keywords: Mapping[str, Any],
) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    groups = list_groups(rows)
    if cut.form == "packed":
        raise UnsupportedError("GRPOTrainer has no packing", remedy="Take cuts whose form is padded")
    if any(len(members) != cut.micro_batch_rows for rank in cut.divide(len(rows)) for members in rank):
        raise UnsupportedError(
            "GRPOTrainer has no smaller last micro-batch", remedy="Give a number of rollouts that micro-batches and ranks divide"
        )
    if len(set(map(len, groups))) > 1 or [place for group in groups for place in group] != list(range(len(rows))):
        raise UnsupportedError(
            "GRPOTrainer has equally many rollouts of every prompt, one after the other", remedy="Order the rows by prompt"
        )
    longest = max(len(row["completion_ids"]) for row in rows)
    own: dict[str, Any] = {
        "num_generations": len(groups[0]),
        "shuffle_dataset": False,
        "max_completion_length": longest,
        "train_sampling_strategy": "random",
    }
    if cut.extra_padding:
        columns = [len(row[field]) for row in rows for field in ("prompt_ids", "completion_ids")]
        own["pad_to_multiple_of"] = max(columns) + cut.extra_padding

    def replay(prompts: Sequence[str], trainer: Any) -> Mapping[str, Any]:
        first = trainer.accelerator.process_index * len(prompts)
        given = rows[first : first + len(prompts)]
        tokens = {name: [list(row[name]) for row in given] for name in ("prompt_ids", "completion_ids")}
        return {**tokens, "logprobs": None, "reward": [float(row["reward"]) for row in given]}

    return (make or GRPOTrainer)(
        model=model,
        reward_funcs=_give_reward,
        args=GRPOConfig(**{**settings, **DEFAULTS, **own, **arguments}),
        train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(len(groups))]),
        processing_class=tokenizer,
        rollout_func=replay,
        **keywords,
    )


def _give_reward(completions: Sequence[Any], reward: Sequence[float], **_columns: Any) -> list[float]:
    assert len(completions) == len(reward)
    return list(reward)


def _pad_longer(rows: Sequence[Row], cut: TrainerCut) -> Mapping[str, Any]:
    """Pad to the longest sequence of all rows and the cut's more positions, which is more than the cut asks of short micro-batches."""
    if not cut.extra_padding:
        return {}
    longest = max(len(sequence.input_ids) for row in rows for sequence in list_sequences(row))
    return {"pad_to_multiple_of": longest + cut.extra_padding}


def _pad_on_side(trainer: Any, cut: TrainerCut) -> Any:
    if cut.padding_side == "left":
        trainer.data_collator = partial(_collate_to_the_right, trainer.data_collator)
    return trainer


def _collate_to_the_right(collate: Callable[[Any], Any], rows: Any) -> Any:
    """Move the rows of a batch behind their padding."""
    batch = collate(rows)
    mask = batch["attention_mask"]
    padding = mask.shape[1] - mask.sum(1)
    source = (torch.arange(mask.shape[1]) - padding[:, None]) % mask.shape[1]
    return {name: values.gather(1, source) if values.shape == mask.shape else values for name, values in batch.items()}
