"""Checkpoints that lie in the server's directory, whichever process wrote them.

MODEL/weights/NAME/            state/  model/  tinker.json     training goes on from here
MODEL/sampler_weights/NAME/            model/  tinker.json     a sampler's weights
MODEL/external_weights/NAME/           model/  tinker.json     to be downloaded
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import attrs
from attrs import field, frozen
from attrs.validators import deep_mapping, ge, instance_of, optional

from skyrl_engine_tinker.adapted import AdaptedLayers
from skyrl_engine_tinker.errors import RequestError

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
MODEL_ID = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The second part of an address, and what the API calls such a checkpoint."""
FACTS = "tinker.json"
"""The file of a checkpoint that says what its model is; it is written last."""
PARTIAL = ".partial"
"""The end of the name of a checkpoint that is being written."""
REPLACED = "~replaced"
"""The end of the name of a checkpoint that was set aside while another one takes its place; no client can give such a name."""
SHORTEST_TTL, LONGEST_TTL = 3_600, 10 * 366 * 24 * 3_600
"""Bounds of the API, in seconds."""


class MissingCheckpointError(RequestError):
    """A checkpoint that is not there, or whose time is over."""


class UnreadableCheckpointError(RequestError):
    """A checkpoint whose facts are damaged, or of a newer version of this server."""


@frozen
class Address:
    """The place of a checkpoint: `tinker://MODEL/KIND/NAME`. Its parts come from the wire and become paths."""

    model_id: str
    kind: str
    name: str

    def __attrs_post_init__(self) -> None:
        if not MODEL_ID.fullmatch(self.model_id):
            raise RequestError(f"{self.model_id!r} is no model of this server")
        if not NAME.fullmatch(self.name) or set(self.name) == {"."} or self.name.endswith(PARTIAL):
            raise RequestError(
                f"{self.name!r} is no name of a checkpoint: letters, digits, dots, hyphens and underlines, not {PARTIAL} at its end"
            )

    @classmethod
    def read(cls, path: str, kinds: tuple[str, ...] = (*KINDS,)) -> "Address":
        """Read an address of one of these kinds. Raises RequestError."""
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in kinds:
            raise RequestError(f"{path!r} is no checkpoint: write tinker://MODEL/{'|'.join(kinds)}/NAME")
        return cls(*parts)

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def folder(self, directory: Path) -> Path:
        return directory / self.model_id.replace(":", "-") / self.kind / self.name


@frozen
class SavedWeights:
    """Weights on the disk: a model, as a directory or hub id, and a PEFT directory for its adapter.

    `path` and `written` are a checkpoint's address and time, None for a base model: one that is written over is another.
    """

    model: str
    adapter: Path | None = None
    path: str | None = None
    written: float | None = None


def _require_time(_facts: object, attribute: Any, value: float) -> None:
    """Refuse what is no time that ISO 8601 can write, NaN too."""
    if not isinstance(value, int | float) or not 0 <= value < _LAST_TIME:
        raise ValueError(f"{attribute.name} is no time: {value}")


_LAST_TIME = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
_METADATA = optional(deep_mapping(instance_of(str), instance_of(str)))


