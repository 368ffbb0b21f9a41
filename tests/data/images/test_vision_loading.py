"""Which models take images, by their configuration, and what is said where none can be made."""

import json

import pytest
from transformers import LlamaConfig, Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from skyrl_engine.config.schema import DataConfig, ModelConfig
from skyrl_engine.data.images import processor as vision_module
from skyrl_engine.data.images.processor import NoVision, VisionInputs, load_vision
from skyrl_engine.model_facts.facts import ModelFacts

DATA = DataConfig(train="rows.jsonl")
SIZE = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}


@pytest.fixture
def folder(tmp_path):
    """A vision-language model's directory, as far as the data needs it."""
    Qwen3VLConfig(image_token_id=7).save_pretrained(tmp_path)
    Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, temporal_patch_size=2, size=SIZE).save_pretrained(tmp_path)
    return tmp_path


def load(folder, **settings):
    return load_vision(ModelFacts(ModelConfig(path=str(folder))), DataConfig(train="rows.jsonl", **settings))


def test_the_processor_over_pillow_and_the_image_token_are_those_of_the_model(folder):
    vision = load(folder)
    assert isinstance(vision, VisionInputs)
    assert (vision.image_token, vision.max_pixels, vision.patch_dim) == (7, DATA.max_image_pixels, 3 * 2 * 16 * 16)
    assert type(vision.processor) is Qwen2VLImageProcessorPil
    assert vision.tokens((1, 4, 6)) == 6


def test_the_files_that_the_hub_has_name_another_form_of_the_processor(folder):
    """The torchvision one, under its former name, with the processor class that needs a video processor."""
    file = folder / "preprocessor_config.json"
    names = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **names}))
    vision = load(folder)
    assert isinstance(vision, VisionInputs)
    assert type(vision.processor) is Qwen2VLImageProcessorPil


def test_shrinking_images_changes_the_processor(folder):
    vision = load(folder, shrink_images_to=32 * 64)
    assert dict(vision.processor.size) == {"shortest_edge": 32 * 32, "longest_edge": 32 * 64}
    assert dict(load(folder, shrink_images_to=500).processor.size) == {"shortest_edge": 500, "longest_edge": 500}


def test_a_text_model_takes_no_images(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    vision = load(tmp_path)
    assert isinstance(vision, NoVision)
    assert "has no vision_config" in vision.refusal("sample 3").cause


def test_a_vision_model_without_an_image_processor_trains_on_text_alone(folder):
    (folder / "preprocessor_config.json").unlink()
    vision = load(folder)
    assert isinstance(vision, NoVision)
    assert "no image processor can be loaded" in vision.cause
    assert "preprocessor_config.json" in vision.remedy


def test_a_processor_without_a_grid_is_named(folder):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    CLIPImageProcessorPil().save_pretrained(folder)
    vision = load(folder)
    assert isinstance(vision, NoVision)
    assert "CLIPImageProcessorPil" in vision.cause


def test_a_missing_pillow_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr(vision_module, "find_spec", {"PIL": None}.get)
    vision = load(folder)
    assert isinstance(vision, NoVision)
    assert 'pip install "skyrl-engine[vision]"' in vision.remedy
