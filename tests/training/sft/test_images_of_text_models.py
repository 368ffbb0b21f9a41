"""A model that takes images by its configuration, and is trained on text alone."""

import json
from pathlib import Path

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.data.images.processor import NoVision, VisionInputs
from skyrl_engine.engine.capability import vision_of
from skyrl_engine.model_facts.facts import ModelFacts


def of(directory: Path, model_type: str) -> object:
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return vision_of(ModelFacts(ModelConfig(path=str(directory))), VisionInputs(processor=None, image_token=1, max_pixels=1))


def test_images_are_refused_with_its_first_sample_not_with_its_first_micro_batch(tmp_path):
    refused = of(tmp_path, "qwen3_5")
    assert isinstance(refused, NoVision)
    assert "qwen3_5, is trained on text alone" in str(refused.refusal("sample 3").cause)


def test_images_of_a_model_that_is_trained_on_them_are_taken(tmp_path):
    assert isinstance(of(tmp_path, "qwen3_vl"), VisionInputs)
