"""First-party plugins by kind and name, so that one that is not installed can be named with the command that installs it."""

from collections.abc import Mapping
from types import MappingProxyType

FIRST_PARTY: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("collator", "padded"): "skyrl-engine-collators",
        ("collator", "trajectory"): "skyrl-engine-collators",
        ("collator", "packed"): "skyrl-engine-collators",
        ("loss", "cross_entropy"): "skyrl-engine-losses",
        ("loss", "ppo"): "skyrl-engine-losses",
        ("loss", "ppo_dual_clip"): "skyrl-engine-losses",
        ("loss", "gspo"): "skyrl-engine-losses",
        ("loss", "gmpo"): "skyrl-engine-losses",
        ("loss", "cispo"): "skyrl-engine-losses",
        ("loss", "rollout_is"): "skyrl-engine-losses",
        ("loss", "dppo"): "skyrl-engine-losses",
        ("loss", "sapo"): "skyrl-engine-losses",
        ("loss", "clip_cov"): "skyrl-engine-losses",
        ("loss", "kl_cov"): "skyrl-engine-losses",
        ("loss", "reinforce"): "skyrl-engine-losses",
        ("loss", "importance_sampling"): "skyrl-engine-losses",
        ("loss", "dro"): "skyrl-engine-losses",
        ("loss", "value_clip"): "skyrl-engine-losses",
        ("loss", "kl"): "skyrl-engine-losses",
        ("loss", "entropy"): "skyrl-engine-losses",
        ("correction", "outlier_sequence"): "skyrl-engine-losses",
        ("correction", "token_mask"): "skyrl-engine-losses",
        ("correction", "tis"): "skyrl-engine-losses",
        ("correction", "sequence_mask"): "skyrl-engine-losses",
        ("reducer", "sum"): "skyrl-engine-reducers",
        ("reducer", "token_mean"): "skyrl-engine-reducers",
        ("reducer", "token_mean_legacy"): "skyrl-engine-reducers",
        ("reducer", "sequence_mean"): "skyrl-engine-reducers",
        ("reducer", "sequence_mean_token_sum_norm"): "skyrl-engine-reducers",
        ("reducer", "group_mean"): "skyrl-engine-reducers",
        ("reducer", "prompt_mean"): "skyrl-engine-reducers",
        ("backend", "deepspeed"): "skyrl-engine-deepspeed",
        ("backend", "fsdp"): "skyrl-engine-fsdp",
        ("backend", "megatron"): "skyrl-engine-megatron",
        ("merger", "ordered"): "skyrl-engine-mergers",
        ("merger", "list"): "skyrl-engine-mergers",
        ("observer", "metrics_jsonl"): "skyrl-engine",
    }
)


def install_command(*requirements: str) -> str:
    """The pip command, quoted for a shell; `python -m pip` is the pip of the interpreter that runs the engine."""
    quoted = (f'"{requirement}"' if set(requirement) & set("<>=!~[ ;*") else requirement for requirement in requirements)
    return f"python -m pip install {' '.join(quoted)}"
