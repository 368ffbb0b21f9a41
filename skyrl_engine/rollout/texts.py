"""Rollouts as texts: the tokenizer that a run leaves behind."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.errors import EngineError
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.manifest import read_manifest

Decode = Callable[[Sequence[int]], str]


def decoder_of(run: RunDirectory) -> tuple[Decode | None, str]:
    """Return what turns token ids of a run into text, special tokens included; None, and why, where no tokenizer can be loaded.

    It is that of the newest checkpoint, else of the trained model, else the one that the run began with. No code of a model is run.
    """
    why = "the run names no model"
    for model in _places(run):
        if (quick := _read_quickly(Path(model.path))) is not None:
            return quick, ""
        try:
            tokenizer = load_tokenizer(model)
        except EngineError as error:
            why = error.cause
            continue
        return partial(_text, tokenizer), ""
    return None, why


def _read_quickly(folder: Path) -> Decode | None:
    """Return what decodes by a folder's tokenizer.json alone, in a fraction of the time; None where transformers would change its text."""
    try:
        stated = json.loads((folder / "tokenizer_config.json").read_text())
        if stated.get("clean_up_tokenization_spaces") or not (folder / "tokenizer.json").is_file():
            return None
        from tokenizers import Tokenizer

        return partial(_text, Tokenizer.from_file(str(folder / "tokenizer.json")))
    except Exception:  # noqa: BLE001 - `tokenizers` raises plain ones; what is wrong with a tokenizer, transformers says
        return None


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=False))


def _places(run: RunDirectory) -> Iterator[ModelConfig]:
    checkpoint = CheckpointStore(run.checkpoints).latest()
    for folder in (None if checkpoint is None else checkpoint.model, run.model):
        if folder is not None and (folder / "tokenizer_config.json").is_file():
            yield ModelConfig(path=str(folder))
    manifest = read_manifest(run.manifest)
    table = (manifest or {}).get("config", {}).get("model", {})
    path = table.get("tokenizer") or table.get("path")
    if isinstance(path, str) and (Path(path).is_dir() or not Path(path).is_absolute()):
        yield ModelConfig(path=path, revision=None if table.get("tokenizer") else table.get("revision"))
