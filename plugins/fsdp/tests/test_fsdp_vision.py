"""Vision-language models on the backend: adapters, recomputation, precisions, checkpoints, exports, and what the engine itself builds.

That log-probabilities and gradients are transformers' own, on one rank and two, is shown by the conformance kit (test_fsdp_conformance.py).
Gradients are compared as there, per parameter, as ||g - g'|| / ||g'||.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_lora_tasks import continue_training, export_adapters, gradients_of
from fsdp_tasks import start
from transformers import AutoModelForImageTextToText

from skyrl_engine.contracts import (
    FactoryContext,
    Layout,
    LoraConfig,
    MicroBatch,
    PerSequence,
    RankOutput,
    SampleColumns,
)
from skyrl_engine.modeling.tiny import IMAGE_TOKEN, VOCABULARY, write_vision_model
from skyrl_engine.spans import Spans
from skyrl_engine.testing.adapters import write_adapter
from skyrl_engine.testing.backends.batches import (
    DefinedResult,
    WeightedObjective,
    build_padded,
    definition,
    find_worst_difference,
    picture_documents,
)
from skyrl_engine.testing.ranks.world import World
from skyrl_engine.testing.subject import part_of
from skyrl_engine.workers.batch import ShardBatch
from skyrl_engine.workers.dispatch import cut
from skyrl_engine_fsdp.plugin import FsdpConfig


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of a "tied" and an "untied" model, and of adapters for the first."""
    root = tmp_path_factory.mktemp("vision")
    for name in ("tied", "untied"):
        write_vision_model(root / name, tied=name == "tied")
    write_adapter(str(root / "tied"), root / "adapter")
    return {name: str(root / name) for name in ("tied", "untied", "adapter")}


@pytest.fixture(scope="module")
def due(vision: dict[str, str]) -> dict[str, DefinedResult]:
    """The right loss and gradient, by model; of adapters alone by "adapter"."""
    documents = picture_documents(VOCABULARY, "own")
    definitions = {name: definition(vision[name], documents) for name in ("tied", "untied")}
    return {**definitions, "adapter": definition(vision["tied"], documents, adapter=vision["adapter"])}


def check(ranks: Any, due: DefinedResult, tolerance: float = 1e-5) -> None:
    """The ranks' parts of the loss add up, and every rank has the whole gradient."""
    for parts in zip(*ranks, strict=True):
        assert sum(loss for loss, _, _ in parts) == pytest.approx(due.loss, rel=max(1e-5, tolerance / 5))
        for _, gradients, _ in parts:
            assert find_worst_difference(gradients, due.gradients) <= tolerance


@pytest.mark.usefixtures("alone")
def test_one_plain_process_equals_transformers(vision: dict[str, str], due: dict[str, DefinedResult]) -> None:
    assert "lm_head.weight" in due["untied"].gradients
    assert "lm_head.weight" not in due["tied"].gradients
    check([gradients_of(vision["untied"], sizes=(1, 8), pictures=True)], due["untied"])
    check([gradients_of(vision["tied"], sizes=(3,), pictures=True, dtype="float64")], due["tied"])


@pytest.mark.proof
@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_recomputed_activations_change_nothing(
    pair: World, vision: dict[str, str], due: dict[str, DefinedResult], rows: str
) -> None:
    ranks = pair.run(gradients_of, vision["untied"], rows=rows, sizes=(1,), pictures=True, activation_checkpointing=True)
    check(ranks, due["untied"])


def test_a_frozen_vision_tower_changes_no_other_gradient(
    pair: World, vision: dict[str, str], due: dict[str, DefinedResult]
) -> None:
    """On two ranks, in float64; the tower's parameters have no gradient, and all others that of the whole model."""
    rest = {name: gradient for name, gradient in due["untied"].gradients.items() if not name.startswith("model.visual.")}
    assert 0 < len(rest) < len(due["untied"].gradients)
    ranks = pair.run(gradients_of, vision["untied"], sizes=(2,), pictures=True, dtype="float64", freeze=("model.visual.*",))
    for parts in ranks:
        for _, gradients, _ in parts:
            assert gradients.keys() == rest.keys()
            assert find_worst_difference(gradients, rest) <= 1e-9


@pytest.mark.proof
def test_bfloat16_stays_within_its_precision(pair: World, vision: dict[str, str], due: dict[str, DefinedResult]) -> None:
    ranks = pair.run(gradients_of, vision["tied"], sizes=(2,), pictures=True, dtype="bfloat16")
    check(ranks, due["tied"], 5e-2)


