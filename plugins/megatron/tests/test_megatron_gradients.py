"""The backend's promise: gradients are sums over ranks, micro-batches and calls, however the model is divided.

Compared with the definition (transformers' model in float64, one process, one unpadded sequence at a time, whole logits), per parameter, as
||g - g'|| / ||g'||. Documents of different lengths, one empty; rows of one document, left-padded, or of several with gaps; chunks of five
positions; a vocabulary that tensor-parallel ranks cannot share without filling it up. float32 sums in another order differ by about 1e-7 per
operation, so 1e-5 leaves no room for a wrong scale, which would show as 0.5 or 1. Not covered: CUDA (see test_megatron_cuda.py).
"""

from collections.abc import Sequence

import numpy as np
import pytest
from by_day import now, rarely
from megatron_tasks import PAIRS, VOCABULARY, Case, Passed, inspect_between, run_passes, score_rows, start

from skyrl_engine.contracts import ComputeDtype, RankOutput
from skyrl_engine.testing.backends.batches import (
    DefinedResult,
    WeightedObjective,
    build_padded,
    definition,
    documents,
    find_worst_difference,
)
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.plugin import MegatronConfig

NAMES = ("llama-untied", "qwen3-tied")
QUADS = {
    "tp2xpp2": MegatronConfig(tensor_parallel=2, pipeline_parallel=2),
    "tp2xdp2": MegatronConfig(tensor_parallel=2),
    "pp2xdp2": MegatronConfig(pipeline_parallel=2),
    "tp2xcp2": MegatronConfig(tensor_parallel=2, context_parallel=2),
    "cp2xpp2": MegatronConfig(context_parallel=2, pipeline_parallel=2),
    "cp2xdp2": MegatronConfig(context_parallel=2),
    "cp4": MegatronConfig(context_parallel=4),
    "tp4": MegatronConfig(tensor_parallel=4),
    "pp4": MegatronConfig(pipeline_parallel=4),
    "dp4": MegatronConfig(),
    "tp2xpp2-interleaved": MegatronConfig(tensor_parallel=2, pipeline_parallel=2, virtual_pipeline=2),
    "cp2xpp2-interleaved": MegatronConfig(context_parallel=2, pipeline_parallel=2, virtual_pipeline=2),
}

CUTS = [Case(rows, size, calls=2) for rows in ("padded", "packed") for size in (1, 3)]
TWO_CUTS = [Case("padded", 3, calls=2), Case("packed", 1, calls=2)]


@pytest.fixture(scope="module")
def truth(models: dict[str, str]) -> dict[str, DefinedResult]:
    return {name: definition(models[name], documents(VOCABULARY)) for name in (*NAMES, "qwen2-untied", "llama3-rope")}


def agree(ranks: Sequence[Sequence[Passed]], true: DefinedResult, *, tolerance: float = 1e-5) -> None:
    """Per case: gradients on every rank; the loss, and every document's log-probabilities in order, on ranks that collect."""
    for case in zip(*ranks, strict=True):
        for rank in case:
            assert find_worst_difference(rank.gradients, true.gradients) <= tolerance
            if not rank.evaluated.coords.last_stage:
                assert not any(len(output.sample_ids) for output in [*rank.outputs, rank.evaluated])
        kept = [output for rank in case for output in rank.outputs if output.coords.collects]
        in_order(kept, true, tolerance=10 * tolerance)
        in_order([rank.evaluated for rank in case if rank.evaluated.coords.collects], true, tolerance=10 * tolerance)


def in_order(kept: list[RankOutput], true: DefinedResult, *, tolerance: float) -> None:
    """The loss; every document once, in order, with its own log-probabilities."""
    assert sum(output.metrics["loss"].value for output in kept) == pytest.approx(true.loss, rel=tolerance)
    kept = sorted(kept, key=lambda output: output.coords.dp)
    assert [int(number) for output in kept for number in output.sample_ids] == list(range(8))
    for output in kept:
        for place, number in enumerate(output.sample_ids):
            logprobs = output.fields["logprobs"][place]
            expected = true.logprobs.get(int(number), np.zeros(0))
            np.testing.assert_allclose(logprobs, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", now([*NAMES, "qwen2-untied", "llama3-rope"], "qwen3-tied", "llama3-rope"))
def test_one_rank(models: dict[str, str], truth: dict[str, DefinedResult], name: str) -> None:
    agree([run_passes(models[name], MegatronConfig(), CUTS)], truth[name])


@pytest.mark.parametrize("name", now(NAMES, "qwen3-tied"))
@pytest.mark.parametrize("layout", now(PAIRS, "tp2-whole-sequences", "pp2-interleaved"))
def test_two_ranks(pair: World, models: dict[str, str], truth: dict[str, DefinedResult], layout: str, name: str) -> None:
    agree(pair.run(run_passes, models[name], PAIRS[layout], CUTS), truth[name])


@pytest.mark.parametrize("layout", now(["tp2", "pp2"], "tp2"))
def test_biases_are_divided_too(pair: World, models: dict[str, str], truth: dict[str, DefinedResult], layout: str) -> None:
    """Qwen2.5 has biases on queries, keys and values."""
    agree(pair.run(run_passes, models["qwen2-untied"], PAIRS[layout], [Case("packed")]), truth["qwen2-untied"])


@pytest.mark.proof
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("cp2xpp2-interleaved", "llama-untied"),
        ("tp4", "qwen3-tied"),
        *(rarely(layout, "qwen3-tied") for layout in QUADS if layout != "tp4"),
    ],
)
def test_four_ranks(quad: World, models: dict[str, str], truth: dict[str, DefinedResult], layout: str, name: str) -> None:
    """Layouts of four that tests/proof/test_backend_parity.py does not have, and some that it has."""
    agree(quad.run(run_passes, models[name], QUADS[layout], TWO_CUTS), truth[name])


