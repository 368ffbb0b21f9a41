"""Loading the tokenizer that goes with a model."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.json_file import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READ: Final = ("config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")
_OTHER_VOCABULARIES: Final = ("*.model", "*.tiktoken", "tekken.json", "vocab*")
"""Patterns of files that transformers turns into a tokenizer where the tokenizer's class does not name them."""

_log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
"""Token ids to their text."""


def load_tokenizer(model: ModelConfig) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of `model.tokenizer`, or of the model itself, with `model.chat_template` (a file) in place of its own.

    A local directory is read without touching the network. Without a padding token the end-of-text token stands in, which is logged:
    padding is masked everywhere, so the choice changes no result. Raises ModelError.
    """
    from transformers import AutoTokenizer

    location = model.tokenizer or model.path
    key = "model.tokenizer" if model.tokenizer else "model.path"
    folder = Path(location).expanduser()
    local = folder.exists()
    if local and not folder.is_dir():
        raise ModelError(
            f"{key} is the file {location}, where the tokenizer must be a directory",
            remedy=f"Set {key} to the directory that holds it",
        )
    if not local and _looks_like_path(location):
        raise ModelError(f"{key} names the directory {location}, which does not exist", remedy=f"Correct {key}")
    try:
        # transformers leaves this function untyped
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder) if local else location,
            # the revision is the model's; a tokenizer of its own name has its own revisions
            revision=None if model.tokenizer or local else model.revision,
            trust_remote_code=model.trust_remote_code,
            local_files_only=local,
        )
    except Exception as error:
        if local:
            _refuse_broken_files(folder)
        remedy = (
            f"Check that {location} holds tokenizer.json and tokenizer_config.json"
            if local
            else f"Set {key} to a local directory, or check the hub id and the network (HF_HUB_OFFLINE forbids downloads)"
        )
        raise ModelError(f"no tokenizer can be loaded from {location}", remedy=remedy, details=[_first_line(error)]) from error
    if local and not _holds_vocabulary(folder, tokenizer):
        raise ModelError(
            f"the directory {location} holds no tokenizer: none of {', '.join(_vocabulary_files(tokenizer))} is there",
            remedy="Copy or download the tokenizer's files too, or set model.tokenizer to a directory or hub id that holds them",
        )
    if model.chat_template is not None:
        tokenizer.chat_template = _read_template(model.chat_template)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"the tokenizer {location} has neither a padding nor an end-of-text token",
                remedy="Set eos_token or pad_token in its tokenizer_config.json",
            )
        tokenizer.pad_token = tokenizer.eos_token
        _log.info("The tokenizer %s has no padding token; its end-of-text token %r pads.", location, tokenizer.eos_token)
    return tokenizer


def load_decoder(model: ModelConfig) -> Decode:
    """Load what decodes as the texts of actions are decoded, in which stop strings are looked for: without special tokens. Raises as above."""
    tokenizer = load_tokenizer(model)

    def decode(ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode


def _refuse_broken_files(folder: Path) -> None:
    """Raise ModelError for the first of the files from which a tokenizer is made that is not what it must be."""
    for name in _READ:
        if (folder / name).is_file():
            read_object(folder / name)


def _vocabulary_files(tokenizer: Any) -> list[str]:
    return sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})


def _holds_vocabulary(folder: Path, tokenizer: Any) -> bool:
    """Return False where transformers found no vocabulary and made an empty tokenizer of the class that the model's architecture suggests."""
    names = [*_vocabulary_files(tokenizer), *_OTHER_VOCABULARIES]
    return not tokenizer.vocab_files_names or any(True for name in names for _ in folder.glob(name))


def _looks_like_path(location: str) -> bool:
    """Return True for anything but `name` and `owner/name`, which may be hub ids."""
    return location.startswith((".", "~", "/")) or location.count("/") > 1 or "\\" in location


def _read_template(location: str) -> str:
    try:
        return Path(location).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"model.chat_template names the file {location}, which cannot be read",
            remedy="Set it to a Jinja template file",
            details=[_first_line(error)],
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
