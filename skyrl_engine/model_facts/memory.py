"""Bytes that parts of a run take, from what the model's configuration says alone. No torch."""

from pathlib import Path
from typing import Any, Final

from attrs import frozen

from skyrl_engine.contracts.values.model import ModelConfig

ELEMENT_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2}
"""Bytes of a number, by the names of `model.dtype`."""

EIGHT_BIT_BLOCK: Final = 256
"""Numbers of a row that share one scale, float32, where the optimizer holds moments in 8 bits: the block of bitsandbytes' kernels."""

FEWEST_IN_EIGHT_BITS: Final = 4096
"""Numbers of the smallest parameter that has moments in 8 bits, as in bitsandbytes."""

FOUR_BIT_BLOCK: Final = 64
"""Numbers that share one scale where a frozen layer is held in 4 bits (Dettmers et al. 2023, arXiv 2305.14314, section 3)."""

FOUR_BIT_SCALES: Final = 256
"""Scales that share one scale of their own where scales are held in 8 bits (there, "double quantization")."""

CACHE_SHARE: Final = 0.25
"""Share of the memory that is free when a generator starts which keys and values may take where nobody says how much."""


@frozen
class CacheShape:
    """Keys and values of a token: of `layers` layers, `heads` each, of `key_width` and `value_width` numbers."""

    layers: int
    heads: int
    key_width: int
    value_width: int

    @classmethod
    def of(cls, config: Any) -> "CacheShape | None":
        """Read the shape from a transformers configuration; None where it does not say it."""
        text = config.get_text_config(decoder=True)
        layers, heads, hidden = (getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
        if not isinstance(layers, int) or not isinstance(heads, int) or not isinstance(hidden, int):
            return None
        nope, rope, value = (getattr(text, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        if isinstance(nope, int) and isinstance(rope, int) and isinstance(value, int):
            # latent attention: every head has keys and values of its own
            return cls(layers, heads, nope + rope, value)
        width = getattr(text, "head_dim", None) or hidden // heads
        return cls(layers, getattr(text, "num_key_value_heads", None) or heads, width, width)

    def token_bytes(self, dtype: str) -> int:
        """Count the bytes of a token's keys and values in a precision of `model.dtype`."""
        return self.layers * self.heads * (self.key_width + self.value_width) * ELEMENT_BYTES[dtype]


CPU_MICRO_BATCH_TOKENS: Final = 2048
"""Tokens of a micro-batch on CPUs, where nobody says how many: from about 500 on, more make no core compute faster."""

CPU_GROUP_TOKENS: Final = 8 * CPU_MICRO_BATCH_TOKENS
"""Tokens up to which a micro-batch on CPUs grows so that a group computes its prompt once."""

_STATE_BYTES: Final = 16
"""Bytes of a trained parameter: its weight, its gradient and the two moments of AdamW, in float32."""


def find_reason_against_turns(
    model: ModelConfig, parameters: int, *, host_bytes: int | None, device_bytes: int | None, devices: int
) -> str | None:
    """Say, as a clause, why ranks and generators of a model cannot work on the same devices in turns; None where they can, or nobody knows.

    Weights and moments of the model that is trained wait in host memory together, on one machine; a generator has the weights on one device.
    `device_bytes` is the memory of one of `devices`.
    """
    waiting = parameters * (_STATE_BYTES - ELEMENT_BYTES["float32"] if model.lora is None else ELEMENT_BYTES["float32"])
    if host_bytes is not None and waiting > host_bytes:
        needed, free = format_bytes(waiting), format_bytes(host_bytes)
        return f"weights and optimizer take {needed} of host memory while generators work, and {free} are free"
    sampled = parameters * ELEMENT_BYTES[model.dtype]
    if device_bytes is not None and sampled > devices * device_bytes:
        return f"the weights that are sampled from take {format_bytes(sampled)}, and {devices} devices have {format_bytes(device_bytes)} each"
    return None


def count_cache_tokens(free_bytes: int, token_bytes: int, processes: int = 1) -> int:
    """Count the tokens whose keys and values `CACHE_SHARE` of free memory holds that so many processes share; at least 1."""
    return max(1, int(free_bytes * CACHE_SHARE) // (token_bytes * processes))


def find_free_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory of this host that a process may take still, within its control group; None where the system does not say."""
    limits = [_read_available(root / "proc/meminfo"), _read_room(root / "sys/fs/cgroup")]
    return min((limit for limit in limits if limit is not None), default=None)


def _read_available(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _read_room(group: Path) -> int | None:
    try:
        most, now = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text().strip()
    except OSError:
        return None
    return max(0, int(most) - int(now)) if most.isdigit() and now.isdigit() else None


def format_bytes(count: int) -> str:
    """Return a number of bytes for people, such as "1.5 GiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
