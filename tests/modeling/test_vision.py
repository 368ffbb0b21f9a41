"""A vision-language model inside the scorer: what is loaded and what refused, and what a pass without an image leaves behind."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.errors import ContractError, DataError, ModelError, UnsupportedError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.modeling.causal_lm import all_layers, split_causal_lm, transformer_layers
from skyrl_engine.modeling.loading import load_causal_lm, load_scorer, load_skeleton
from skyrl_engine.modeling.model_inputs import model_inputs
from skyrl_engine.modeling.parity import check_parity
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.tiny import IMAGE_TOKEN, VOCABULARY, write_vision_model
from skyrl_engine.modeling.vision import ImageDecoder, language_part
from skyrl_engine.proof.plain_model import PlainModel
from skyrl_engine.testing.adapters import with_adapter, write_adapter
from skyrl_engine.testing.backends.batches import build_padded, picture_documents


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_vision_model(folder)
    return folder


def load(directory: Path, **options: Any) -> tuple[Any, Scorer]:
    return load_scorer(ModelConfig(str(directory), **options), images=True)


def batch(*numbers: int) -> MicroBatch:
    documents = picture_documents(VOCABULARY, "own")
    return build_padded([documents[number] for number in numbers], len(numbers))[0]


def test_it_is_loaded_with_its_tower(directory: Path) -> None:
    model, scorer = load(directory)
    assert scorer.images is not None
    assert (scorer.images.token, scorer.images.merge, scorer.images.patch) == (IMAGE_TOKEN, 2, 3 * 2 * 4 * 4)
    assert {id(parameter) for parameter in scorer.parameters()} == {id(parameter) for parameter in model.parameters()}
    assert scorer.segment_support.layers == len(transformer_layers(language_part(scorer.decoder))) == 4
    assert len(all_layers(scorer.decoder)) == 4 + 3
    skeleton, empty = load_skeleton(ModelConfig(str(directory)), images=True)
    assert empty.images == scorer.images
    assert [name for name, _ in skeleton.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("windows", [False, True])
def test_adapters_leave_the_tower_alone(directory: Path, tmp_path: Path, windows: bool) -> None:
    """Layers of a tower with windows have the names of the decoder's; their adapters are read again, by PEFT too."""
    if windows:
        directory = tmp_path / "model"
        write_vision_model(directory, windows=True)
        write_adapter(str(directory), tmp_path / "adapter")
        model, _ = load(directory, lora=LoraConfig(path=str(tmp_path / "adapter")))
        by_peft = PlainModel.load(str(directory), images=True, adapt=lambda plain: with_adapter(plain, str(tmp_path / "adapter")))
        adapters = {name: parameter for name, parameter in by_peft.parameters.items() if ".lora_" in name}
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == adapters.keys()
        assert all(torch.equal(dict(model.named_parameters())[name].double(), value) for name, value in adapters.items())
    model, _ = load(directory, lora=LoraConfig())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 4 * 7
    assert all(".language_model.layers." in name for name in trained)
    with pytest.raises(ModelError, match=r"targets names 'qkv', which no linear layer of .* decoder is called"):
        load(directory, lora=LoraConfig(targets=("qkv",)))


def gradients(model: Any, scorer: Scorer, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    inputs = model_inputs(micro_batch, images=scorer.images)
    scorer(inputs.inputs, inputs.positions, micro_batch.labels)["logprobs"].sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_a_tower_with_windows_learns_as_transformers(tmp_path: Path) -> None:
    """Qwen2.5-VL, with an image of two by three tokens over windows of two by two, and without an image; within float32."""
    write_vision_model(tmp_path, windows=True)
    model, scorer = load(tmp_path)
    for number in (0, 2):
        document = picture_documents(VOCABULARY, "own")[number]
        found = gradients(model, scorer, build_padded([document], 1)[0])
        plain = PlainModel.load(str(tmp_path), images=True)
        images = {"mm_token_type_ids": (document.ids == IMAGE_TOKEN)[None].long()} if number == 0 else {}
        if number == 0:
            images |= {"pixel_values": document.pictures.pixels.double(), "image_grid_thw": document.pictures.grids}
        plain.scores(document.ids, **images)["logprobs"][document.weights[1:] != 0].sum().backward()
        due = {name: parameter.grad for name, parameter in plain.parameters.items() if parameter.grad is not None}
        assert due.keys() == {name for name in found if number == 0 or ".visual." not in name}
        for name, gradient in due.items():
            assert torch.linalg.norm(found[name] - gradient) <= 1e-4 * torch.linalg.norm(gradient), name


def test_without_an_image_the_tower_runs_and_its_gradient_is_exactly_0(directory: Path) -> None:
    """Even where an empty image's features are not finite: they are cut off, not multiplied by 0."""
    model, scorer = load(directory)
    assert isinstance(scorer.decoder, ImageDecoder)
    ran: list[int] = []
    hook = scorer.decoder.visual.register_forward_hook(lambda *_: ran.append(1))
    for _ in range(2):
        found = gradients(model, scorer, batch(2, 7))
        tower = {name: gradient for name, gradient in found.items() if ".visual." in name}
        assert tower.keys() == {name for name, _ in model.named_parameters() if ".visual." in name}
        assert not any(gradient.any() for gradient in tower.values())
        assert all(gradient.isfinite().all() for gradient in found.values())
        for layer in [scorer.decoder.visual.merger]:
            layer.linear_fc2.bias.data.fill_(float("inf"))
    hook.remove()
    assert len(ran) == 2


def test_with_an_image_every_parameter_learns(directory: Path) -> None:
    model, scorer = load(directory)
    found = gradients(model, scorer, batch(0, 2))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.any() for gradient in found.values())


