"""Words under which people know keys of this configuration from other trainers, and the key of each."""

import re
from collections.abc import Mapping

_BATCH = "it counts the samples of a step, over all ranks and micro-batches"
_MICRO = "it counts the rows a rank computes at once"

_KEYS: Mapping[str, tuple[str, ...]] = {
    "optimizer.learning_rate": ("lr", "peak_lr", "max_lr", "learning_rate"),
    "optimizer.betas": ("adam_betas", "adam_beta1", "adam_beta2", "beta1", "beta2"),
    "optimizer.epsilon": ("adam_epsilon", "eps", "adam_eps"),
    "optimizer.weight_decay": ("wd", "weight_decay"),
    "optimizer.max_grad_norm": ("clip_grad", "grad_clip", "gradient_clipping", "clip_grad_norm", "max_norm", "gradient_clip_val"),
    "optimizer.schedule": ("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_schedule"),
    "optimizer.warmup_steps": ("warmup", "num_warmup_steps", "lr_warmup_steps", "warmup_ratio"),
    "training.batch_size": ("batch", "global_batch_size", "train_batch_size", "total_batch_size", "effective_batch_size"),
    "training.micro_batch_rows": (
        "per_device_train_batch_size",
        "micro_batch_size",
        "train_micro_batch_size_per_gpu",
        "micro_batch_size_per_gpu",
        "per_gpu_train_batch_size",
        "device_batch_size",
    ),
    "training.micro_batch_tokens": ("max_tokens_per_gpu", "max_tokens", "ppo_max_token_len_per_gpu"),
    "training.epochs": ("num_train_epochs", "num_epochs", "max_epochs", "total_epochs", "epoch"),
    "training.steps": ("max_steps", "num_steps", "train_steps", "total_steps", "iters", "train_iters"),
    "training.drop_last": ("dataloader_drop_last",),
    "data.max_length": (
        "max_seq_length",
        "max_seq_len",
        "sequence_len",
        "cutoff_len",
        "model_max_length",
        "block_size",
        "context_length",
    ),
    "data.train": (
        "dataset",
        "datasets",
        "train_file",
        "train_files",
        "data_path",
        "dataset_name",
        "train_dataset",
        "dataset_path",
    ),
    "data.eval": ("eval_file", "validation_file", "val_files", "eval_dataset", "val_data", "test_file"),
    "data.eval_fraction": ("val_set_size", "validation_split", "test_size", "val_size"),
    "data.loss_on": ("train_on_inputs", "assistant_only_loss", "completion_only_loss", "roles_to_train"),
    "data.map": ("column_mapping", "columns_mapping", "dataset_text_field", "field_messages", "prompt_key", "response_key"),
    "data.max_samples": ("max_train_samples", "limit"),
    "checkpoint.every": ("save_steps", "save_freq", "save_interval", "checkpoint_every"),
    "checkpoint.keep": ("save_total_limit", "max_ckpt_to_keep"),
    "checkpoint.resume": ("resume_from_checkpoint", "resume_mode"),
    "evaluation.every": ("eval_steps", "eval_interval", "test_freq"),
    "run.directory": ("output_dir", "output", "save_path", "default_local_dir"),
    "run.ranks": ("nproc_per_node", "num_processes", "num_gpus", "n_gpus_per_node", "world_size", "devices"),
    "run.seed": ("random_seed", "data_seed"),
    "model.path": ("model_name_or_path", "base_model", "pretrain", "model_name", "pretrained_model_name_or_path"),
    "model.chat_template": ("chat_template_path",),
    "collator.use": ("packing", "sample_packing", "pack_sequences", "use_remove_padding", "padding_free"),
}
_ELSEWHERE: Mapping[str, str] = {word: key for key, words in _KEYS.items() for word in words}
_ACCUMULATION = (
    "gradient_accumulation_steps",
    "grad_accum",
    "gradient_accumulation",
    "accumulate_grad_batches",
    "grad_accum_steps",
)
_REMARKS: Mapping[str, str] = {
    **dict.fromkeys(_ACCUMULATION, "micro-batches accumulate until training.batch_size samples are done"),
    "warmup_ratio": "it counts steps, not a share of them",
    "train_on_inputs": 'it is "last" or "all" of the assistant turns',
    **dict.fromkeys(("packing", "sample_packing", "pack_sequences", "use_remove_padding", "padding_free"), '"packed" packs rows'),
}
_ABOUT: Mapping[str, str] = {"training.batch_size": _BATCH, "training.micro_batch_rows": _MICRO}


def key_for(word: str) -> str | None:
    """Return the key that people know by this word from other trainers; None where there is none."""
    plain = _plain(word)
    return "training.micro_batch_rows" if plain in _ACCUMULATION else _ELSEWHERE.get(plain)


def meant(word: str) -> str | None:
    """Return a sentence that names the key; None for a word that no other trainer is known to use."""
    plain = _plain(word)
    key = key_for(plain)
    if key is None:
        return None
    remark = _REMARKS.get(plain) or _ABOUT.get(key)
    return f"Set {key}{f' ({remark})' if remark else ''}"


def words() -> Mapping[str, tuple[str, ...]]:
    """Return the words of every key, those of the accumulation of gradients with the key that decides it."""
    return {key: (*known, *(_ACCUMULATION if key == "training.micro_batch_rows" else ())) for key, known in _KEYS.items()}


def _plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_")
