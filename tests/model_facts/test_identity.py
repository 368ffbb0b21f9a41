"""The fingerprint of a model's weights follows its contents, not where they are."""

import os
import shutil
from pathlib import Path

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.model_facts.identity import weights_fingerprint


def model(directory: Path, *parts: bytes) -> str:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    for number, part in enumerate(parts):
        (directory / f"model-{number}.safetensors").write_bytes(part)
    return str(directory)


def fingerprint(path: str) -> str | None:
    return weights_fingerprint(ModelConfig(path))


def test_a_moved_model_is_the_same_and_another_one_is_not(tmp_path: Path) -> None:
    small, large = os.urandom(1000), os.urandom(5_000_000)
    first = fingerprint(model(tmp_path / "first", small, large))
    shutil.move(tmp_path / "first", tmp_path / "moved")
    assert fingerprint(str(tmp_path / "moved")) == first
    assert fingerprint(model(tmp_path / "renamed", large, small)) == first
    others = [
        model(tmp_path / "byte", small[:-1] + bytes([small[-1] ^ 1]), large),
        model(tmp_path / "longer", small, large + b"0"),
        model(tmp_path / "trained", small, bytes(value ^ 1 for value in large)),
    ]
    assert first not in map(fingerprint, others)


def test_the_end_of_a_large_file_counts(tmp_path: Path) -> None:
    large = os.urandom(5_000_000)
    changed = large[:-1] + bytes([large[-1] ^ 1])
    assert fingerprint(model(tmp_path / "one", large)) != fingerprint(model(tmp_path / "other", changed))


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert fingerprint(model(tmp_path / "empty")) is None
