"""Files that torch did not write are refused in our own words."""

import pickle
from pathlib import Path

import pytest
import torch

from skyrl_engine.modeling.unpickling import UNREADABLE, failure, load_pickled


def test_a_file_of_torch_is_read(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3), "step": 4}, tmp_path / "state.pt")
    read = load_pickled(tmp_path / "state.pt")
    assert (read["weight"].tolist(), read["step"]) == ([1.0, 1.0, 1.0], 4)


@pytest.mark.parametrize("content", [pickle.dumps({"step": 4}), b"", b"\x00" * 64])
def test_another_file_is_refused_without_advice_of_another_program(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(UNREADABLE) as raised:
        load_pickled(tmp_path / "state.pt")
    assert (
        failure(raised.value) == "it is damaged, or holds more than tensors and plain values, which could run code while it is read"
    )


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_pickled(tmp_path / "state.pt")
