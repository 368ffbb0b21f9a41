"""The files of a model's processors, carried into an export: whoever loads it prepares images as they were while it was trained."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from skyrl_engine.data.images.processor import Vision, VisionInputs
from skyrl_engine.model_facts.facts import ModelFacts, find_file

_IMAGES: Final = "preprocessor_config.json"
_ALL: Final = "processor_config.json"
"""Recent transformers write this file, with the image processor's settings inside, which then count more than those of `_IMAGES`."""
_VIDEOS: Final = "video_preprocessor_config.json"


def write_processors(facts: ModelFacts, vision: Vision, directory: Path) -> None:
    """Copy to `directory` what the model's directory has of them, and write the image processor as `vision` holds it: with
    `data.shrink_images_to` applied. Nothing is written of a model that is trained on text alone by its architecture.
    """
    if not facts.takes_images:
        return
    for name in (_IMAGES, _ALL, _VIDEOS):
        if (source := find_file(facts.model, name)) is not None:
            shutil.copyfile(source, directory / name)
    if not isinstance(vision, VisionInputs):
        return
    before, whole = _read(directory / _IMAGES), _read(directory / _ALL)
    vision.processor.save_pretrained(directory)
    if "processor_class" in before:  # by which AutoProcessor chooses; saving leaves it out
        _write(directory / _IMAGES, {**_read(directory / _IMAGES), "processor_class": before["processor_class"]})
    if "image_processor" in whole:
        _write(directory / _ALL, {**whole, "image_processor": _read(directory / _IMAGES)})


def _read(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return settings


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