@frozen
class Facts:
    """The description that a checkpoint carries. Times are seconds since 1970; `expires_at` None: never."""

    base_model: str = field(validator=instance_of(str))
    lora_rank: int = field(validator=[instance_of(int), ge(0)])
    step: int = field(validator=[instance_of(int), ge(0)])
    time: float = field(validator=_require_time)
    expires_at: float | None = field(default=None, validator=optional(_require_time))
    user_metadata: Mapping[str, str] | None = field(default=cast("Mapping[str, str] | None", None), validator=_METADATA)
    run_metadata: Mapping[str, str] | None = field(default=cast("Mapping[str, str] | None", None), validator=_METADATA)
    """The client's own words about the model, from when it was made."""
    train_attn: bool = field(default=True, validator=instance_of(bool))
    train_mlp: bool = field(default=True, validator=instance_of(bool))

    @property
    def layers(self) -> AdaptedLayers:
        """The layers that its adapters sit on."""
        return AdaptedLayers(self.train_attn, self.train_mlp)

    @classmethod
    def of(cls, directory: Path, address: Address) -> "Facts":
        """Read those of a checkpoint. Raises MissingCheckpointError where it is not there, or its time is over, UnreadableCheckpointError where
        they cannot be read.
        """
        facts = cls._read(address.folder(directory) / FACTS, address)
        if facts.expires_at is not None and facts.expires_at <= time.time():
            raise MissingCheckpointError(f"there is no checkpoint {address.path!r} any more: its time is over")
        return facts

    @classmethod
    def _read(cls, file: Path, address: Address) -> "Facts":
        try:
            table = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(table, dict) and (unknown := sorted(table.keys() - {attribute.name for attribute in attrs.fields(cls)})):
                raise ValueError(f"it has the unknown field {unknown[0]!r}, perhaps of a newer version of this server")
            return cls(**{"time": file.stat().st_mtime, **table})
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingCheckpointError(f"there is no checkpoint {address.path!r}") from error
        except (OSError, TypeError, ValueError, RecursionError) as error:
            cause = error.strerror if isinstance(error, OSError) else error.args[0] if isinstance(error, TypeError) else error
            raise UnreadableCheckpointError(f"the checkpoint {address.path!r} cannot be read: {FACTS}: {cause}") from error

    def write(self, folder: Path) -> None:
        aside = folder / f"{FACTS}{PARTIAL}"
        aside.write_text(json.dumps(attrs.asdict(self)) + "\n", encoding="utf-8")
        _sync(aside)
        aside.rename(folder / FACTS)
        _sync(folder)


def expiry(ttl: int | None) -> float | None:
    """Return when a checkpoint of this time to live ends. Raises RequestError for seconds beyond the API's bounds."""
    if ttl is None:
        return None
    if not SHORTEST_TTL <= ttl <= LONGEST_TTL:
        raise RequestError(f"ttl_seconds is {ttl}; it must be {SHORTEST_TTL:,} to {LONGEST_TTL:,}")
    return time.time() + ttl


