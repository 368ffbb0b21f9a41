"""Models that see: log-probabilities and gradients are transformers' own, the vision tower's included, however the model is divided.

Compared with transformers' model in float64, one sample at a time: log-probabilities within 1e-4, and gradients per parameter as
||g - g'|| / ||g'|| within 1e-5. Both come out near 1e-6 (transformers in float32 is as far from itself in float64); a missing part would show
as 1e-2 and more. Ranks of stages after the first get no pixels. More is promised by the kit (test_megatron_conformance.py).
Not covered: CUDA.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import now, rarely
from megatron_tasks import start
from megatron_vision import (
    KINDS,
    Case,
    Seen,
    continue_training,
    export_weights,
    pictures,
    resume_checkpoint,
    score_pictures,
    scores_of,
    train_from_start,
)
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLForConditionalGeneration

from skyrl_engine import ModelError, UnsupportedError
from skyrl_engine.contracts import AdamWSettings, ModelConfig, RankOutput
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.modeling.tiny import write_vision_model
from skyrl_engine.testing.backends.batches import (
    Arrays,
    DefinedResult,
    WeightedObjective,
    build_packed,
    definition,
    find_worst_difference,
)
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.architecture import architecture_of
from skyrl_engine_megatron.library import TransformerLayer
from skyrl_engine_megatron.limits import refuse_model
from skyrl_engine_megatron.plugin import MegatronConfig
from skyrl_engine_megatron.vision_decoder import DeepStackLayer, InterleavedRotary

ONE = MegatronConfig()
PAIRS = {
    "tp2": MegatronConfig(tensor_parallel=2),
    "tp2-whole-sequences": MegatronConfig(tensor_parallel=2, sequence_parallel=False),
    "pp2": MegatronConfig(pipeline_parallel=2),
    "cp2": MegatronConfig(context_parallel=2),
    "dp2": MegatronConfig(),
    "dp2-whole-optimizer": MegatronConfig(distributed_optimizer=False),
    "pp2-interleaved": MegatronConfig(pipeline_parallel=2, virtual_pipeline=2),
}
QUADS = {
    "tp2xpp2": MegatronConfig(tensor_parallel=2, pipeline_parallel=2),
    "tp2xcp2": MegatronConfig(tensor_parallel=2, context_parallel=2),
}
CASES = [(kind, rows, size) for kind, rows, size in zip(KINDS, ("padded", "packed") * 2, (2, 1, 2, 1), strict=True)]
"""Every kind of batch; which of them is packed does not matter to the others."""
MIXED = [("mixed", "padded", 2), ("mixed", "packed", 1)]
SMOOTH = AdamWSettings(learning_rate=1e-2, epsilon=1.0, weight_decay=0.1)
"""Steps that follow gradients; with a small epsilon the sign of one near 0 would decide."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny models: image features go to the first two layers, or to the first one alone."""
    root = tmp_path_factory.mktemp("seeing")
    options: dict[str, dict[str, Any]] = {"tied": {}, "untied": {"tied": False}, "one-level": {"levels": (1,)}}
    for name, chosen in options.items():
        with quiet_progress():
            write_vision_model(root / name, **chosen)
    return {name: str(root / name) for name in options}


@pytest.fixture(scope="module")
def truth(seeing: dict[str, str]) -> Callable[[str, str], DefinedResult]:
    """Transformers' result for a kind of batch, computed when it is first asked for."""
    known: dict[tuple[str, str], DefinedResult] = {}

    def ask(name: str, kind: str) -> DefinedResult:
        if (name, kind) not in known:
            known[name, kind] = definition(seeing[name], pictures(kind))
        return known[name, kind]

    return ask


def agree(ranks: Sequence[Sequence[Seen]], cases: Sequence[Case], true: Callable[[str], DefinedResult]) -> None:
    """Every case: gradients on every rank, and every sample's log-probabilities once on those that collect."""
    for number, (kind, _, _) in enumerate(cases):
        results = [rank[number] for rank in ranks]
        for result in results:
            assert find_worst_difference(nonzero(result.gradients), nonzero(true(kind).gradients)) <= 1e-5, kind
        require_right([result.learned for result in results], true(kind))
        require_right([result.evaluated for result in results], true(kind))


def nonzero(gradients: Arrays) -> Arrays:
    """Without the tower's where no image was: those are 0 to the bit."""
    return {name: gradient for name, gradient in gradients.items() if gradient.any()}


