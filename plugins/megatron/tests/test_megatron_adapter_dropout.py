"""Dropout of adapters: what is dropped is the same in every layout, and gradients are PEFT's with masks drawn by the definition.

The definition of `adapter_dropout`, written here in NumPy for one document and one layer at a time, takes the place of PEFT's dropout in a
plain model in float64. A number dropped in another place changes a gradient by 1e-2 and more; they agree within 1e-6, since transformers
normalises in float32 here too.
"""

from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from by_day import now
from megatron_tasks import PAIRS, VOCABULARY, Case, Passed, continue_training, run_passes, start, train_from_start

from skyrl_engine import ContractError, UnsupportedError
from skyrl_engine.contracts import AdamWSettings, LoraConfig, ModelConfig
from skyrl_engine.proof.plain_model import PlainModel
from skyrl_engine.testing.adapters import with_adapter, write_adapter
from skyrl_engine.testing.backends.batches import (
    DefinedResult,
    Document,
    WeightedObjective,
    build_packed,
    documents,
    find_worst_difference,
    plain_objective,
)
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.adapter_dropout import choose_kept, hash_name
from skyrl_engine_megatron.adapter_limits import refuse_dropout_in_trees
from skyrl_engine_megatron.plugin import MegatronConfig

RATE = 0.3
CASES = [Case("padded", 3), Case("packed", 1, calls=2)]
STEP = 0x9E3779B97F4A7C15


def finish(states: Any) -> Any:
    """SplitMix64's output at states that were advanced."""
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))


def advance(states: Any, count: Any = 1) -> Any:
    return states + np.asarray(count, dtype=np.uint64) * np.array(STEP, dtype=np.uint64)


def define_kept(layer: str, number: int, length: int, width: int, *, seed: int = 0, steps: int = 0, rate: float = RATE) -> Any:
    """bool[length, width], by the definition: what a layer keeps of one document's inputs."""
    base = np.random.SeedSequence([seed, steps]).generate_state(1, np.uint64)
    sample = finish(advance(base + finish(advance(np.array([number], dtype=np.uint64)))))
    token = finish(advance(advance(sample, np.arange(length))))
    name = np.frombuffer(sha256(layer.encode()).digest()[:8], dtype="<u8")
    bits = finish(advance(finish(advance(token ^ name))[:, None], np.arange(width)))
    return (bits >> np.uint64(40)) / 2.0**24 >= rate


class DefinedDropout(torch.nn.Module):
    """In the place of PEFT's dropout of a layer: of the document that `current` holds."""

    def __init__(self, layer: str, current: list[Document]) -> None:
        super().__init__()
        self.layer, self.current = layer, current

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kept = define_kept(self.layer, self.current[0].number, *inputs.shape[-2:])
        return inputs * torch.from_numpy(kept) / (1 - RATE)


def define(model: str, adapter: str) -> DefinedResult:
    """The objective of all documents and its gradient, one document at a time, in float64."""
    current: list[Document] = []
    plain = PlainModel.load(model, adapt=lambda model: with_adapter(model, adapter))
    for name, module in plain.model.named_modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = DefinedDropout(name, current)
    # with DoRA, PEFT drops in training alone
    plain.model.train()
    loss = 0.0
    for document in documents(VOCABULARY):
        if len(document.ids) > 1:
            current[:] = [document]
            total, _ = plain_objective(plain, [document])
            torch.autograd.backward(total)
            loss += total.item()
    gradients = {name: value.grad.numpy() for name, value in plain.parameters.items() if value.grad is not None}
    return DefinedResult(loss, gradients, {})


@pytest.fixture(scope="module")
def due(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], tuple[str, DefinedResult]]:
    """An adapter of a model, of DoRA or not, and what is due with it."""
    known: dict[tuple[str, bool], tuple[str, DefinedResult]] = {}

    def ask(name: str, dora: bool) -> tuple[str, DefinedResult]:
        if (name, dora) not in known:
            adapter = write_adapter(models[name], tmp_path_factory.mktemp("adapter"), dora=dora)
            known[name, dora] = adapter, define(models[name], adapter)
        return known[name, dora]

    return ask


def check(ranks: list[list[Passed]], due: DefinedResult) -> None:
    for passed in zip(*ranks, strict=True):
        for rank in passed:
            assert find_worst_difference(rank.gradients, due.gradients) <= 1e-6
        collected = [output for rank in passed for output in rank.outputs if output.coords.collects]
        assert sum(output.metrics["loss"].value for output in collected) == pytest.approx(due.loss, rel=1e-6)


@pytest.mark.parametrize("dora", now([False, True], False))
@pytest.mark.parametrize("layout", now(PAIRS, "tp2", "cp2"))
@pytest.mark.parametrize("recompute", now([False, True], False))
def test_gradients_are_those_of_masks_by_the_definition(
    pair: World, models: dict[str, str], due: Callable[[str, bool], Any], layout: str, dora: bool, recompute: bool
) -> None:
    """Recomputed activations drop again what they dropped, though other micro-batches came between."""
    adapter, expected = due("qwen2-untied", dora)
    lora = LoraConfig(path=adapter, dropout=RATE)
    options: dict[str, Any] = {"lora": lora, "dtype": "float64", "activation_checkpointing": recompute}
    check(pair.run(run_passes, models["qwen2-untied"], PAIRS[layout], CASES, **options), expected)


