"""Transformer Engine's attention: called as its documentation says, used only where it was compared, refused where it is missing.

It runs on CUDA devices alone. Here stand-ins written from its documentation take its place, in every layout of two ranks; the real one is
run by `test_megatron_cuda.py`, which needs a device.
"""

import logging
import sys
from typing import Any

import pytest
import torch
from megatron_kernels import (
    AsDocumented,
    Halves,
    Leaking,
    OnOneRank,
    Raising,
    WrongGradient,
    attending,
    catch_refusal,
    run_passes_with_kernels,
)
from megatron_tasks import VOCABULARY, Case

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.testing.backends.batches import definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron import kernels
from skyrl_engine_megatron.attention import DocumentAttention
from skyrl_engine_megatron.plugin import MegatronConfig

CASES = [Case("padded", 3, calls=2), Case("packed", 3)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-moe"])
def test_one_rank_has_the_gradient_of_the_definition(models: dict[str, str], name: str) -> None:
    dtype = torch.float32 if name == "qwen3-moe" else torch.float64  # transformers computes experts in nothing finer
    true = definition(models[name], documents(VOCABULARY), dtype=dtype)
    for result in run_passes_with_kernels(models[name], MegatronConfig(), CASES):
        assert find_worst_difference(result.gradients, true.gradients) <= 1e-5


@pytest.mark.parametrize(
    "options",
    [MegatronConfig(context_parallel=2), MegatronConfig(tensor_parallel=2), MegatronConfig(pipeline_parallel=2)],
    ids=["cp2", "tp2", "pp2"],
)
def test_two_ranks_have_it_too(pair: World, models: dict[str, str], options: MegatronConfig) -> None:
    true = definition(models["qwen3-tied"], documents(VOCABULARY))
    for rank in pair.run(run_passes_with_kernels, models["qwen3-tied"], options, CASES):
        for result in rank:
            assert find_worst_difference(result.gradients, true.gradients) <= 1e-5


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("base", [Leaking, WrongGradient, Raising])
def test_wrong_kernels_that_were_asked_for_end_the_run(models: dict[str, str], base: type) -> None:
    said = catch_refusal(models["qwen3-tied"], MegatronConfig(), base)
    assert "Transformer Engine's attention differs from torch's by" in said
    assert said.endswith('Set backend.attention to "torch", and report it')
    if base is Raising:
        assert "by inf on rank 0 (RuntimeError: no kernel image is available)" in said


def test_kernels_with_another_order_of_tokens_are_noticed(pair: World, models: dict[str, str]) -> None:
    for message in pair.run(catch_refusal, models["qwen3-tied"], MegatronConfig(context_parallel=2), Halves):
        assert "Transformer Engine's attention differs from torch's by" in message


def test_a_rank_that_cannot_keeps_nobody_waiting(pair: World, models: dict[str, str]) -> None:
    for message in pair.run(catch_refusal, models["qwen3-tied"], MegatronConfig(context_parallel=2), OnOneRank):
        assert "by inf on rank 1 (RuntimeError: no kernel image is available)" in message


@pytest.mark.usefixtures("alone")
def test_wrong_kernels_that_happen_to_be_there_are_not_used(models: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert attending(models["qwen3-tied"], MegatronConfig(), Leaking) == "DocumentAttention"
    assert "documents are attended one by one: Transformer Engine's attention differs" in caplog.text
    assert attending(models["qwen3-tied"], MegatronConfig(), AsDocumented) == "DocumentKernels"


class Precision:
    """Megatron-core's configuration, as `chosen` reads it."""

    def __init__(self, *, bf16: bool) -> None:
        self.bf16 = bf16


def choice(attention: Any, device: str, *, bf16: bool = True) -> Any:
    return kernels.choose_core_attention(MegatronConfig(attention=attention), Precision(bf16=bf16), torch.device(device))


@pytest.mark.usefixtures("alone")
def test_who_attends_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine is not installed here, and as if it were."""
    believed = object()
    monkeypatch.setattr(kernels, "choose_kernels", lambda *_, **__: believed)
    assert choice("auto", "cpu") is choice("torch", "cuda") is choice("auto", "cuda", bf16=False) is DocumentAttention
    with pytest.raises(UnsupportedError, match=r"computes on CUDA devices alone\. Set backend\.attention to"):
        choice("transformer_engine", "cpu")
    monkeypatch.setattr(kernels, "version", lambda: None)
    assert choice("auto", "cuda") is DocumentAttention
    with pytest.raises(UnsupportedError, match=r"and finds rank 0: none\. Install it on every machine"):
        choice("transformer_engine", "cuda")
    monkeypatch.setattr(kernels, "version", lambda: "2.8.0")
    monkeypatch.setattr(kernels, "make_document_kernels", lambda base: base)
    assert choice("auto", "cuda") is choice("transformer_engine", "cuda") is believed


def test_ranks_with_different_versions_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(everywhere: list[Any], own: Any) -> None:
        everywhere[:] = [own, "2.7.0"]

    monkeypatch.setattr(kernels.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(kernels.dist, "all_gather_object", gathered)
    monkeypatch.setattr(kernels, "version", lambda: "2.8.0")
    assert choice("auto", "cuda") is DocumentAttention
    with pytest.raises(UnsupportedError, match=r"finds rank 0: 2\.8\.0, rank 1: 2\.7\.0"):
        choice("transformer_engine", "cuda")


def test_what_cannot_be_imported_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert kernels.version() is None
    monkeypatch.setattr(kernels, "find_spec", lambda _name: object())
    assert kernels.version() is None, "megatron-core takes a missing one for a mock"
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", None)
    with caplog.at_level(logging.WARNING):
        assert kernels.version() is None
    assert "is installed and cannot be imported" in caplog.text


def test_other_precisions_are_refused_while_planning(models: dict[str, str]) -> None:
    from skyrl_engine.model_facts.configuration import load_config
    from skyrl_engine_megatron.limits import refuse_model

    options = MegatronConfig(attention="transformer_engine")
    spec = ModelConfig(models["qwen3-tied"], dtype="float32")
    with pytest.raises(UnsupportedError, match=r'"transformer_engine" computes in bfloat16, and model\.dtype is float32'):
        refuse_model(options, load_config(spec, images=True), spec)
    spec = ModelConfig(models["qwen3-tied"], dtype="bfloat16")
    refuse_model(options, load_config(spec, images=True), spec)
