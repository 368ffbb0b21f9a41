"""Frozen parameters, groups of the optimizer and noise on embeddings give what fsdp gives on one rank.

megatron-core holds queries, keys and values, or gate and up, as one parameter: the patterns below take some of them apart, and a whole stage.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from by_day import now
from megatron_tasks import PAIRS, VOCABULARY, arrays, own, start

from skyrl_engine import CheckpointError, ConfigError
from skyrl_engine.contracts import AdamWSettings, ModelConfig, ParameterGroup, RankEnvironment
from skyrl_engine.testing.backends.batches import Arrays, WeightedObjective, add_noise, build_packed, documents
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.backend import FsdpBackend
from skyrl_engine_fsdp.options import FsdpConfig
from skyrl_engine_megatron.plugin import MegatronConfig

FREEZE = ("*.embed_tokens.*", "model.layers.[01].*", "*.layers.2.self_attn.[kv]_proj.*", "*.layers.3.mlp.up_proj.*")
"""All of the first of two stages, and parts of two parameters of the second."""
SOME = ("*.layers.0.self_attn.k_proj.*", "*.layers.1.mlp.gate_proj.*", "*.norm.weight")
GROUPS = (
    ParameterGroup("*.q_proj.*", rate_factor=0.5),
    ParameterGroup("*.up_proj.*", rate_factor=2.0, weight_decay=0.0),
    ParameterGroup("*.embed_tokens.*", weight_decay=0.5),
)
OPTIMIZER = AdamWSettings(learning_rate=1e-2, epsilon=0.5, weight_decay=0.1, max_grad_norm=1.0)
CASES: dict[str, tuple[tuple[str, ...], tuple[ParameterGroup, ...]]] = {
    "a-stage": (FREEZE, ()),
    "parts-and-groups": (SOME, GROUPS),
    "groups": ((), GROUPS),
}


def step(backend: Any, chosen: Sequence[Any], *, noise: bool) -> tuple[Arrays, float]:
    batch = build_packed(chosen, 2)
    backend.forward_backward([add_noise(each) for each in batch] if noise else batch, WeightedObjective())
    gradients = arrays(backend.gradients())
    return gradients, backend.optim_step().grad_norm


def train(
    directory: str, options: MegatronConfig, freeze: tuple[str, ...], groups: tuple[ParameterGroup, ...], noise: bool = False
) -> tuple[Arrays, list[float], Arrays]:
    """The first step's gradients, the norms of three steps, and the weights after them."""
    more = {"neftune_alpha": 5.0} if noise else {}
    settings = evolve(OPTIMIZER, groups=groups)
    with closing(start(directory, settings, options=options, freeze=freeze, dtype="float64", **more)) as backend:
        passed = [step(backend, own(documents(VOCABULARY), backend), noise=noise) for _ in range(3)]
        return passed[0][0], [norm for _, norm in passed], arrays(backend.weights())


def train_by_fsdp(
    directory: str, freeze: tuple[str, ...], groups: tuple[ParameterGroup, ...], noise: bool = False
) -> tuple[Arrays, list[float], Arrays]:
    """The same on one rank of fsdp."""
    backend = FsdpBackend(FsdpConfig())
    spec = ModelConfig(directory, freeze=freeze, dtype="float64", neftune_alpha=5.0 if noise else None)
    backend.setup(spec, evolve(OPTIMIZER, groups=groups), RankEnvironment(0, 1, "cpu", 0, "packed"))
    with closing(backend):
        passed = [step(backend, documents(VOCABULARY), noise=noise) for _ in range(3)]
        return passed[0][0], [norm for _, norm in passed], arrays(backend.weights())


