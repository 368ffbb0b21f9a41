"""Words under which people know keys of this configuration from other trainers, and the key of each.

Reinforcement has words of its own, some of which mean something else in fine-tuning: a run by `trainer = "rl"` is asked for those first.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

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


RL: Final = "rl"

_CLIP = "an option of ppo and of losses like it"
_KL_LOSS = '[[loss.terms]] with use = "kl" and coef'
_ENTROPY = '[[loss.terms]] with use = "entropy" and coef'
_DYNAMIC = '[[group_filters]] with use = "zero_variance"'
_CORRECTIONS = '[[loss.corrections]] with use = "tis", "token_mask", "sequence_mask" or "outlier_sequence"'
_FUNCTION = 'an option of the environment "function"'
_TASKS = "it counts tasks; each is attempted rl.group_size times"
_BATCHES = "it counts batches of rollouts; tasks begin again by themselves"
_UPDATES = "it counts optimizer steps per pass over a batch, not samples"
_ROWS = f"{_MICRO}; they accumulate until the mini-batch is done"

_RL_KEYS: Mapping[str, Mapping[str, str]] = {
    "rl.steps": dict.fromkeys(
        ("max_steps", "num_train_epochs", "total_epochs", "trainer.epochs", "total_training_steps", "max_training_steps"), _BATCHES
    ),
    "rl.groups": {
        **dict.fromkeys(("train_batch_size", "prompts_per_step", "rollout_batch_size"), _TASKS),
        **dict.fromkeys(
            ("batch_size", "generation_batch_size", "global_batch_size"),
            "it counts tasks, those words attempts: divide by rl.group_size",
        ),
    },
    "rl.group_size": dict.fromkeys(
        (
            "num_generations",
            "rollout.n",
            "n_samples_per_prompt",
            "rollouts_per_example",
            "num_generations_per_prompt",
        ),
        "",
    ),
    "rl.mini_batches": dict.fromkeys(
        ("ppo_mini_batch_size", "policy_mini_batch_size", "mini_batch_size", "steps_per_generation", "num_mini_batches"), _UPDATES
    ),
    "rl.epochs": dict.fromkeys(("num_iterations", "ppo_epochs", "update_epochs_per_batch", "num_ppo_epochs"), ""),
    "rl.max_prompt_tokens": dict.fromkeys(("max_prompt_length", "prompt_length", "max_input_length", "prompt_max_len"), ""),
    "rl.max_tokens": {
        **dict.fromkeys(
            (
                "max_completion_length",
                "max_response_length",
                "response_length",
                "max_generate_length",
                "max_completion_tokens",
                "max_new_tokens",
                "generate_max_len",
            ),
            "it counts the observed tokens of later turns too",
        ),
        "orchestrator.seq_len": "it does not count the prompt, which rl.max_prompt_tokens limits",
    },
    "rl.temperature": dict.fromkeys(("sampling.temperature", "sampling_params.temperature", "rollout.temperature"), ""),
    "rl.stop_strings": dict.fromkeys(
        ("stop", "stop_words", "stop_sequences", "sampling_params.stop", "generation.stop_strings"), "a list of texts"
    ),
    "rl.micro_batch_rows": dict.fromkeys(
        (
            "per_device_train_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "log_prob_micro_batch_size_per_gpu",
            "micro_train_batch_size_per_gpu",
            "micro_forward_batch_size_per_gpu",
            "gradient_accumulation_steps",
        ),
        _ROWS,
    ),
    "rl.micro_batch_tokens": dict.fromkeys(("ppo_max_token_len_per_gpu", "max_tokens_per_microbatch", "max_tokens_per_gpu"), ""),
    "rl.old": {"bypass_mode": '"rollout" takes the sampler\'s', "force_on_policy_ratio": '"current" makes every ratio exactly 1'},
    "rl.history": {"step_wise_trajectories": '"template" renders every prompt anew'},
    "rl.truncated": {
        **dict.fromkeys(
            ("mask_truncated_completions", "apply_overlong_filtering", "overlong_filter"), '"mask" gives cut attempts no loss'
        ),
        "zero_reward_on_non_stop": '"zero_reward" gives cut attempts no reward',
    },
    "rl.overlong": dict.fromkeys(("overlong_buffer", "overlong_buffer_cfg", "length_penalty"), "its formula is DAPO's"),
    "rl.entropy_metric": {"calculate_entropy": ""},
    "rl.kl": dict.fromkeys(("use_kl_in_reward", "init_kl_coef"), "a table with coef; without it there is no penalty"),
    "rl.kl.coef": dict.fromkeys(("kl_ctrl.kl_coef", "kl_coef"), ""),
    "rl.kl.estimator": dict.fromkeys(("kl_penalty", "kl_estimator_type", "kl_ctrl.kl_penalty"), '"k1", "k2" or "k3"'),
    "rl.kl.target": dict.fromkeys(("kl_ctrl.target_kl", "kl_ctrl.kl_target", "target_kl", "kl_target"), ""),
    "rl.kl.horizon": dict.fromkeys(("kl_ctrl.horizon",), ""),
    "reference.path": dict.fromkeys(("ref.model.path", "ref_model"), ""),
    "reference.refresh_every": dict.fromkeys(
        ("ref_model_sync_steps", "sync_ref_model", "update_ref_every_epoch"), "it counts steps; the reference becomes a whole copy"
    ),
    "rollouts.workers": dict.fromkeys(("max_env_workers", "num_train_workers"), ""),
    "rollouts.max_drop_share": dict.fromkeys(
        ("max_num_gen_batches", "max_sample_batches"), "a share of groups, not a number of batches"
    ),
    "evaluation.samples": dict.fromkeys(
        ("num_generations_eval", "val_kwargs.n", "eval_n_samples_per_prompt", "eval.group_size", "eval.rollouts_per_example"), ""
    ),
    "evaluation.tasks": dict.fromkeys(("eval.num_examples",), ""),
    "evaluation.temperature": dict.fromkeys(
        ("val_kwargs.temperature", "eval_sampling_params.temperature", "eval.sampling.temperature"), ""
    ),
    "evaluation.at_start": dict.fromkeys(("val_before_train", "eval_before_train", "eval_on_start"), ""),
    "evaluation.every": dict.fromkeys(("eval.interval",), ""),
    "checkpoint.every": dict.fromkeys(("ckpt.interval",), ""),
    "checkpoint.keep": dict.fromkeys(("ckpt.keep_last", "max_ckpts_to_keep", "max_actor_ckpt_to_keep"), ""),
    "model.path": dict.fromkeys(("actor_rollout_ref.model.path", "policy.model.path"), ""),
    "model.lora.rank": dict.fromkeys(("lora.rank", "lora_r", "lora_dim"), ""),
    "model.value_head": dict.fromkeys(("critic.enable", "use_critic"), "the critic is a head on the trained model"),
    "advantage.use": {
        **dict.fromkeys(("adv_estimator", "advantage_estimator", "adv_estimator.name", "algo.type"), ""),
        "scale_rewards": '"grpo" divides by the group\'s deviation, "dr_grpo" does not',
        **dict.fromkeys(
            ("norm_adv_by_std_in_grpo", "grpo_norm_by_std", "normalize_rewards"), '"dr_grpo" is "grpo" without the division'
        ),
        "use_leave_one_out_baseline": '"rloo" has the others as its baseline',
    },
    "advantage.normalize": dict.fromkeys(
        ("normalize_advantages", "advantage_batch_normalize", "whiten_advantages"), '"batch", over scored tokens'
    ),
    "advantage.gamma": dict.fromkeys(("algorithm.gamma", "gae_gamma"), "an option of gae and reinforce_pp"),
    "advantage.lam": dict.fromkeys(("lambd", "algorithm.lam", "gae_lambda"), "an option of gae"),
    "loss.use": {
        **dict.fromkeys(("loss_type", "loss_mode", "policy_loss_type"), "reducer.use says how tokens are averaged"),
        "importance_sampling_level": '"gspo" is the level of the sequence',
    },
    "loss.clip_low": {
        **dict.fromkeys(
            ("epsilon", "clip_ratio", "cliprange", "clip_range"), f"and loss.clip_high, which has its own value; {_CLIP}"
        ),
        **dict.fromkeys(("clip_ratio_low", "eps_clip_low", "ratio_clip_min"), _CLIP),
    },
    "loss.clip_high": dict.fromkeys(("epsilon_high", "clip_ratio_high", "eps_clip_high", "ratio_clip_max"), _CLIP),
    "loss.dual_clip": dict.fromkeys(("delta", "clip_ratio_c"), "an option of ppo_dual_clip"),
    "loss.delta_low": dict.fromkeys(("dppo_mask_low",), "an option of dppo"),
    "loss.delta_high": dict.fromkeys(("dppo_mask_high",), "an option of dppo"),
    "loss.terms": {
        **dict.fromkeys(("beta", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "reference_policy_kl_penalty", "kl_tau"), _KL_LOSS),
        **dict.fromkeys(("entropy_coef", "entropy_coeff", "entropy_loss_coef", "use_entropy_loss"), _ENTROPY),
        **dict.fromkeys(("cliprange_value", "vf_coef"), '[[loss.terms]] with use = "value_clip" and coef'),
        "value_clip": '[[loss.terms]] with use = "value_clip" and coef',
    },
    "loss.corrections": dict.fromkeys(
        (
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_cap",
            "vllm_importance_sampling_clip_max",
            "use_tis",
            "tis_imp_ratio_cap",
            "tis_ratio_type",
            "rollout_is",
            "rollout_is_threshold",
            "rollout_rs",
            "off_policy_mask_threshold",
        ),
        _CORRECTIONS,
    ),
    "reducer.use": dict.fromkeys(("loss_agg_mode", "loss_reduction"), ""),
    "reducer.max_sequence_length": dict.fromkeys(
        ("loss_scale_factor", "algorithm.max_seq_len"), "an option of sequence_mean_token_sum_norm"
    ),
    "generator.use": dict.fromkeys(
        ("rollout.name", "inference_engine.backend", "use_vllm", "vllm_mode"), '"hf" samples on the ranks that train'
    ),
    "generator.slots": dict.fromkeys(("max_num_seqs", "max_inflight", "max_concurrent_requests"), "an option of hf"),
    "environments.use": dict.fromkeys(("env_class", "env_id", "train.source"), "[[environments]], once for each"),
    "environments.weight": dict.fromkeys(("source.ratio", "env_ratios"), "[[environments]], once for each"),
    "environments.reward": dict.fromkeys(
        ("reward_funcs", "custom_reward_function.path", "compute_score", "reward_fn"), f"[[environments]], {_FUNCTION}"
    ),
    "environments.rewards": dict.fromkeys(("reward_weights",), f"[[environments]], {_FUNCTION}: each with use and weight"),
    "environments.tools": dict.fromkeys(("tool_config_path", "function_tool_path"), f"[[environments]], {_FUNCTION}"),
    "environments.max_turns": dict.fromkeys(
        ("max_assistant_turns", "max_user_turns", "max_tool_calling_iterations", "generator.max_turns"), "[[environments]]"
    ),
    "environments.data": dict.fromkeys(
        (
            "data.train_files",
            "train_files",
            "data.train_data",
            "train_dataset",
            "dataset_name",
            "dataset",
            "datasets",
            "dataset_path",
        ),
        f"[[environments]], {_FUNCTION}",
    ),
    "environments.eval_data": dict.fromkeys(
        ("data.val_files", "val_files", "data.val_data", "eval_dataset"), f"[[environments]], {_FUNCTION}"
    ),
    "group_filters.use": dict.fromkeys(
        (
            "filter_groups",
            "filter_groups.enable",
            "dynamic_sampling",
            "dynamic_sampling.type",
            "zero_variance_filter",
            "filter_zero_advantages",
            "use_dynamic_sampling",
        ),
        _DYNAMIC,
    ),
}
_OF_RL: Mapping[str, tuple[str, str]] = {
    re.sub(r"[^a-z0-9]+", "_", word): (key, remark) for key, known in _RL_KEYS.items() for word, remark in known.items()
}
_OF_SFT = ("data.", "training.")
"""Tables that a run by reinforcement does not have."""
_FILTERED = "Leave it out: training samples from the model's whole distribution, as losses and corrections take it; a filtered one is another"
_STALENESS = "Leave it out: every batch is sampled from the weights that it trains, so nothing is stale"
_NOT_HERE: Mapping[str, str] = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"), _FILTERED),
    **dict.fromkeys(
        ("max_off_policy_steps", "max_staleness_steps", "staleness_threshold", "max_staleness", "async_level"), _STALENESS
    ),
    **dict.fromkeys(
        ("log_completions", "num_completions_to_print", "rollout_data_dir", "log_val_generations", "dump_data_batch"),
        "Leave it out: a run keeps its rollouts, and `skyrl-engine rollouts show` shows them",
    ),
    "calculate_log_probs": "Leave it out: the sampler's log-probabilities are always kept",
    "reward_clip_range": "Leave it out, and bound the number in the reward function",
    "ref_model_mixup_alpha": "Leave it out: reference.refresh_every copies the whole model",
    "adv_tau": "Leave it out, or multiply the reward: there is no factor of its own",
    "gpu_memory_utilization": "Leave it out: the sampler reads the weights that are trained",
}


def key_for(word: str, trainer: str | None = None) -> str | None:
    """Return the key that people know by this word from other trainers; None where there is none."""
    plain = _plain(word)
    found = "training.micro_batch_rows" if plain in _ACCUMULATION else _ELSEWHERE.get(plain)
    if trainer == RL and found is not None and found.startswith(_OF_SFT):
        found = None
    ours = _OF_RL.get(plain)
    return ours[0] if ours is not None and (found is None or trainer == RL) else found


def is_known(word: str) -> bool:
    """Say whether the word is one of other trainers, also where nothing here corresponds to it."""
    return key_for(word) is not None or _plain(word) in _NOT_HERE


def explain_word(word: str, trainer: str | None = None) -> str | None:
    """Return a sentence that names the key; None for a word that no other trainer is known to use."""
    plain = _plain(word)
    key = key_for(plain, trainer)
    if key is None:
        return _NOT_HERE.get(plain)
    remark = _OF_RL[plain][1] if _OF_RL.get(plain, ("",))[0] == key else _REMARKS.get(plain) or _ABOUT.get(key)
    return f"Set {key}{f' ({remark})' if remark else ''}"


def explain_path(path: Sequence[str | int], trainer: str | None = None) -> str | None:
    """Return a sentence for a key with the tables around it, which say what `n` or `interval` is: the longest end that is known counts."""
    names = [str(name) for name in path if not isinstance(name, int)]
    if trainer != RL and key_for(names[-1]) in _KEYS:
        return explain_word(names[-1])
    sentences = (explain_word(".".join(names[start:]), trainer) for start in range(len(names)))
    return next((sentence for sentence in sentences if sentence is not None), None)


def words() -> Mapping[str, tuple[str, ...]]:
    """Return the words of every key, those of the accumulation of gradients with the key that decides it."""
    return {key: (*known, *(_ACCUMULATION if key == "training.micro_batch_rows" else ())) for key, known in _KEYS.items()}


def words_of_rl() -> Mapping[str, tuple[str, ...]]:
    """Return the words of reinforcement by key."""
    return MappingProxyType({key: tuple(known) for key, known in _RL_KEYS.items()})


def _plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_")
