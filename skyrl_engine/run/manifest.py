"""run.json: what a run was made of. Written once, then extended by one entry per session; every write replaces the file in one step."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import asdict

from skyrl_engine import __version__
from skyrl_engine.errors import EngineError
from skyrl_engine.registry.plugin_lock import LockedPlugin, package_sha256
from skyrl_engine.run.durable import write_durably

FORMAT = 1
_RECORDED = ("name", "distribution", "version", "source", "target", "engine_requirement", "path", "sha256")


def new_manifest(
    *,
    plugins: Mapping[str, Mapping[str, Any]],
    observers: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    origins: Mapping[str, str],
    seeds: Mapping[str, int],
    world: Mapping[str, Any],
    data: Mapping[str, Any],
    environment: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest of a run that has no session yet. `plugins` (by kind) and `observers` are plugin locks."""
    return {
        "format": FORMAT,
        "engine": asdict(LockedPlugin.of_engine()),
        "created": now(),
        "plugins": {kind: plugin_facts(lock) for kind, lock in plugins.items()},
        "observers": [plugin_facts(lock) for lock in observers],
        "config": dict(config),
        "origins": dict(origins),
        "seeds": dict(seeds),
        "world": dict(world),
        "data": dict(data),
        "environment": dict(environment),
        "extra": dict(extra),
        "sessions": [],
    }


def plugin_facts(lock: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what identifies the plugin of a lock, and its options; drop the source text that a lock may carry.

    `sha256` is that of a local file's content, or of the Python files of the package that the plugin was imported from.
    """
    record = lock["record"]
    facts = {key: record[key] for key in _RECORDED if key in record}
    return {**facts, "sha256": record.get("sha256") or package_sha256(record["target"]), "options": lock["options"]}


def begin_session(
    manifest: dict[str, Any], *, start_step: int, plugins: Mapping[str, Mapping[str, Any]], changed: Sequence[str]
) -> None:
    """Append a session. `changed` says in sentences what differs from the session before."""
    manifest["sessions"].append(
        {
            "started": now(),
            "start_step": start_step,
            "engine": __version__,
            "plugins": {kind: _version_of(lock["record"]) for kind, lock in plugins.items()},
            "changed": list(changed),
            "finished": None,
            "end_step": None,
            "error": None,
        }
    )


def end_session(manifest: dict[str, Any], *, step: int, error: str | None) -> None:
    """Complete the last session's entry."""
    manifest["sessions"][-1].update(finished=now(), end_step=step, error=error)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest, None for a damaged one, which a run does without. Raises EngineError for a manifest of another format."""
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict):
        return None
    if manifest.get("format") != FORMAT:
        raise EngineError(
            f"{path} is no run manifest of format {FORMAT}", remedy="Use the engine version that wrote it, or start a new run"
        )
    if not isinstance(manifest.get("sessions"), list):
        return None
    return manifest


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raises EngineError when the manifest holds what JSON cannot, or the disk refuses it."""
    try:
        text = json.dumps(manifest, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"the run manifest holds a value that is not JSON ({error})",
            remedy="Return only plain finite values from skyrl_engine_manifest_extra",
        ) from error
    try:
        write_durably(path, text + "\n")
    except OSError as error:
        raise EngineError(f"{path} cannot be written ({error})", remedy="Free space there or make it writable") from error


def now() -> str:
    """UTC time, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version_of(record: Mapping[str, Any]) -> str:
    return f"{record.get('distribution') or record.get('path')}:{record['name']} {record.get('version') or record.get('sha256')}"
