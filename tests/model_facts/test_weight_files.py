"""Files of weights that are missing, cut off or no weights at all are named before anything is loaded."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.weight_files import holder_of, safetensors_header, weight_files

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def write_file(path: Path, *names: str) -> Path:
    save_file({name: np.zeros((2, 3), np.float32) for name in names}, path)
    return path


def index(folder: Path, **places: str) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def list_chosen(folder: Path) -> list[str]:
    return [file.name for file in weight_files(ModelConfig(str(folder)))]


def catch_refusal(folder: Path, match: str) -> ModelError:
    with pytest.raises(ModelError, match=match) as caught:
        weight_files(ModelConfig(str(folder)))
    assert caught.value.remedy
    return caught.value


def test_files_are_those_that_transformers_takes(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    assert list_chosen(tmp_path) == ["pytorch_model.bin"]
    write_file(tmp_path / "b.safetensors", "x")
    write_file(tmp_path / "a.safetensors", "y", "z")
    index(tmp_path, x="b.safetensors", y="a.safetensors", z="a.safetensors")
    assert list_chosen(tmp_path) == ["a.safetensors", "b.safetensors"]
    write_file(tmp_path / "model.safetensors", "w")
    assert list_chosen(tmp_path) == ["model.safetensors"]


def test_a_hub_id_and_a_configuration_that_names_the_file_are_left_to_transformers(tmp_path: Path) -> None:
    assert weight_files(ModelConfig("organisation/model")) == []
    (tmp_path / "config.json").write_text('{"transformers_weights": "own.safetensors"}')
    assert list_chosen(tmp_path) == []


def test_no_weights(tmp_path: Path) -> None:
    catch_refusal(tmp_path, "holds no weights: neither model.safetensors nor its index")


def test_an_index_names_what_is_absent(tmp_path: Path) -> None:
    write_file(tmp_path / "b.safetensors", "x")
    index(tmp_path, x="b.safetensors", y="c.safetensors", z="a.safetensors")
    catch_refusal(tmp_path, r"index\.json names 3 files of weights, and 2 of them are not there, a\.safetensors first")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"x": 3}}'])
def test_an_index_without_a_map(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    catch_refusal(tmp_path, r"index\.json names no files")


def test_a_broken_index_is_named_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map":\n {')
    catch_refusal(tmp_path, r"pytorch_model\.bin\.index\.json is not valid JSON: line 2, column 3")


@pytest.mark.parametrize("length", [0, 5, 40, -1])
def test_a_file_that_was_cut_off(tmp_path: Path, length: int) -> None:
    file = write_file(tmp_path / "model.safetensors", "x")
    file.write_bytes(file.read_bytes()[:length])
    catch_refusal(tmp_path, r"model\.safetensors is damaged: ")


def test_bytes_behind_the_tensors_are_damage_too(tmp_path: Path) -> None:
    file = write_file(tmp_path / "model.safetensors", "x")
    file.write_bytes(file.read_bytes() + b"\0")
    catch_refusal(tmp_path, "is damaged: it has .* bytes, and its header announces")


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"x": 3}', b'{"x": {"data_offsets": []}}', b'{"x": {"data_offsets": [0, "a"]}}'])
def test_a_header_that_is_none(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    catch_refusal(tmp_path, "is damaged: its header cannot be read")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    assert "git lfs pull" in catch_refusal(tmp_path, rf"{name} is a Git LFS pointer").remedy


def test_the_holder_of_a_tensor(tmp_path: Path) -> None:
    files = [write_file(tmp_path / "a.safetensors", "x"), write_file(tmp_path / "b.safetensors", "y")]
    assert holder_of([tmp_path / "c.bin", *files], "y") == files[1]
    assert holder_of(files, "z") is None
    assert safetensors_header(files[0])["x"]["shape"] == [2, 3]