def require_right(outputs: Sequence[RankOutput], true: DefinedResult) -> None:
    kept = [output for output in outputs if output.coords.collects]
    assert sum(output.metrics["loss"].value for output in kept) == pytest.approx(true.loss, rel=1e-5)
    logprobs = {int(number): output.fields["logprobs"][place] for output in kept for place, number in enumerate(output.sample_ids)}
    assert true.logprobs.keys() <= logprobs.keys()
    for number, expected in true.logprobs.items():
        np.testing.assert_allclose(logprobs[number], expected, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", now(["tied", "untied", "one-level"], "untied"))
def test_one_rank(seeing: dict[str, str], truth: Callable[[str, str], DefinedResult], name: str) -> None:
    agree([score_pictures(seeing[name], ONE, MIXED)], MIXED, lambda kind: truth(name, kind))


@pytest.mark.parametrize("layout", now(PAIRS, "pp2"))
def test_two_ranks(pair: World, seeing: dict[str, str], truth: Callable[[str, str], DefinedResult], layout: str) -> None:
    """Each stage of an interleaved pipeline holds two pieces of one layer here, so that features go to one layer."""
    name = "one-level" if layout == "pp2-interleaved" else "tied"
    agree(pair.run(score_pictures, seeing[name], PAIRS[layout], CASES), CASES, lambda kind: truth(name, kind))


@pytest.mark.proof
@pytest.mark.parametrize("layout", now(QUADS, "tp2xpp2"))
def test_four_ranks(quad: World, seeing: dict[str, str], truth: Callable[[str, str], DefinedResult], layout: str) -> None:
    agree(quad.run(score_pictures, seeing["tied"], QUADS[layout], CASES), CASES, lambda kind: truth("tied", kind))


@pytest.mark.proof
@pytest.mark.parametrize("layout", now(["tp2", "pp2"], "pp2"))
def test_recomputed_activations_change_nothing(
    pair: World, seeing: dict[str, str], truth: Callable[[str, str], DefinedResult], layout: str
) -> None:
    """Features that later layers add must be there at recomputation."""
    ranks = pair.run(score_pictures, seeing["untied"], PAIRS[layout], MIXED, activation_checkpointing=True)
    agree(ranks, MIXED, lambda kind: truth("untied", kind))


@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_precisions(pair: World, seeing: dict[str, str], truth: Callable[[str, str], DefinedResult], dtype: str) -> None:
    """Transformers rotates the tower's queries and keys in float32 whatever it computes in. bfloat16 keeps 8 bits."""
    for (case,) in pair.run(score_pictures, seeing["untied"], PAIRS["tp2"], [("mixed", "packed", 2)], dtype=dtype):
        assert find_worst_difference(case.gradients, truth("untied", "mixed").gradients) <= (1e-5 if dtype == "float64" else 0.2)


def without_deep_features(self: DeepStackLayer, *arguments: Any, context: Any = None, context_mask: Any = None, **rest: Any) -> Any:
    del context_mask
    return TransformerLayer.forward(self, *arguments, **rest)[0], context


def in_blocks(self: InterleavedRotary, position_ids: torch.Tensor, mrope_section: Sequence[int], **_: Any) -> torch.Tensor:
    """Qwen2-VL's order of axes."""
    angles = position_ids[..., None].float() * self.inv_freq
    own = [part[axis] for axis, part in enumerate(angles.split(list(mrope_section), -1))]
    return torch.cat([*own, *own], -1).transpose(0, 1)[:, :, None].contiguous()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("owner", "wrong"), [(DeepStackLayer, without_deep_features), (InterleavedRotary, in_blocks)])
def test_another_way_to_see_is_another_model(
    seeing: dict[str, str], monkeypatch: pytest.MonkeyPatch, owner: type, wrong: Callable[..., Any]
) -> None:
    """Loading would say so: its proof has an image in it."""
    monkeypatch.setattr(owner, "forward", wrong)
    with pytest.raises(ModelError, match=r"computes log-probabilities of .* that differ from transformers'"):
        score_pictures(seeing["tied"], ONE, [])


@pytest.mark.proof
@pytest.mark.parametrize("layout", now(["tp2", "pp2"], "pp2"))
def test_images_matter_and_so_does_whose_they_are(pair: World, seeing: dict[str, str], layout: str) -> None:
    """Negated pixels move the scores of both samples that have an image; so do the images of one another."""
    for before, *others in pair.run(scores_of, seeing["tied"], PAIRS[layout], "one image", ["own", "negated", "swapped"]):
        if before.coords.collects:
            for after in others:
                for place in range(2):
                    assert np.abs(after.fields["logprobs"][place] - before.fields["logprobs"][place]).max() > 1e-2


@pytest.mark.nightly
def test_steps_of_a_pipeline_lower_the_loss(pair: World, seeing: dict[str, str]) -> None:
    histories = pair.run(train_from_start, seeing["tied"], PAIRS["pp2"], AdamWSettings(learning_rate=1e-2), 5)
    losses = np.sum([[loss for loss, _ in history] for history in histories], 0)
    assert (np.diff(losses) < 0).all(), losses


