"""First-party plugins by kind and name, so that one that is not installed can be named with the command that installs it."""

from collections.abc import Mapping
from types import MappingProxyType

FIRST_PARTY: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("collator", "padded"): "skyrl-engine-collators",
        ("collator", "trajectory"): "skyrl-engine-collators",
        ("collator", "packed"): "skyrl-engine-collators",
        ("loss", "cross_entropy"): "skyrl-engine-losses",
        ("reducer", "sum"): "skyrl-engine-reducers",
        ("reducer", "token_mean"): "skyrl-engine-reducers",
        ("backend", "fsdp"): "skyrl-engine-fsdp",
        ("merger", "ordered"): "skyrl-engine-mergers",
        ("observer", "metrics_jsonl"): "skyrl-engine",
    }
)


def install_command(*requirements: str) -> str:
    """The pip command, quoted for a shell; `python -m pip` is the pip of the interpreter that runs the engine."""
    quoted = (f'"{requirement}"' if set(requirement) & set("<>=!~[ ;*") else requirement for requirement in requirements)
    return f"python -m pip install {' '.join(quoted)}"