@pytest.mark.proof
@pytest.mark.parametrize("layout", now(["tp2xpp2", "tp2xcp2"], "tp2xpp2"))
def test_four_ranks(quad: World, models: dict[str, str], due: Callable[[str, bool], Any], layout: str) -> None:
    more = {"tp2xpp2": {"pipeline_parallel": 2}, "tp2xcp2": {"context_parallel": 2}}[layout]
    adapter, expected = due("qwen2-untied", False)
    options: dict[str, Any] = {"lora": LoraConfig(path=adapter, dropout=RATE), "dtype": "float64"}
    check(quad.run(run_passes, models["qwen2-untied"], MegatronConfig(tensor_parallel=2, **more), CASES, **options), expected)


@pytest.mark.parametrize("layout", now(["tp2", "pp2", "cp2", "dp2"], "pp2"))
def test_resumed_equals_uninterrupted_bit_for_bit(pair: World, models: dict[str, str], tmp_path: Path, layout: str) -> None:
    lora, optimizer = LoraConfig(rank=4, dropout=RATE), AdamWSettings(learning_rate=1e-2)
    arguments = (models["qwen2-untied"], PAIRS[layout], optimizer, tmp_path)
    for uninterrupted, resumed in pair.run(continue_training, *arguments, before=1, after=2, lora=lora):
        assert uninterrupted[0] == resumed[0]
        for name, weight in uninterrupted[1].items():
            np.testing.assert_array_equal(resumed[1][name], weight, err_msg=name)


@pytest.mark.nightly
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("layout", PAIRS)
def test_steps_are_those_of_one_rank(pair: World, models: dict[str, str], layout: str) -> None:
    """Other numbers are dropped at every step, and with every seed; the same ones in every layout. In float64."""
    lora, optimizer = LoraConfig(rank=4, dropout=RATE), AdamWSettings(learning_rate=1e-2, epsilon=1.0)
    arguments: Any = (models["qwen2-untied"], PAIRS[layout], optimizer, 3)
    options: dict[str, Any] = {"lora": lora, "dtype": "float64"}
    history, weights = train_from_start(arguments[0], MegatronConfig(), *arguments[2:], **options)
    for steps, own_weights in pair.run(train_from_start, *arguments, **options):
        assert [norm for _, norm, _ in steps] == pytest.approx([norm for _, norm, _ in history], rel=1e-9)
        for name, weight in weights.items():
            np.testing.assert_allclose(own_weights[name], weight, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.usefixtures("alone")
def test_what_is_dropped_changes_with_steps_and_is_nothing_in_evaluation(models: dict[str, str], tmp_path: Path) -> None:
    """The rate 0 is, to the bit, as if nobody had asked; a step of the learning rate 0 changes what is dropped alone."""
    adapter = write_adapter(models["qwen3-tied"], tmp_path)
    optimizer = AdamWSettings(learning_rate=0.0)
    losses: dict[float, list[float]] = {}
    for rate in (0.0, RATE):
        with closing(start(models["qwen3-tied"], optimizer, lora=LoraConfig(path=adapter, dropout=rate))) as backend:
            batch = build_packed(documents(VOCABULARY), 2)
            outputs = [backend.forward(batch, WeightedObjective())]
            for _ in range(2):
                outputs += [backend.forward_backward(batch, WeightedObjective()) for _ in range(2)]
                backend.optim_step()
            losses[rate] = [output.metrics["loss"].value for output in outputs]
    assert losses[RATE][0] == losses[0.0][0]
    assert len({*losses[0.0][1:]}) == 1
    scored, first, again, second, _ = losses[RATE]
    assert first == again
    assert len({scored, first, second}) == 3


def test_a_layer_keeps_what_the_definition_says() -> None:
    """A share of 1 - rate of 2^18 numbers is kept, within five standard deviations; parts of a layer's inputs are parts of the whole."""
    keys = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63, 1 << 10))
    for rate in (0.0, 0.1, 0.9):
        whole = choose_kept(keys, hash_name("a layer"), 0, 256, rate)
        assert abs(whole.double().mean().item() - (1 - rate)) <= 5 * (rate * (1 - rate) / whole.numel()) ** 0.5
        assert torch.equal(choose_kept(keys, hash_name("a layer"), 100, 156, rate), whole[:, 100:])
    other = choose_kept(keys, hash_name("another layer"), 0, 256, 0.5)
    both = (other == choose_kept(keys, hash_name("a layer"), 0, 256, 0.5)).double().mean().item()
    assert abs(both - 0.5) <= 5 * 0.5 / other.numel() ** 0.5


@pytest.mark.usefixtures("alone")
def test_samples_without_ids_are_refused(models: dict[str, str]) -> None:
    with closing(start(models["qwen3-tied"], lora=LoraConfig(dropout=RATE))) as backend:
        batch = [evolve(micro_batch, sample_ids=None) for micro_batch in build_packed(documents(VOCABULARY), 9)]
        with pytest.raises(ContractError, match="8 samples has 0 sample_ids, and dropout of adapters is drawn by them"):
            backend.forward_backward(batch, WeightedObjective())
        backend.forward(batch, WeightedObjective())


def test_shared_prefixes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"model.lora.dropout = 0.3 drops inputs of every sample for itself"):
        refuse_dropout_in_trees(ModelConfig("the model", lora=LoraConfig(dropout=RATE)))
    refuse_dropout_in_trees(ModelConfig("the model", lora=LoraConfig()))
