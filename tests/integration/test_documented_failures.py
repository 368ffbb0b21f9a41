"""Failures that other engines have documented, each held here by the real thing: columns, plan, ranks, objective, merger.

Others have a place of their own: terms and means that count per micro-batch, lost and averaged ranks (tests/proof/test_plants.py, and the
matrix next to it), empty sequences in denominators (plugins/reducers/tests/test_four_sequences.py), padding rows, token-budget order, ranks
and replicas in the merger (plugins/mergers/tests).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.outputs import BatchOutput
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.pass_engine import PassEngine
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.proof.ranks import CONTEXT, RankPool
from skyrl_engine.proof.rollouts import make_rollouts
from skyrl_engine.workers.messages import UsePlugins

LOSS_FILE = '''
from skyrl_engine import LossOutput, Metric, loss

@loss(needs=("logprobs",))
def measured(tokens, config):
    """A metric whose name ends as if it were a sum, and one as if it were a mean."""
    count = len(tokens.logprobs)
    return LossOutput(
        -tokens.logprobs,
        {
            "thing_sum": Metric.mean(float(-tokens.logprobs.detach().sum()), count),
            "loss_mean": Metric.sum(1.0),
            "reward_max": Metric.min(float(count)),
        },
    )

@loss(needs=("logprobs", "advantages"))
def selecting(tokens, config):
    """Selects by covariance, like clip_cov: tokens whose advantage is far above the mean count for nothing."""
    centred = (tokens.advantages - tokens.advantages.mean()) * (tokens.logprobs - tokens.logprobs.mean()).detach()
    return -(centred < centred.std()).float() * tokens.advantages * tokens.logprobs
'''


class Ranks:
    """One rank in this process; `run` takes a mini-batch through it and clears the gradient."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder

    def run(
        self, columns: SampleColumns, loss: dict[str, Any], *, reducer: str = "token_mean", **layout: Any
    ) -> tuple[BatchOutput, dict[str, np.ndarray]]:
        plugins = resolve(
            from_dict({"loss": loss, "reducer": {"use": reducer}, "collator": {"use": "padded"}}, "test"), need=()
        ).plugins
        group = self._pool.group(1, "float32")
        group.ask(UsePlugins({place: selected.to_lock_entry() for place, selected in plugins.items()}))
        engine = PassEngine(Assembly.of(plugins, CONTEXT, 1), group, Layout(**layout))
        output = engine.forward_backward(engine.plan(columns)).result().output
        gradients = engine.gradients()
        engine.discard()
        return output, gradients

    def local(self, name: str) -> dict[str, Any]:
        return {"use": f"{self._folder / 'losses.py'}:{name}"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "losses.py").write_text(LOSS_FILE)
    write_model(folder / "model", value_head=True)
    plugins = resolve(from_dict({"collator": {"use": "padded"}}, "test"), need=()).plugins
    with RankPool(ModelConfig(str(folder / "model"), value_head=True), plugins) as pool:
        yield Ranks(pool, folder)


