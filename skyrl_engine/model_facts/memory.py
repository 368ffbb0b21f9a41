"""Bytes that parts of a run take, from what the model's configuration says alone. No torch."""

from pathlib import Path
from typing import Any, Final

from attrs import frozen

ELEMENT_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2}
"""Bytes of a number, by the names of `model.dtype`."""

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
