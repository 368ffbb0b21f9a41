"""The user's key: a secret file by which runs that this user made on this machine are recognised."""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from skyrl_engine.errors import EngineError

VARIABLE = "SKYRL_ENGINE_KEY_FILE"
"""The environment variable that says where the key is, so that nodes and containers share it."""

_SHORTEST, _LONGEST = 32, 4096


def key_file() -> Path:
    """Return the place of the key: what the environment says, else a file in the user's state folder."""
    if place := os.environ.get(VARIABLE):
        return Path(place).expanduser()
    from platformdirs import user_state_path

    return user_state_path("skyrl-engine") / "run-key"


def read_key() -> bytes | None:
    """Return the key; None where there is none.

    Raises EngineError for a file that others may read or own, or that holds no key.
    """
    place = key_file()
    try:
        # without O_NONBLOCK a pipe would be waited for
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EngineError(f"the key {place} cannot be read ({error.strerror})", remedy=_remedy("Make it readable")) from error
    try:
        _refuse_shared(place, os.fstat(descriptor))
        key = os.read(descriptor, _LONGEST).strip()
    finally:
        os.close(descriptor)
    if len(key) < _SHORTEST:
        raise EngineError(f"the key {place} holds fewer than {_SHORTEST} bytes", remedy=_remedy("Remove it"))
    return key


def _refuse_shared(place: Path, status: os.stat_result) -> None:
    """Refuse what is no file, another user's, or open to others."""
    if not stat.S_ISREG(status.st_mode):
        raise EngineError(f"the key {place} is no file", remedy=_remedy("Remove it"))
    if status.st_uid != os.geteuid():
        raise EngineError(f"the key {place} is another user's", remedy=_remedy("Remove it, or give it to yourself"))
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise EngineError(
            f"the key {place} may be read or written by others (mode {stat.S_IMODE(status.st_mode):04o})",
            remedy=_remedy(f"Remove it, or, where nobody has read it, chmod 600 {place}"),
        )


def make_key() -> bytes:
    """Return the key, which is made where there is none. Raises as `read_key` does, and OSError where it cannot be written."""
    if (key := read_key()) is not None:
        return key
    place = key_file()
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # whatever the umask takes away or the folder's own rules add
            os.fchmod(descriptor, 0o600)
            file.write(secrets.token_hex(32).encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        # never over a key that another process made meanwhile
        with suppress(FileExistsError):
            os.link(aside, place)
    finally:
        aside.unlink()
    stored = read_key()
    assert stored is not None, f"{place} was linked above"
    return stored


def _remedy(action: str) -> str:
    return f"{action}; or set {VARIABLE} to another file"
