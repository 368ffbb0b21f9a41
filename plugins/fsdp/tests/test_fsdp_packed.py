"""Packed rows: the same sums as one sequence at a time, on one rank and two; documents blind to each other; models that mix them refused.

Rows are cut with alignment gaps and padding after them, one or several to a micro-batch, next to an empty row. Tolerances as for padded
rows (test_fsdp_gradients.py): float32 sums in another order.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from fsdp_tasks import arrays, compute_packed_gradients, start

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import MicroBatch, RankOutput
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.backends.batches import (
    Document,
    WeightedObjective,
    build_padded,
    definition,
    documents,
    find_worst_difference,
    pack_documents,
)
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.plugin import fsdp

NAMES = ("qwen3-tied", "llama-untied", "gemma3_text", "mistral", "qwen3_moe")


class Keep(WeightedObjective):
    """Keeps every micro-batch's log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __call__(self, scores: Mapping[str, torch.Tensor], micro: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
        self.kept.append(scores["logprobs"].detach().clone())
        return super().__call__(scores, micro)


def test_packing_is_declared() -> None:
    assert "packed" in fsdp.skyrl_engine_describe_backend(config=None, world_size=2).capabilities


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.nightly),
        pytest.param({"activation_checkpointing": True}, id="activation-checkpointing"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one_plain_process(pair: World, models: dict[str, str], name: str, options: dict[str, Any]) -> None:
    due = definition(models[name], documents())
    ranks = pair.run(compute_packed_gradients, models[name], sizes=(1, 2), rows="packed", **options)
    for (first, gradients), (second, _) in zip(*ranks, strict=True):
        assert first + second == pytest.approx(due.loss, rel=1e-5)
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_equals_a_plain_process(models: dict[str, str], name: str) -> None:
    due = definition(models[name], documents())
    for total, gradients in compute_packed_gradients(models[name], sizes=(1, 3), rows="packed"):
        assert total == pytest.approx(due.loss, rel=1e-5)
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.usefixtures("alone")
def test_float64_is_exact_to_1e_10(models: dict[str, str]) -> None:
    """By GPT-2, whose norms compute in float64; those of Llama and its kin do so in float32 whatever they are given."""
    due = definition(models["gpt2"], documents())
    for total, gradients in compute_packed_gradients(models["gpt2"], sizes=(1, 4), dtype="float64"):
        assert total == pytest.approx(due.loss, rel=1e-10)
        assert find_worst_difference(gradients, due.gradients) <= 1e-10


def test_bfloat16_stays_within_its_precision(pair: World, models: dict[str, str]) -> None:
    due = definition(models["qwen3-tied"], documents())
    ranks = pair.run(compute_packed_gradients, models["qwen3-tied"], sizes=(2,), dtype="bfloat16")
    for (first, gradients), (second, _) in zip(*ranks, strict=True):
        assert first + second == pytest.approx(due.loss, rel=1e-2)
        assert find_worst_difference(gradients, due.gradients) <= 5e-2


def test_ranks_without_scored_tokens_take_part(pair: World, models: dict[str, str]) -> None:
    unscored = (4, 5, 6, 7)
    due = definition(models["qwen3-untied"], documents(unscored=unscored))
    for ((_, gradients),) in pair.run(compute_packed_gradients, models["qwen3-untied"], sizes=(2,), unscored=unscored):
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_scores_packed_rows_like_padded_ones(models: dict[str, str], name: str) -> None:
    backend = start(models[name])
    together, apart = Keep(), Keep()
    packed_loss = backend.forward([pack_documents([documents()[:5], documents()[5:]])], together).metrics["loss"].value
    padded_loss = backend.forward(build_padded(documents(), 8), apart).metrics["loss"].value
    assert packed_loss == pytest.approx(padded_loss, rel=1e-6)
    torch.testing.assert_close(together.kept[0], apart.kept[0], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("alone")
def test_one_model_serves_packed_and_padded_rows_in_turn(models: dict[str, str]) -> None:
    backend = start(models["qwen3-tied"], activation_checkpointing=True)
    backend.forward_backward([pack_documents([documents()[:4]]), *build_padded(documents()[4:], 2)], WeightedObjective())
    assert find_worst_difference(arrays(backend.gradients()), definition(models["qwen3-tied"], documents()).gradients) <= 1e-5


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied", "gemma3_text", "mistral"])
def test_changing_one_document_leaves_the_others_bit_identical(models: dict[str, str], name: str) -> None:
    """In one row and across the rows of a micro-batch; tokens are changed, lengths are not."""
    backend = start(models[name])
    counts = [int((row.weights != 0).sum()) for row in documents()]

    def scores(chosen: list[Document]) -> list[torch.Tensor]:
        keep = Keep()
        backend.forward([pack_documents([chosen[:5], chosen[5:]])], keep)
        return list(keep.kept[0].split(counts))

    before = scores(documents())
    for changed, row in enumerate(documents()):
        changed_documents = [*documents()[:changed], evolve(row, ids=(row.ids + 1) % VOCABULARY), *documents()[changed + 1 :]]
        after = scores(changed_documents)
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if number != changed:
                assert torch.equal(old, new), (changed, number)
        assert not counts[changed] or not torch.equal(before[changed], after[changed])


def test_a_model_that_mixes_documents_is_refused_when_packing_is_announced(pair: World, models: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="cannot be trained on packed rows: StableLmAttention does not hand on"):
        pair.run(start, models["stablelm"], rows="packed")


def refuse_packed_rows(directory: str, make: Callable[..., MicroBatch]) -> str:
    """Error of the first packed row on a rank that was not prepared for packed rows."""
    backend = start(directory)
    backend.forward(build_padded(documents(), 8), WeightedObjective())
    with pytest.raises(UnsupportedError) as caught:
        backend.forward([make([documents()[:4]])], WeightedObjective())
    return str(caught.value)


@pytest.mark.usefixtures("alone")
def test_otherwise_it_is_refused_at_the_first_packed_row(models: dict[str, str]) -> None:
    assert "StableLmModel cannot be trained on packed rows" in refuse_packed_rows(models["stablelm"], pack_documents)


@pytest.mark.usefixtures("alone")
def test_resuming_and_exporting_are_as_before(models: dict[str, str], tmp_path: Any) -> None:
    backend = start(models["qwen3-tied"])
    backend.forward_backward([pack_documents([documents()])], WeightedObjective())
    backend.optim_step()
    backend.export(tmp_path)
    again = start(str(tmp_path))
    for (name, tensor), (_, other_tensor) in zip(backend.weights(), again.weights(), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), other_tensor.numpy(), err_msg=name)