@pytest.mark.parametrize("layout", now(["tp2", "pp2", "dp2"]))
def test_two_ranks_continue_bit_for_bit(pair: World, seeing: dict[str, str], tmp_path: Path, layout: str) -> None:
    optimizer = AdamWSettings(learning_rate=1e-2, weight_decay=0.1)
    for uninterrupted, again in pair.run(continue_training, seeing["untied"], PAIRS[layout], optimizer, tmp_path):
        assert uninterrupted[0] == again[0]
        assert uninterrupted[1].keys() == again[1].keys()
        for name, weight in uninterrupted[1].items():
            np.testing.assert_array_equal(again[1][name], weight, err_msg=name)


@pytest.mark.proof
@pytest.mark.usefixtures("alone")
def test_one_rank_continues_what_four_began(quad: World, seeing: dict[str, str], tmp_path: Path) -> None:
    """The tower included, which only the first stage holds."""
    (expected, _), *_ = quad.run(continue_training, seeing["tied"], QUADS["tp2xpp2"], SMOOTH, tmp_path)
    history, weights = resume_checkpoint(seeing["tied"], ONE, SMOOTH, tmp_path)
    assert [norm for _, norm in history] == pytest.approx([norm for _, norm in expected[0]], rel=1e-5)
    assert weights.keys() == expected[1].keys()
    for name, weight in expected[1].items():
        np.testing.assert_allclose(weights[name], weight, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("name", "layout"), [rarely("tied", "tp2"), ("untied", "pp2")])
def test_the_export_is_what_was_trained(pair: World, seeing: dict[str, str], tmp_path: Path, name: str, layout: str) -> None:
    """Weights bit for bit, the tower's too, and transformers' log-probabilities are the backend's."""
    ranks = pair.run(export_weights, seeing[name], PAIRS[layout], tmp_path)
    loaded = dict(Qwen3VLForConditionalGeneration.from_pretrained(tmp_path).named_parameters())
    before = dict(Qwen3VLForConditionalGeneration.from_pretrained(seeing[name]).named_parameters())
    for weights, _ in ranks:
        assert weights.keys() == loaded.keys() == before.keys()
        for key, parameter in loaded.items():
            np.testing.assert_array_equal(weights[key], parameter.detach().numpy(), err_msg=key)
    changed = "model.visual.patch_embed.proj.weight"
    assert not torch.equal(loaded[changed], before[changed])
    require_right([output for _, output in ranks], definition(str(tmp_path), pictures("mixed"), dtype=torch.float32))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {},
            {"pipeline_parallel": 4},
            "adds image features to its first 2 layers, and a pipeline of 4 pieces leaves 1 of its 4 to the one",
        ),
        (
            {},
            {"pipeline_parallel": 2, "virtual_pipeline": 2},
            "adds image features to its first 2 layers, and a pipeline of 4 pieces leaves 1",
        ),
        ({}, {"expert_parallel": 2, "tensor_parallel": 2}, "expert_parallel = 2, and the model has no experts"),
        ({"attention_dropout": 0.1}, {}, r"has dropout of 0.1 \(attention_dropout\)"),
        ({"hidden_act": "gelu"}, {}, "has the activation gelu"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mrope_section": [3, 2, 1]}},
            {},
            "has rotary positions of type yarn",
        ),
    ],
)
def test_what_cannot_be_is_refused(seeing: dict[str, str], change: dict[str, Any], options: dict[str, int], message: str) -> None:
    config = AutoConfig.from_pretrained(seeing["tied"])
    for name, value in change.items():
        setattr(config.text_config, name, value)
    with pytest.raises(UnsupportedError, match=message):
        refuse_model(MegatronConfig(**options), config, ModelConfig("the model"))


def test_features_that_do_not_fit_are_refused(seeing: dict[str, str]) -> None:
    config = AutoConfig.from_pretrained(seeing["tied"])
    config.vision_config.out_hidden_size = 16
    with pytest.raises(ModelError, match="the model has image features of 16 numbers for hidden states of 48"):
        architecture_of(config, "the model")


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WITH_EXPERTS = {
    **{name: PAIRS[name] for name in ("tp2", "pp2", "cp2", "dp2")},
    "ep2": MegatronConfig(tensor_parallel=2, expert_parallel=2),
    "ep2-of-dp2": MegatronConfig(expert_parallel=2),
}


