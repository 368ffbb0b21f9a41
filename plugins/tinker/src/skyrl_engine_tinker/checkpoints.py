"""Checkpoints that lie in the server's directory, whichever process wrote them."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skyrl_engine_tinker.settings import FACTS, PARTIAL, Settings


def listed(settings: Settings, model_id: str | None = None) -> list[dict[str, Any]]:
    """List checkpoints of one model or of all, the newest first. A model that saved none has an empty list."""
    folders = (where.parent for where in settings.directory.glob(f"*/weights/*/{FACTS}"))
    found = [_described(folder) for folder in folders if folder.suffix != PARTIAL]
    own = [each for each in found if model_id is None or each["tinker_path"].split("/")[2] == model_id]
    return sorted(own, key=lambda each: str(each["time"]), reverse=True)


def delete(settings: Settings, path: str) -> None:
    """Delete a checkpoint. Raises RequestError for a path that is none, and for one that is not there."""
    folder = settings.addressed(path)
    # without its facts it is no checkpoint any more, even when the rest of this is cut off
    (folder / FACTS).unlink()
    shutil.rmtree(folder)


def _described(folder: Path) -> dict[str, Any]:
    model_id = folder.parent.parent.name.replace("-", ":")
    return {
        "checkpoint_id": f"weights/{folder.name}",
        "checkpoint_type": "training",
        "time": datetime.fromtimestamp((folder / FACTS).stat().st_mtime, UTC).isoformat(),
        "tinker_path": f"tinker://{model_id}/weights/{folder.name}",
        "size_bytes": sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()),
    }