@pytest.mark.parametrize("layout", now(["tp2", "cp2", "pp2", "pp2-interleaved"], "tp2", "cp2"))
def test_recomputed_activations_change_nothing(
    pair: World, models: dict[str, str], truth: dict[str, DefinedResult], layout: str
) -> None:
    ranks = pair.run(run_passes, models["qwen3-tied"], PAIRS[layout], [Case("packed")], activation_checkpointing=True)
    agree(ranks, truth["qwen3-tied"])


@pytest.mark.parametrize("layout", now(["tp2", "dp2"], "tp2"))
def test_temperature_divides_the_logits(pair: World, models: dict[str, str], layout: str) -> None:
    true = definition(models["llama-untied"], documents(VOCABULARY), temperature=0.7)
    agree(pair.run(run_passes, models["llama-untied"], PAIRS[layout], [Case(temperature=0.7)]), true)


@pytest.mark.parametrize("layout", now(["tp2", "pp2", "cp2", "dp2"], "pp2"))
def test_micro_batches_without_scored_tokens_take_part(pair: World, models: dict[str, str], layout: str) -> None:
    half, everything = (4, 5, 6, 7), tuple(range(8))
    cases = [Case(size=1, unscored=half), Case(size=4, unscored=half), Case(size=4, unscored=everything)]
    ranks = pair.run(run_passes, models["llama-untied"], PAIRS[layout], cases)
    agree([rank[:2] for rank in ranks], definition(models["llama-untied"], documents(VOCABULARY, unscored=half)))
    assert all((gradient == 0).all() for rank in ranks for gradient in rank[2].gradients.values())


@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("layout", now(["tp2", "pp2", "cp2", "dp2"], "pp2"))
def test_other_precisions(
    pair: World, models: dict[str, str], truth: dict[str, DefinedResult], layout: str, dtype: ComputeDtype
) -> None:
    """float64 is as close as transformers, which normalises in float32. bfloat16 keeps 8 bits, 4e-3 per rounding, and a dozen roundings in
    four layers of large random weights end near 5e-2; a wrong scale would be 0.5 or 1.
    """
    ranks = pair.run(run_passes, models["qwen3-tied"], PAIRS[layout], [Case("packed")], dtype=dtype)
    for (case,) in ranks:
        kept_in = np.float64 if dtype == "float64" else np.float32
        assert {gradient.dtype for gradient in case.gradients.values()} == {np.dtype(kept_in)}
        assert find_worst_difference(case.gradients, truth["qwen3-tied"].gradients) <= (1e-5 if dtype == "float64" else 1e-1)


def test_a_wrong_scale_is_caught(pair: World, models: dict[str, str], truth: dict[str, DefinedResult]) -> None:
    """These tests would see a rank's average that was left in."""
    for (case,) in pair.run(run_passes, models["qwen3-tied"], PAIRS["dp2"], [Case(scale=0.5)]):
        assert find_worst_difference(case.gradients, truth["qwen3-tied"].gradients) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("layout", now(["tp2", "pp2", "dp2", "dp2-whole-optimizer"], "dp2"))
def test_looking_at_gradients_does_not_change_them(pair: World, models: dict[str, str], layout: str) -> None:
    for untouched, looked_at in pair.run(inspect_between, models["qwen3-tied"], PAIRS[layout]):
        for name, gradient in untouched.items():
            np.testing.assert_array_equal(gradient, looked_at[name], err_msg=name)


@pytest.mark.parametrize("layout", now(["tp2", "pp2-interleaved", "dp2"], "tp2"))
def test_a_model_for_scoring_alone(pair: World, models: dict[str, str], truth: dict[str, DefinedResult], layout: str) -> None:
    outputs = pair.run(score_rows, models["qwen3-tied"], PAIRS[layout], rows="packed", size=2, learns=False)
    in_order([output for output in outputs if output.coords.collects], truth["qwen3-tied"], tolerance=1e-4)


@pytest.mark.usefixtures("alone")
def test_gradients_and_weights_that_were_handed_out_stay(models: dict[str, str]) -> None:
    """On the CPU a whole tensor may be the accumulated gradient itself, which the next step clears."""
    backend = start(models["qwen3-tied"])
    backend.forward_backward(build_padded(documents(VOCABULARY), 8), WeightedObjective())
    gradients, weights = dict(backend.gradients()), dict(backend.weights())
    before = {name: (gradients[name].clone(), weights[name].clone()) for name in gradients}
    backend.optim_step()
    for name, (gradient, weight) in before.items():
        np.testing.assert_array_equal(gradients[name].numpy(), gradient.numpy(), err_msg=name)
        np.testing.assert_array_equal(weights[name].numpy(), weight.numpy(), err_msg=name)
    backend.close()