def worst(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    return max(float(np.linalg.norm(got[name] - wanted[name]) / max(np.linalg.norm(wanted[name]), 1e-12)) for name in wanted)


def test_what_is_not_a_number_under_a_zero_mask_does_not_leak(engine: Ranks) -> None:
    """0 * NaN is NaN: a masked token's ratio must not be computed and then multiplied away."""
    columns = make_rollouts(("old_logprobs", "advantages", "ref_logprobs"))
    masked = columns.loss_weight == 0
    assert masked.any()
    broken = {name: np.where(masked, np.float32(np.nan), values) for name, values in columns.columns.items()}
    loss = {"use": "ppo", "terms": [{"use": "kl", "coef": 0.1}]}
    clean_output, clean = engine.run(columns, loss, micro_batch_rows=3)
    output, gradients = engine.run(attrs.evolve(columns, columns=broken), loss, micro_batch_rows=3)
    assert output.metrics["loss"].result == clean_output.metrics["loss"].result
    assert all(np.array_equal(gradients[name], clean[name]) for name in clean)


def test_critic_kl_and_entropy_count_once_however_many_micro_batches_there_are(engine: Ranks) -> None:
    columns = make_rollouts(("old_logprobs", "advantages", "ref_logprobs", "old_values", "returns"))
    terms = [{"use": name, "coef": 0.5} for name in ("kl", "entropy", "value_clip")]
    loss = {"use": "ppo", "terms": terms}
    (whole, expected), (cut, gradients) = (engine.run(columns, loss, micro_batch_rows=rows) for rows in (16, 1))
    assert worst(gradients, expected) < 1e-5
    for name in ("kl", "entropy", "value_clip"):
        contribution = whole.metrics[f"objective/{name}"].result
        assert contribution != 0
        assert cut.metrics[f"objective/{name}"].result == pytest.approx(contribution, rel=1e-5)


def test_fractional_weights_are_not_truncated(engine: Ranks) -> None:
    """Half of every weight is half the sum; and where all are fractions, whole numbers would leave nothing."""
    columns = make_rollouts(())
    halved = attrs.evolve(columns, loss_weight=(columns.loss_weight * 0.5).astype(np.float32))
    for rows in (16, 3):
        full, gradient = engine.run(columns, {"use": "cross_entropy"}, reducer="sum", micro_batch_rows=rows)
        half, halved_gradient = engine.run(halved, {"use": "cross_entropy"}, reducer="sum", micro_batch_rows=rows)
        assert half.metrics["loss"].result == pytest.approx(0.5 * full.metrics["loss"].result, rel=1e-6)
        assert worst({name: 2 * each for name, each in halved_gradient.items()}, gradient) < 1e-5
    _, mean = engine.run(columns, {"use": "cross_entropy"})
    _, halved_mean = engine.run(halved, {"use": "cross_entropy"})
    assert worst(halved_mean, mean) < 1e-5, "uniform factors leave a mean as it is"


@pytest.mark.parametrize("rows", [16, 3, 1])
def test_metrics_combine_as_they_declare_whatever_their_names_say(engine: Ranks, rows: int) -> None:
    columns = make_rollouts(())
    output, _ = engine.run(columns, engine.local("measured"), micro_batch_rows=rows)
    micro_batches = -(-16 // rows)
    scored = int(np.count_nonzero(columns.loss_weight))
    token_loss = output.fields["token_loss"].values
    assert len(token_loss) == scored
    assert output.metrics["thing_sum"].result == pytest.approx(token_loss.mean(), rel=1e-5)
    assert output.metrics["loss_mean"].result == micro_batches
    assert output.metrics["reward_max"].result <= scored / micro_batches


def test_the_reducer_does_not_reach_into_the_selection(engine: Ranks) -> None:
    """Engines that scale advantages by 1 / length change which tokens stand out; here the same tokens are selected by every reducer."""
    columns = make_rollouts(("advantages",))
    selected = {
        reducer: engine.run(columns, engine.local("selecting"), reducer=reducer)[0].fields["token_loss"].values != 0
        for reducer in ("sum", "token_mean", "sequence_mean", "sequence_mean_token_sum_norm", "group_mean")
    }
    assert 0.5 < selected["sum"].mean() < 1.0
    for chosen in selected.values():
        np.testing.assert_array_equal(chosen, selected["sum"])


@pytest.mark.parametrize("layout", [{"micro_batch_tokens": 80}, {"micro_batch_rows": 1}, {"micro_batch_rows": 5}])
def test_every_sample_comes_back_once_and_in_order(engine: Ranks, layout: dict[str, int]) -> None:
    columns = make_rollouts(())
    expected, _ = engine.run(columns, {"use": "cross_entropy"})
    shuffled = columns.take(np.random.default_rng(2).permutation(len(columns)))
    output, _ = engine.run(shuffled, {"use": "cross_entropy"}, **layout)
    assert output.sample_ids.tolist() == shuffled.sample_ids.tolist()
    for row, sample in enumerate(output.sample_ids.tolist()):
        np.testing.assert_allclose(output.fields["logprobs"][row], expected.fields["logprobs"][sample], atol=1e-5)
        np.testing.assert_array_equal(output.scored[row], expected.scored[sample])