@pytest.mark.usefixtures("alone")
def test_bfloat16_turns_images_by_the_angles_of_transformers(vision: dict[str, str]) -> None:
    """In float32, as transformers does whatever it computes in, and not rounded to bfloat16 on their way into a layer."""
    backend, seen = start(vision["tied"], dtype="bfloat16"), []
    tower = backend._scorer.decoder.visual

    def keep(_module: object, _arguments: object, inputs: Mapping[str, Any]) -> None:
        seen.append(inputs["position_embeddings"])

    with tower.blocks[-1].attn.register_forward_pre_hook(keep, with_kwargs=True):
        backend.forward(build_padded(picture_documents(VOCABULARY, "own")[:1], 1), WeightedObjective())
    model = AutoModelForImageTextToText.from_pretrained(vision["tied"], dtype=torch.bfloat16)
    with model.model.visual.blocks[-1].attn.register_forward_pre_hook(keep, with_kwargs=True):
        pictures = picture_documents(VOCABULARY, "own")[0].pictures
        assert pictures is not None
        model.model.visual(pictures.pixels.bfloat16(), grid_thw=pictures.grids)
    for mine, theirs in zip(*seen, strict=True):
        assert theirs.dtype == torch.float32
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rows", [pytest.param("padded", marks=pytest.mark.proof), "packed"])
def test_adapters_are_of_the_language_model_alone(
    pair: World, vision: dict[str, str], due: dict[str, DefinedResult], rows: str
) -> None:
    """The tower is frozen, and runs forward alone; ranks without an image pass it all the same."""
    assert all(".language_model." in name for name in due["adapter"].gradients)
    lora = LoraConfig(path=vision["adapter"])
    check(pair.run(gradients_of, vision["tied"], rows=rows, sizes=(1, 4), pictures=True, lora=lora), due["adapter"])


@pytest.mark.nightly
def test_two_ranks_continue_bit_for_bit(pair: World, vision: dict[str, str], tmp_path: Path) -> None:
    for uninterrupted, resumed, _, _ in pair.run(continue_training, vision["tied"], tmp_path, pictures=True):
        assert uninterrupted[0] == resumed[0]
        assert uninterrupted[1].keys() == resumed[1].keys()
        for name, values in uninterrupted[1].items():
            np.testing.assert_array_equal(values, resumed[1][name], err_msg=name)


@pytest.mark.parametrize("name", ["tied", pytest.param("untied", marks=pytest.mark.proof)])
def test_the_export_is_what_transformers_loads(pair: World, vision: dict[str, str], tmp_path: Path, name: str) -> None:
    before = dict(AutoModelForImageTextToText.from_pretrained(vision[name]).named_parameters())
    ranks = pair.run(export_adapters, vision[name], tmp_path, pictures=True)
    model, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    again = definition(str(tmp_path), picture_documents(VOCABULARY, "own"), dtype=torch.float32)
    for weights, logprobs, _ in ranks:
        assert weights.keys() == dict(model.named_parameters()).keys()
        for parameter_name, parameter in model.named_parameters():
            np.testing.assert_array_equal(weights[parameter_name], parameter.detach().numpy(), err_msg=parameter_name)
            assert not np.array_equal(weights[parameter_name], before[parameter_name].detach().numpy()), (
                f"{parameter_name} was not trained"
            )
        for number, values in logprobs.items():
            if len(values):
                np.testing.assert_allclose(values, again.logprobs[number], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ({"tensor_parallel": 2}, "padded"),
        ({"context_parallel": 2}, "packed"),
        pytest.param({"tensor_parallel": 2}, "packed", marks=pytest.mark.nightly),
        pytest.param({"context_parallel": 2}, "padded", marks=pytest.mark.nightly),
        pytest.param({"tensor_parallel": 2, "context_parallel": 2}, "packed", marks=pytest.mark.nightly),
    ],
)
def test_ranks_divide_layers_and_samples_with_images(
    request: pytest.FixtureRequest, vision: dict[str, str], due: dict[str, DefinedResult], sizes: dict[str, int], rows: str
) -> None:
    """In float64; small micro-batches, some of them without an image, and context-parallel ranks whose tokens have none.

    The tower turns queries and keys in float32 whatever it computes in, so that sums of its parts round there.
    """
    ranks = math.prod(sizes.values())
    world: World = request.getfixturevalue("pair" if ranks == 2 else "quad")
    options = FsdpConfig(**sizes)
    results = world.run(gradients_of, vision["untied"], rows=rows, sizes=(1, 8), pictures=True, dtype="float64", options=options)
    for parts in results:
        for _, gradients, _ in parts:
            assert gradients.keys() == due["untied"].gradients.keys()
            for inside, tolerance in ((True, 1e-7), (False, 1e-10)):
                chosen = {name: due["untied"].gradients[name] for name in gradients if ("visual" in name) is inside}
                assert find_worst_difference({name: gradients[name] for name in chosen}, chosen) <= tolerance


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel": 2}, {"context_parallel": 2}], ids=str)
def test_experts_that_see_learn_as_transformers(pair: World, tmp_path: Path, sizes: dict[str, int]) -> None:
    """Compared in float32, since transformers' experts know no float64."""
    write_vision_model(tmp_path, tied=False, experts={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24})
    true = definition(str(tmp_path), picture_documents(VOCABULARY, "own"), dtype=torch.float32)
    ranks = pair.run(gradients_of, str(tmp_path), sizes=(2, 8), pictures=True, options=FsdpConfig(**sizes))
    for parts in ranks:
        for _, gradients, _ in parts:
            assert find_worst_difference(gradients, true.gradients) <= 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel": 2}, {"context_parallel": 2}], ids=str)