def require_same(ranks: list[tuple[Arrays, list[float], Arrays]], due: tuple[Arrays, list[float], Arrays]) -> None:
    for gradients, norms, weights in ranks:
        assert gradients.keys() == due[0].keys()
        for name, gradient in due[0].items():
            assert np.linalg.norm(gradients[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name
        np.testing.assert_allclose(norms, due[1], rtol=1e-6)
        assert weights.keys() == due[2].keys()
        for name, weight in due[2].items():
            assert np.linalg.norm(weights[name] - weight) <= 1e-6 * np.linalg.norm(weight), name


CHOSEN = [("a-stage", "pp2"), ("parts-and-groups", "tp2")]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("case", "layout"), now([(case, layout) for case in CASES for layout in PAIRS], *CHOSEN))
def test_steps_are_those_of_fsdp_on_one_rank(pair: World, models: dict[str, str], case: str, layout: str) -> None:
    name = models["llama-untied" if case == "a-stage" else "qwen3-tied"]
    require_same(pair.run(train, name, PAIRS[layout], *CASES[case]), train_by_fsdp(name, *CASES[case]))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("layout", now(PAIRS, "tp2"))
def test_noise_is_that_of_fsdp_on_one_rank(pair: World, models: dict[str, str], layout: str) -> None:
    name = models["qwen3-tied"]
    require_same(pair.run(train, name, PAIRS[layout], (), (), noise=True), train_by_fsdp(name, (), (), noise=True))


@pytest.mark.nightly
@pytest.mark.usefixtures("alone")
def test_a_tied_embedding_is_frozen_on_both_stages(pair: World, models: dict[str, str]) -> None:
    freeze = ("lm_head.weight",)
    ranks = pair.run(train, models["qwen3-tied"], PAIRS["pp2"], freeze, ())
    require_same(ranks, train_by_fsdp(models["qwen3-tied"], freeze, ()))


def resume(directory: str, options: MegatronConfig, checkpoint: Path, freeze: tuple[str, ...], other: tuple[str, ...]) -> Any:
    """Weights after the second step, uninterrupted and from a checkpoint before it; what another pattern is told."""
    with closing(start(directory, OPTIMIZER, options=options, freeze=freeze)) as backend:
        step(backend, own(documents(VOCABULARY), backend), noise=False)
        backend.save(checkpoint)
        step(backend, own(documents(VOCABULARY), backend), noise=False)
        uninterrupted = arrays(backend.weights())
    with closing(start(directory, OPTIMIZER, options=options, freeze=freeze)) as backend:
        dist.barrier()
        backend.load(checkpoint)
        step(backend, own(documents(VOCABULARY), backend), noise=False)
        resumed = arrays(backend.weights())
    with closing(start(directory, OPTIMIZER, options=options, freeze=other)) as backend, pytest.raises(CheckpointError) as caught:
        backend.load(checkpoint)
    return uninterrupted, resumed, str(caught.value)


@pytest.mark.parametrize("layout", now(["dp2", "tp2", "pp2"], "dp2"))
def test_a_run_goes_on_bit_for_bit_with_its_own_patterns_alone(
    pair: World, models: dict[str, str], tmp_path: Path, layout: str
) -> None:
    for uninterrupted, resumed, said in pair.run(resume, models["llama-untied"], PAIRS[layout], tmp_path, FREEZE, SOME):
        assert all(np.array_equal(resumed[name], weight) for name, weight in uninterrupted.items())
        assert "is of a run with another model.freeze: model.embed_tokens.weight is frozen in one of the two" in said


@pytest.mark.usefixtures("alone")
def test_a_group_that_matches_nothing_is_refused(models: dict[str, str]) -> None:
    settings = evolve(OPTIMIZER, groups=(ParameterGroup("*.embed_tokens.*", weight_decay=0.5),))
    with pytest.raises(ConfigError, match=r"optimizer.groups\[0\].match.* it matches no parameter that is trained"):
        start(models["llama-untied"], settings, freeze=FREEZE)


@pytest.mark.usefixtures("alone")
def test_a_model_that_scores_alone_is_held_once_in_the_precision_of_the_run(models: dict[str, str]) -> None:
    with closing(start(models["llama-untied"], learns=False, dtype="bfloat16")) as backend:
        assert not backend._state.pieces
        assert {parameter.dtype for parameter in backend._state.parameters.values()} == {torch.bfloat16}
