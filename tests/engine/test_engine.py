"""The public engine: one plan for all passes, gradients of one mini-batch, numbers per step, answers that may wait."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from skyrl_engine import ContractError, DataError, Engine, ModelError, UnsupportedError
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import Ragged
from skyrl_engine.errors import CheckpointError, ConfigError
from skyrl_engine.proof.rollouts import make_rollouts

Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def columns() -> SampleColumns:
    """Eleven samples without groups, which mini-batches would not cut, with what a policy loss reads."""
    rollouts = make_rollouts(("old_logprobs", "advantages"))
    return SampleColumns.create(
        input_ids=rollouts.input_ids,
        token_offsets=rollouts.token_offsets,
        action_offsets=rollouts.action_offsets,
        loss_weight=rollouts.loss_weight,
        columns=rollouts.columns,
    ).take(np.arange(11))


@pytest.fixture
def open_engine(model: Path) -> Iterator[Any]:
    """`open_engine(**tables)`: an engine on one rank with micro-batches of two rows, closed with the test."""
    engines = []

    def make(**tables: Any) -> Engine:
        base = {"model": {"path": str(model)}, "optimizer": {"learning_rate": 1e-2}, "training": {"micro_batch_rows": 2}}
        engine = Engine.open({**base, **tables})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def is_same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_file_and_overrides_open_it_too(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(f'[model]\npath = "{model}"\n[optimizer]\nschedule = "linear"\n')
    with Engine.open(file, ["training.steps=4"]) as engine:
        assert engine.step == 0
    with pytest.raises(UnsupportedError, match="ends at the last step, and nobody says how many there will be"):
        Engine.open(file)
    with pytest.raises(ConfigError, match=r"model\.pat"):
        Engine.open({"model": {"pat": str(model)}})


def test_a_loop_by_hand_is_train(open_engine: Any, columns: SampleColumns) -> None:
    """Weights after two mini-batches, to the last bit; parts of a mini-batch add up to it in the same order."""
    ready, by_hand, by_parts = open_engine(), open_engine(), open_engine()
    ready.train(ready.plan(columns, mini_batch_size=6))
    for engine, cut in ((by_hand, False), (by_parts, True)):
        plan = engine.plan(columns, mini_batch_size=6)
        assert len(plan) == 2
        for mini_batch in range(len(plan)):
            if cut:
                engine.forward_backward(plan, mini_batch, micro_batches=(0, 1))
            engine.forward_backward(plan, mini_batch)
            engine.optim_step()
    assert ready.step == by_hand.step == by_parts.step == 2
    assert is_same(ready.weights(), by_hand.weights())
    assert is_same(ready.weights(), by_parts.weights())


def test_every_pass_over_a_plan_sees_the_same_bits(open_engine: Any, columns: SampleColumns) -> None:
    """A score pass and training before its step give equal scores: the first importance ratio is exactly 1."""
    engine = open_engine(loss={"use": "ppo"})
    for temperature in (1.0, 0.5):
        plan = engine.plan(columns, mini_batch_size=6)
        scored = engine.score(plan, temperature=temperature).result()
        assert scored.fields.keys() == {"logprobs"}
        plan = plan.with_columns({"old_logprobs": scored.on_actions("logprobs")})
        for mini_batch in range(len(plan)):
            trained = engine.forward_backward(plan, mini_batch, temperature=temperature).result().output
            chosen = [scored.sample_ids.tolist().index(sample) for sample in trained.sample_ids]
            whole = scored.on_actions("logprobs").take(chosen)
            for row in range(len(trained.sample_ids)):
                here = trained.scored[row]
                np.testing.assert_array_equal(trained.fields["logprobs"][row], whole[row][here])
            engine.discard()
    at_one, at_half = (engine.score(plan, temperature=degree).result().fields["logprobs"].values for degree in (1.0, 0.5))
    assert np.abs(at_one - at_half).max() > 0.1


def test_a_score_pass_needs_no_loss_column_and_scores_what_it_is_asked(open_engine: Any, columns: SampleColumns) -> None:
    engine = open_engine(loss={"use": "ppo"})
    bare = SampleColumns.create(
        input_ids=columns.input_ids,
        token_offsets=columns.token_offsets,
        action_offsets=columns.action_offsets,
        loss_weight=columns.loss_weight,
    )
    plan = engine.plan(bare)
    everything = engine.score(plan, scores=("logprobs", "entropy")).result()
    assert everything.fields.keys() == {"logprobs", "entropy"}
    carrying = engine.score(plan, tokens="loss").result()
    assert len(carrying.fields["logprobs"].values) == np.count_nonzero(bare.loss_weight) < len(everything.fields["logprobs"].values)


def test_gradients_of_two_mini_batches_are_not_mixed(open_engine: Any, columns: SampleColumns) -> None:
    engine = open_engine()
    plan = engine.plan(columns, mini_batch_size=6)
    engine.forward_backward(plan, 0)
    with pytest.raises(UnsupportedError, match="weighs tokens within their mini-batch") as caught:
        engine.forward_backward(plan, 1)
    assert "Call optim_step between mini-batches, or use the reducer sum" in caught.value.remedy
    other = engine.plan(columns, mini_batch_size=6)
    with pytest.raises(UnsupportedError, match="weighs tokens within their mini-batch"):
        engine.forward_backward(other, 0)
    engine.optim_step().result()
    engine.forward_backward(plan, 1).result()


def test_gradients_add_up_under_a_reducer_that_knows_no_batch(open_engine: Any, columns: SampleColumns) -> None:
    one, two = open_engine(reducer={"use": "sum"}), open_engine(reducer={"use": "sum"})
    plan = one.plan(columns, mini_batch_size=6)
    for mini_batch in range(len(plan)):
        one.forward_backward(plan, mini_batch)
    two.forward_backward(two.plan(columns))
    apart, whole = one.gradients(), two.gradients()
    for name in whole:
        np.testing.assert_allclose(apart[name], whole[name], rtol=1e-4, atol=1e-5 * float(np.abs(whole[name]).max()))


def test_a_step_on_nothing_or_on_a_part_is_refused(open_engine: Any, columns: SampleColumns) -> None:
    engine = open_engine()
    before = engine.weights()
    with pytest.raises(UnsupportedError, match="no gradient was accumulated since the last step"):
        engine.optim_step()
    plan = engine.plan(columns)
    count = plan.micro_batches(0)
    assert count > 2
    engine.forward_backward(plan, micro_batches=(0, 1))
    with pytest.raises(UnsupportedError, match=r"micro-batches \[1, .* of mini-batch 0 were not run"):
        engine.optim_step()
    for repeated in ((0, 1), (0, 2), (count, count + 1), (1, 1)):
        with pytest.raises(UnsupportedError, match="are not all left to be run"):
            engine.forward_backward(plan, micro_batches=repeated)
    with pytest.raises(UnsupportedError, match="weighs tokens within their mini-batch"):
        engine.forward_backward(
            plan.with_columns({"advantages": np.zeros_like(columns.columns["advantages"])}), micro_batches=(1, 2)
        )
    engine.forward_backward(plan)
    with pytest.raises(UnsupportedError, match="mini-batch 0 was run already"):
        engine.forward_backward(plan)
    with pytest.raises(UnsupportedError, match="the plan has 1 mini-batches, and number 1 was asked for"):
        engine.forward_backward(plan, 1)
    engine.discard()
    assert is_same(engine.weights(), before)
    assert engine.step == 0


def test_the_numbers_of_a_step_are_those_of_the_call(open_engine: Any, columns: SampleColumns) -> None:
    engine = open_engine(optimizer={"learning_rate": 1e-2, "warmup_steps": 2, "max_grad_norm": 1e-3})
    plan = engine.plan(columns)
    before = engine.weights()
    engine.forward_backward(plan)
    assert engine.optim_step(learning_rate=0.0).result().learning_rate == 0.0
    assert is_same(engine.weights(), before), "a rate of 0 moves nothing"
    engine.forward_backward(plan)
    assert engine.optim_step().result().learning_rate == 1e-2, "the second of two steps of warm-up"
    endless, no_number = float("inf"), float("nan")
    for refused in (
        {"learning_rate": -1.0},
        {"learning_rate": endless},
        {"learning_rate": no_number},
        {"max_grad_norm": 0.0},
        {"epsilon": 0.0},
        {"betas": (0.9, 1.0)},
        {"weight_decay": no_number},
    ):
        engine.forward_backward(plan)
        with pytest.raises(ConfigError, match=f"optim_step: '{next(iter(refused))}' must be"):
            engine.optim_step(**refused)
        engine.discard()
    decayed, plain = open_engine(), open_engine()
    for other, decay in ((decayed, 0.5), (plain, 0.0)):
        other.forward_backward(plan)
        other.optim_step(learning_rate=1e-2, weight_decay=decay, betas=(0.0, 0.0), max_grad_norm=None).result()
    name = "model.layers.0.mlp.up_proj.weight"
    difference = plain.weights()[name] - decayed.weights()[name]
    np.testing.assert_allclose(difference, 1e-2 * 0.5 * before[name], atol=1e-6)


def test_a_step_of_sgd_is_rate_times_gradient(open_engine: Any, columns: SampleColumns) -> None:
    """Decay counts for matrices alone; numbers of AdamW are refused by name, and change nothing."""
    engine = open_engine(optimizer={"use": "sgd", "learning_rate": 0.5, "weight_decay": 0.1, "max_grad_norm": None})
    before = engine.weights()
    plan = engine.plan(columns)
    engine.forward_backward(plan)
    gradients = engine.gradients()
    for name, number in (("betas", (0.9, 0.99)), ("epsilon", 1e-6)):
        with pytest.raises(UnsupportedError, match=f"optim_step is given {name}, which the optimizer sgd does not have"):
            engine.optim_step(**{name: number})
    assert is_same(engine.weights(), before)
    for rate, decay, numbers in ((0.5, 0.1, {}), (0.25, 0.2, {"learning_rate": 0.25, "weight_decay": 0.2})):
        assert engine.optim_step(**numbers).result().learning_rate == rate
        after = engine.weights()
        for name, weight in after.items():
            due = before[name] - rate * (gradients[name] + (decay * before[name] if before[name].ndim > 1 else 0.0))
            np.testing.assert_allclose(weight, due, rtol=1e-5, atol=1e-7, err_msg=name)
        before = after
        engine.forward_backward(plan)
        gradients = engine.gradients()


@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
def test_an_optimizer_that_the_backend_does_not_have_is_refused_before_a_rank_starts(open_engine: Any, backend: str) -> None:
    with pytest.raises(UnsupportedError, match=f'optimizer.use is "sgd", and backend {backend} does not declare') as caught:
        open_engine(backend={"use": backend}, optimizer={"use": "sgd"})
    assert 'Set optimizer.use = "adamw", or choose another backend, such as fsdp' in str(caught.value)


def test_groups_of_parameters_that_the_backend_does_not_have_are_refused(open_engine: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"optimizer\.groups is set, and backend deepspeed does not declare"):
        open_engine(backend={"use": "deepspeed"}, optimizer={"groups": [{"match": "*", "learning_rate": 1.0}]})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"backend": {"use": "deepspeed"}}, "backend deepspeed does not declare that it steps without float32 master weights"),
        ({"backend": {"use": "megatron"}}, "backend megatron does not declare"),
        ({"backend": {"use": "fsdp", "cpu_offload": True}}, "backend fsdp does not declare"),
        ({"model": {"dtype": "float32"}}, 'model.dtype is "float32"'),
        ({"model": {"lora": {"rank": 2}}}, "model.lora trains adapters"),
        ({"optimizer": {"ema_decay": 0.9}}, "ema_decay averages weights in float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stochastic_rounding_is_refused_where_it_has_no_place(open_engine: Any, model: Path, tables: Any, words: str) -> None:
    whole = {"model": {"path": str(model), "dtype": "bfloat16"}, "optimizer": {"stochastic_rounding": True}}
    with pytest.raises(UnsupportedError, match=r"optimizer\.stochastic_rounding") as refused:
        open_engine(**{name: {**whole.get(name, {}), **tables.get(name, {})} for name in {*whole, *tables}})
    assert words in str(refused.value)


def test_an_optimizer_that_cannot_step_here_is_refused_before_a_rank_starts(
    open_engine: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match=r'"adamw_8bit" steps in float32, and model\.dtype is "float64"'):
        open_engine(model={"path": str(model), "dtype": "float64"}, optimizer={"use": "adamw_8bit"})
    monkeypatch.setattr("skyrl_engine.engine.device_check.find_spec", lambda _: None)
    for use, package, extra in (("adamw_8bit", "bitsandbytes", "bitsandbytes"), ("lion", "lion-pytorch", "lion")):
        with pytest.raises(UnsupportedError, match=f'optimizer.use = "{use}" needs the package {package}, which is not') as caught:
            open_engine(optimizer={"use": use})
        assert f'Run pip install "skyrl-engine[{extra}]"' in str(caught.value)


def test_a_failure_that_nobody_waited_for_is_raised_by_the_step(open_engine: Any, columns: SampleColumns) -> None:
    engine = open_engine(loss={"use": "ppo"})
    before = engine.weights()
    endless = np.full(len(columns.loss_weight), np.inf, dtype=np.float32)
    plan = engine.plan(columns.with_columns({"advantages": endless}))
    engine.forward_backward(plan)
    with pytest.raises(ModelError, match="the loss of optimizer step 1 is not finite"):
        engine.optim_step()
    assert engine.step == 0
    assert is_same(engine.weights(), before)


def test_a_step_that_the_ranks_refuse_does_not_count(open_engine: Any, columns: SampleColumns, tmp_path: Path) -> None:
    """The loss is 0 and finite, its gradient is that of a root at 0."""
    (tmp_path / "mine.py").write_text(
        "from skyrl_engine import loss\n@loss(needs=('logprobs',))\ndef steep(tokens, config):\n    return (tokens.logprobs * 0).abs().sqrt()\n"
    )
    engine = open_engine(loss={"use": f"{tmp_path / 'mine.py'}:steep"})
    before = engine.weights()
    plan = engine.plan(columns)
    engine.forward_backward(plan).result()
    with pytest.raises(ModelError, match="gradient"):
        engine.optim_step().result()
    assert engine.step == 0
    assert is_same(engine.weights(), before)
    engine.forward_backward(plan)
    engine.optim_step()
    with pytest.raises(ModelError, match="gradient"):
        engine.score(plan).result()
    assert engine.step == 0


def test_a_failure_of_an_earlier_call_is_raised_by_a_later_answer(open_engine: Any, columns: SampleColumns) -> None:
    engine = open_engine(loss={"use": "ppo"})
    bare, whole = (engine.plan(batch) for batch in (evolve(columns, columns={}), columns))
    engine.evaluate(bare)
    later = engine.score(whole)
    with pytest.raises(DataError, match="needs the column"):
        later.result()
    assert len(engine.score(whole).result()) == len(columns)


def test_saved_and_loaded_it_goes_on_to_the_same_bits(open_engine: Any, columns: SampleColumns, tmp_path: Path) -> None:
    engine, resumed = open_engine(), open_engine()
    plan = engine.plan(columns)
    engine.train(plan)
    engine.save(tmp_path)
    engine.train(plan)
    resumed.load(tmp_path)
    assert resumed.step == 1
    resumed.train(plan)
    assert is_same(engine.weights(), resumed.weights())
    (tmp_path / "engine.json").unlink()
    with pytest.raises(CheckpointError, match=r"engine\.json cannot be read"):
        resumed.load(tmp_path)


def test_scores_and_temperatures_that_cannot_be_are_refused_at_once(open_engine: Any, columns: SampleColumns) -> None:
    engine = open_engine()
    plan = engine.plan(columns)
    for scores in (("values",), ("reward", "logprobs"), ()):
        with pytest.raises(UnsupportedError, match="the model does not give the scores"):
            engine.score(plan, scores=scores)
    for call in (engine.score, engine.evaluate, engine.forward_backward, engine.train):
        for temperature in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match=f"{call.__name__}: 'temperature' must be"):
                call(plan, temperature=temperature)
    engine.forward_backward(plan)
    with pytest.raises(UnsupportedError, match="a gradient is accumulated already"):
        engine.train(plan)


def test_an_export_is_whole(open_engine: Any, tmp_path: Path) -> None:
    engine = open_engine()
    engine.export(tmp_path / "out")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in (tmp_path / "out").iterdir()}
    with pytest.raises(ModelError, match="is not an empty directory"):
        engine.export(tmp_path / "out")


def test_columns_that_do_not_fit_the_plan_are_refused(open_engine: Any, columns: SampleColumns) -> None:
    plan = open_engine().plan(columns)
    with pytest.raises(DataError, match="'old_logprobs' has shape"):
        plan.with_columns({"old_logprobs": np.zeros(3, dtype=np.float32)})
    with pytest.raises(DataError, match="other numbers of response tokens than the samples"):
        plan.with_columns({"old_logprobs": Ragged.from_list([[0.5]] * len(columns), np.float32)})
    with pytest.raises(DataError, match="must be float32"):
        plan.with_columns({"old_logprobs": np.zeros(len(columns.loss_weight))})


def test_a_reducer_that_makes_no_weights_is_named(open_engine: Any, columns: SampleColumns, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from skyrl_engine import reducer\n@reducer()\ndef broken(structure, config):\n    return structure.loss_weight * float('nan')\n"
    )
    engine = open_engine(reducer={"use": f"{tmp_path / 'mine.py'}:broken"})
    with pytest.raises(ContractError, match="reducer 'broken'"):
        engine.forward_backward(engine.plan(columns))