def test_towers_with_windows_learn_as_transformers(pair: World, tmp_path: Path, sizes: dict[str, int]) -> None:
    """Qwen2.5-VL; in float64, though the tower turns queries and keys in float32."""
    write_vision_model(tmp_path, tied=False, windows=True)
    true = definition(str(tmp_path), picture_documents(VOCABULARY, "own"))
    ranks = pair.run(gradients_of, str(tmp_path), sizes=(2, 8), pictures=True, dtype="float64", options=FsdpConfig(**sizes))
    for parts in ranks:
        for _, gradients, _ in parts:
            assert find_worst_difference(gradients, true.gradients) <= 1e-7


class Keep:
    """Keeps every token's log-probability by sample id."""

    needs = frozenset({"logprobs"})
    temperature = 1.0

    def __init__(self) -> None:
        self.kept: dict[int, list[float]] = {}

    def __call__(self, scores: Mapping[str, torch.Tensor], micro_batch: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
        samples = micro_batch.samples
        for place, sample in enumerate(samples.sample_ids.tolist()):
            first, last = samples.scored.offsets[place : place + 2]
            self.kept[sample] = scores["logprobs"][first:last].tolist()
        return scores["logprobs"].sum(), RankOutput.empty()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["padded", "packed"])
def test_what_the_engines_collators_build_is_scored_as_by_transformers(
    vision: dict[str, str], due: dict[str, DefinedResult], name: str
) -> None:
    """From columns through plan and shard; a micro-batch has the samples that the plan gave it, images and all."""
    import skyrl_engine_collators.plugin as collators

    documents = [document for document in picture_documents(VOCABULARY, "own") if len(document.ids)]
    columns = SampleColumns.from_lists(
        input_ids=[document.ids.tolist() for document in documents],
        loss_mask=[(document.weights != 0).int().tolist() for document in documents],
        sample_ids=np.array([document.number for document in documents]),
        extras={
            "pixel_values": [document.pictures.pixels.numpy() for document in documents],
            "image_grid_thw": [document.pictures.grids.numpy() for document in documents],
            "mm_token_type_ids": [(document.ids == IMAGE_TOKEN).int().numpy() for document in documents],
        },
    )
    collator = getattr(collators, name).skyrl_engine_make_collator(config=None, context=FactoryContext(pad_token_id=0))
    plan = collator.plan(columns.lengths, Layout(micro_batch_rows=3) if name == "padded" else Layout())
    (shard,) = cut(columns, plan.mini_batches[0], PerSequence(np.ones(len(columns))), ())
    batch = ShardBatch(shard, part_of(collator, name, "collator"), "loss", Spans())
    backend, keep = start(vision["tied"]), Keep()
    backend.forward(batch, keep)
    assert sorted(keep.kept) == sorted(document.number for document in documents)
    for number, values in keep.kept.items():
        np.testing.assert_allclose(values, due["tied"].logprobs[number], rtol=0, atol=1e-4)