@pytest.mark.parametrize("layout", now(WITH_EXPERTS, "ep2-of-dp2"))
def test_experts_that_see_learn_as_transformers(pair: World, tmp_path: Path, layout: str) -> None:
    """Compared in float32, since transformers' experts know no float64; tied and untied in turn."""
    with quiet_progress():
        write_vision_model(tmp_path, experts=EXPERTS, tied=layout in ("tp2", "pp2", "ep2"))
    cases: list[Case] = [("mixed", "padded", 2), ("several images of different sizes", "packed", 1)]
    true = {kind: definition(str(tmp_path), pictures(kind), dtype=torch.float32) for kind, _, _ in cases}
    agree(pair.run(score_pictures, str(tmp_path), WITH_EXPERTS[layout], cases), cases, true.__getitem__)


@pytest.mark.nightly
def test_exports_of_experts_that_see_load_in_transformers(pair: World, tmp_path: Path) -> None:
    with quiet_progress():
        write_vision_model(tmp_path / "model", experts=EXPERTS)
    (weights, _), _ = pair.run(export_weights, str(tmp_path / "model"), WITH_EXPERTS["ep2-of-dp2"], tmp_path / "export")
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded = model.state_dict()
    assert all((loaded[name].numpy() == weight).all() for name, weight in weights.items())


WINDOWED = {name: PAIRS[name] for name in ("tp2", "pp2", "cp2", "dp2", "tp2-whole-sequences", "pp2-interleaved")}


@pytest.mark.parametrize("layout", now(WINDOWED, "tp2", "pp2"))
def test_towers_with_windows_learn_as_transformers(pair: World, tmp_path: Path, layout: str) -> None:
    """Qwen2.5-VL, in float64: windows of two by two tokens in images of up to two by three, and axes of positions one after another."""
    with quiet_progress():
        write_vision_model(tmp_path, windows=True, tied=layout in ("tp2", "cp2"))
    true = {kind: definition(str(tmp_path), pictures(kind)) for kind, _, _ in CASES}
    agree(pair.run(score_pictures, str(tmp_path), WINDOWED[layout], CASES, dtype="float64"), CASES, true.__getitem__)


@pytest.mark.proof
@pytest.mark.nightly
@pytest.mark.parametrize("layout", QUADS)
def test_towers_with_windows_on_four_ranks(quad: World, tmp_path: Path, layout: str) -> None:
    with quiet_progress():
        write_vision_model(tmp_path, windows=True)
    true = {kind: definition(str(tmp_path), pictures(kind)) for kind, _, _ in CASES}
    recompute: dict[str, Any] = {"dtype": "float64", "activation_checkpointing": True}
    agree(quad.run(score_pictures, str(tmp_path), QUADS[layout], CASES, **recompute), CASES, true.__getitem__)


@pytest.mark.usefixtures("alone")
def test_exports_of_towers_with_windows_load_in_transformers(tmp_path: Path) -> None:
    """After steps; and windows matter: attention over whole images is another model."""
    with quiet_progress():
        write_vision_model(tmp_path / "model", windows=True)
    weights, output = export_weights(str(tmp_path / "model"), ONE, tmp_path / "export")
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = dict(model.named_parameters())
    assert weights.keys() == loaded.keys()
    for name, parameter in loaded.items():
        np.testing.assert_array_equal(weights[name], parameter.detach().numpy(), err_msg=name)
    require_right([output], definition(str(tmp_path / "export"), pictures("mixed"), dtype=torch.float32))
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    config["vision_config"]["fullatt_block_indexes"] = [0, 1, 2]
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    whole = definition(str(tmp_path / "export"), pictures("mixed"), dtype=torch.float32)
    assert np.abs(whole.logprobs[0] - output.fields["logprobs"][0]).max() > 1e-3


def test_windows_of_a_decoder_that_sees_are_refused() -> None:
    """Published Qwen2.5-VL models have none; those of the tower are its own."""
    text = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_hidden_layers": 2}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text)
    with pytest.raises(UnsupportedError, match="has layers that attend in a sliding window"):
        refuse_model(MegatronConfig(), config, ModelConfig("the model"))


def test_other_vision_language_models_are_refused() -> None:
    config = AutoConfig.for_model("qwen2_vl")
    with pytest.raises(UnsupportedError, match=r"is a qwen2_vl model; the megatron backend knows .*, qwen2_5_vl, .*qwen3_vl"):
        refuse_model(MegatronConfig(), config, ModelConfig("the model"))


@pytest.mark.usefixtures("alone")
def test_images_are_not_taken_by_a_model_that_does_not_see(models: dict[str, str]) -> None:
    with closing(start(models["qwen3-tied"])) as backend, pytest.raises(UnsupportedError, match="rows carry image_grid_thw"):
        backend.forward(build_packed(pictures("mixed"), 1), WeightedObjective())