@contextlib.contextmanager
def write_checkpoint(directory: Path, address: Address, facts: Facts, *, overwrite: bool) -> Iterator[Path]:
    """Write a checkpoint into the folder that this gives; it is there when all of it is, or not at all. Raises RequestError.

    One that is written over is set aside before the new one takes its name. A crash in between leaves it there, and `restore` brings it back.
    """
    folder = address.folder(directory)
    _restore(folder.with_name(f"{folder.name}{REPLACED}"))
    if (folder / FACTS).exists() and not overwrite:
        raise RequestError(f"there is a checkpoint {address.name!r} already; give another name, or overwrite")
    aside = folder.with_name(f"{address.name}{PARTIAL}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    for path in aside.rglob("*"):
        _sync(path)
    facts.write(aside)
    _put_in_place(aside, folder)


def _put_in_place(aside: Path, folder: Path) -> None:
    replaced = folder.with_name(f"{folder.name}{REPLACED}")
    while True:
        _restore(replaced)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(replaced)
        try:
            aside.rename(folder)
            break
        except OSError as error:
            # another server that starts right now brought the old one back
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore(directory: Path) -> None:
    """Bring back checkpoints that were set aside for others which a crash kept from coming, and remove those whose successors came."""
    for replaced in directory.glob(f"*/*/*{REPLACED}"):
        _restore(replaced)


def _restore(replaced: Path) -> None:
    """Give a checkpoint that was set aside its name, unless its successor has it."""
    folder = replaced.with_name(replaced.name.removesuffix(REPLACED))
    if not (folder / FACTS).exists() and (replaced / FACTS).exists():
        # whoever gave the name away meanwhile keeps it: a folder never takes the place of one that holds something
        with contextlib.suppress(OSError):
            replaced.rename(folder)
            logger.warning("%s was being written over when a server ended; it is as it was before", folder)
            return
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(directory: Path, model_id: str | None = None) -> list[dict[str, Any]]:
    """List checkpoints of one model or of all, the newest first. A model that saved none has an empty list."""
    addresses = [address for address in _list_addresses(directory) if model_id is None or address.model_id == model_id]
    described = [description for description in (_describe(directory, address) for address in addresses) if description is not None]
    return sorted(described, key=lambda description: str(description["time"]), reverse=True)


def delete(directory: Path, address: Address) -> None:
    """Delete a checkpoint, also one that cannot be read. Raises RequestError for one that is not there."""
    with contextlib.suppress(UnreadableCheckpointError):
        Facts.of(directory, address)
    _remove(address.folder(directory))


def set_ttl(directory: Path, address: Address, ttl: int | None) -> None:
    """Let a checkpoint live so many seconds from now on; None: for ever. Raises RequestError."""
    attrs.evolve(Facts.of(directory, address), expires_at=expiry(ttl)).write(address.folder(directory))


def sweep(directory: Path) -> None:
    """Delete checkpoints whose time is over; one that cannot be read stays, and is logged once."""
    for address in _list_addresses(directory):
        try:
            Facts.of(directory, address)
        except UnreadableCheckpointError as error:
            _log_once(address.folder(directory) / FACTS, error)
        except MissingCheckpointError:
            _remove(address.folder(directory))


_logged: set[tuple[Path, int]] = set()
"""Files that could not be read and were logged, with the nanosecond in which each was written."""


def _log_once(file: Path, error: Exception) -> None:
    written = file.stat().st_mtime_ns if file.exists() else 0
    if (file, written) not in _logged:
        _logged.add((file, written))
        logger.warning("%s is passed over: %s", file, error)


def runs(directory: Path) -> list[dict[str, Any]]:
    """List models that saved something, as the API's training runs, the one that saved last first."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for checkpoint in list_checkpoints(directory):
        by_model.setdefault(checkpoint["tinker_path"].split("/")[2], []).append(checkpoint)
    described = []
    for model_id, saved in by_model.items():
        # one may end meanwhile
        with contextlib.suppress(RequestError):
            described.append(_describe_run(directory, model_id, saved))
    return described


def _describe_run(directory: Path, model_id: str, checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
    facts = Facts.of(directory, Address.read(checkpoints[0]["tinker_path"]))
    last = {
        kind: next((checkpoint for checkpoint in checkpoints if checkpoint["checkpoint_type"] == kind), None)
        for kind in KINDS.values()
    }
    return {
        "training_run_id": model_id,
        "base_model": facts.base_model,
        "model_owner": "",
        "is_lora": facts.lora_rank > 0,
        "lora_rank": facts.lora_rank or None,
        "last_request_time": checkpoints[0]["time"],
        "last_checkpoint": last["training"],
        "last_sampler_checkpoint": last["sampler"],
        "user_metadata": facts.run_metadata,
    }


def _list_addresses(directory: Path) -> list[Address]:
    found = []
    for file in directory.glob(f"*/*/*/{FACTS}"):
        model, kind, name = file.parts[-4:-1]
        if kind in KINDS:
            with contextlib.suppress(RequestError):
                found.append(Address(model.replace("-", ":"), kind, name))
    return found


def _describe(directory: Path, address: Address) -> dict[str, Any] | None:
    try:
        facts = Facts.of(directory, address)
        size = sum(file.stat().st_size for file in address.folder(directory).rglob("*") if file.is_file())
    except (MissingCheckpointError, FileNotFoundError):
        # it ended meanwhile
        return None
    except (UnreadableCheckpointError, OSError) as error:
        _log_once(address.folder(directory) / FACTS, error)
        return None
    ends = None if facts.expires_at is None else datetime.fromtimestamp(facts.expires_at, UTC).isoformat()
    return {
        "checkpoint_id": f"{address.kind}/{address.name}",
        "checkpoint_type": KINDS[address.kind],
        "time": datetime.fromtimestamp(facts.time, UTC).isoformat(),
        "tinker_path": address.path,
        "size_bytes": size,
        "user_metadata": facts.user_metadata,
        "expires_at": ends,
    }


def _remove(folder: Path) -> None:
    # without its facts it is no checkpoint any more, even when the rest of this is cut off
    (folder / FACTS).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
