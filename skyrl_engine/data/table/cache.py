"""The token cache: one file per dataset split, tokenizer, chat template and settings, made once and verified whenever it is read."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.sources.formats import Reading
from skyrl_engine.data.table.token_table import PARTIAL_SUFFIX, TokenTable, TokenTableWriter, open_table
from skyrl_engine.errors import DataError

_STALE_SECONDS = 24 * 3600


PACKAGE = Path(__file__).parents[1]
"""All of `skyrl_engine.data`: what any of its files does decides what is cached."""


def cache_key(
    content: str,
    rows: bytes,
    tokenizer: Any,
    data: DataConfig,
    columns: Iterable[str] = (),
    images: Sequence[str] = (),
    *,
    reading: Reading = "samples",
    step_separator: str = "\n",
) -> str:
    """Return sha256 over everything that the file depends on: content, chosen rows, tokenizer, chat template, settings, the names of
    the columns that are read in addition to the tokens, what decides the tokens of `images`, how rows are read, and the code itself.
    """
    digest = hashlib.sha256()
    read = [
        data.format,
        sorted(data.map.items()),
        data.loss_on,
        data.max_length,
        data.overlong,
        sorted(columns),
        data.bad_images,
        data.bad_rows,
        data.rating,
        data.template,
    ]
    settings = json.dumps(
        [*read, *images, *([] if reading == "samples" else [reading]), *([step_separator] if reading == "steps" else [])]
    )
    for piece in (content.encode(), rows, tokenizer_identity(tokenizer).encode(), settings.encode(), code_identity().encode()):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


def tokenizer_identity(tokenizer: Any) -> str:
    """Return everything of a tokenizer that decides tokens."""
    if tokenizer.is_fast:
        serialised = tokenizer.backend_tokenizer.to_str()
        # padding and truncation, written before the added tokens, are state of the last call; parsing a large vocabulary would take seconds
        backend = serialised.partition('"added_tokens"')[2] or serialised
    else:
        backend = {"vocabulary": tokenizer.get_vocab(), "settings": tokenizer.init_kwargs}
    parts = [type(tokenizer).__name__, backend, tokenizer.special_tokens_map, tokenizer.chat_template]
    return json.dumps(parts, sort_keys=True, default=str)


def code_identity(package: Path = PACKAGE) -> str:
    """Return a digest of the package's source, folders included, and of the versions of the libraries that render and tokenize."""
    sources = [path.read_bytes() for path in sorted(package.rglob("*.py"))]
    versions = [metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")]
    return " ".join([hashlib.sha256(b"".join(sources)).hexdigest(), *versions])


@frozen
class TokenCache:
    """Files named after their key in one directory."""

    directory: Path

    @classmethod
    def of(cls, directory: str | None) -> "TokenCache":
        """Open the cache in `directory`, else in the environment's SKYRL_ENGINE_CACHE, else in the user's cache directory."""
        import platformdirs

        chosen = directory or os.environ.get("SKYRL_ENGINE_CACHE") or platformdirs.user_cache_dir("skyrl-engine")
        return cls(Path(chosen).expanduser() / "tokens")

    def read(self, key: str, still_valid: Callable[[TokenTable], bool]) -> TokenTable | None:
        """Open the table of this key; None if there is none, it is damaged, or `still_valid` refuses it."""
        table = open_table(self._path(key))
        return table if table is not None and still_valid(table) else None

    def write(self, key: str, fill: Callable[[TokenTableWriter], dict[str, Any]]) -> TokenTable:
        """Write a table with `fill` and open it; the result of `fill` is kept as info. Raises DataError if the disk refuses."""
        path = self._path(key)
        with TokenTableWriter(self.directory) as writer:
            self._remove_stale()
            writer.finish(path, fill(writer))
        table = open_table(path)
        if table is None:
            raise DataError(
                f"the token cache file {path} is damaged right after writing",
                remedy="Set data.cache to a directory on a sound disk",
            )
        return table

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.arrow"

    def _remove_stale(self) -> None:
        """Remove files that killed processes left behind; another process may do so at the same time."""
        for path in self.directory.glob(f"*{PARTIAL_SUFFIX}"):
            try:
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
            except FileNotFoundError:
                continue