def test_parity_notices_positions_and_images_of_its_own(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof at load could not fail if the probe's image moved nothing."""
    model = load_causal_lm(ModelConfig(str(directory)), images=True)
    scorer = Scorer(split_causal_lm(model), logits_per_chunk=10**4)
    check_parity(model, scorer, name="right")
    with monkeypatch.context() as patch:
        patch.setattr("skyrl_engine.modeling.model_inputs.rotary_positions", flat_positions)
        with pytest.raises(ModelError, match="computes logits that differ"):
            check_parity(model, scorer, name="flat positions")
    forward = ImageDecoder.forward
    monkeypatch.setattr(ImageDecoder, "forward", lambda *arguments, **inputs: forward(*arguments, **darken(inputs)))
    with pytest.raises(ModelError, match="computes logits that differ"):
        check_parity(model, scorer, name="black images")


def flat_positions(micro_batch: MicroBatch, _tokens: Any) -> torch.Tensor:
    mask = micro_batch.inputs["attention_mask"]
    return (mask.cumsum(1) - 1).clamp(min=0).expand(3, *mask.shape)


def darken(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: 0 * tensor if name == "pixel_values" else tensor for name, tensor in inputs.items()}


def test_what_the_model_is_given(directory: Path) -> None:
    _, scorer = load(directory)
    with_image = model_inputs(batch(0, 2), images=scorer.images).inputs
    assert set(with_image) == {"input_ids", "attention_mask", "position_ids", "pixel_values", "image_grid_thw"}
    assert with_image["position_ids"].shape == (3, *with_image["input_ids"].shape)
    text = model_inputs(batch(2, 7), images=scorer.images).inputs
    assert set(text) == {"input_ids", "attention_mask", "position_ids"}
    row = model_inputs(batch(0, 2), images=scorer.images, one_row=True)
    assert row.segments is not None
    assert row.inputs["position_ids"].shape == (3, 1, sum(row.segments.lengths))
    assert torch.equal(row.inputs["pixel_values"], with_image["pixel_values"])


def test_images_without_a_model_that_takes_them_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="rows carry image_grid_thw, which the backend does not give") as caught:
        model_inputs(batch(0))
    assert "train a vision-language model" in caught.value.remedy


def test_a_padding_token_that_stands_for_images_is_refused(directory: Path) -> None:
    _, scorer = load(directory)
    columns = batch(0, 2)
    ids = columns.inputs["input_ids"].masked_fill(columns.inputs["attention_mask"] == 0, IMAGE_TOKEN)
    with pytest.raises(DataError, match=f"rows are padded with {IMAGE_TOKEN}, the model's image token"):
        model_inputs(evolve(columns, inputs={**columns.inputs, "input_ids": ids}), images=scorer.images)


def test_pixels_must_not_be_left_out(directory: Path) -> None:
    _, scorer = load(directory)
    columns = batch(0)
    inputs = {name: tensor for name, tensor in columns.inputs.items() if name != "pixel_values"}
    with pytest.raises((ContractError, DataError)):
        model_inputs(evolve(columns, inputs=inputs), images=scorer.images)


def test_a_backend_that_gives_no_images_refuses_the_model(directory: Path) -> None:
    for refused in (load_scorer, load_skeleton):
        with pytest.raises(UnsupportedError, match=r"is a vision-language model, and the backend .* does not declare 'vision'"):
            refused(ModelConfig(str(directory)))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("ernie4_5_vl_moe", "a mixture of experts that takes images, which is not supported"),
        ("qwen2_vl", "a vision-language model of the architecture qwen2_vl, which is not supported"),
    ],
)
def test_other_vision_language_models_are_refused(directory: Path, tmp_path: Path, kind: str, what: str) -> None:
    shutil.copytree(directory, tmp_path / kind)
    (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    for images in (True, False):
        with pytest.raises(UnsupportedError, match=what) as caught:
            load_config(ModelConfig(str(tmp_path / kind)), images=images)
        assert "supported: qwen2_5_vl, qwen3_vl" in caught.value.cause
