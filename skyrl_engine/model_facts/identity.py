"""A fingerprint of a model's weights: which base an adapter was trained on, wherever that base is today."""

import hashlib
from pathlib import Path
from typing import Final

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.model_facts.facts import find_file

_SMALL: Final = 2**22
_BLOCK, _BLOCKS = 2**12, 2**10
"""A file larger than `_SMALL` bytes is read at so many places, so many bytes each: a trained model differs from its base nearly everywhere."""


def weights_fingerprint(model: ModelConfig) -> str | None:
    """SHA-256 over sizes and contents of the model's weight files, large ones in samples; None where no weights are found.

    Names do not count, so a model that was moved or downloaded again is the same. One that was cut into other files is another.
    """
    file = find_file(model, "config.json")
    if file is None:
        return None
    folder = Path(file).parent
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        return None
    return hashlib.sha256("".join(sorted(map(_hash_samples, files))).encode()).hexdigest()


def _hash_samples(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _SMALL:
            digest.update(file.read())
        else:
            for number in range(_BLOCKS):
                file.seek(number * (size - _BLOCK) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
