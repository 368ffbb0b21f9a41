"""Several sets of adapters on one engine: each learns, samples, is saved and exported as an engine of its own would."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_engine import CheckpointError, ConfigError, Engine, EngineClosedError, ModelError, UnsupportedError
from skyrl_engine.contracts.kinds.generator import GenerationRequest, Sampling
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import LoraConfig
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

COLUMNS = SampleColumns.from_lists(
    input_ids=[[5, 6, 7, 8], [5, 9, 10], [11, 12, 13, 14, 15]],
    num_actions=[2, 2, 3],
    columns={"advantages": [[1.0, -0.5], [0.5, 0.5], [2.0, 1.0, 0.1]], "old_logprobs": [[-4.0, -4.0], [-3.0, -5.0], [-4.0] * 3]},
)
WIDE, NARROW = LoraConfig(rank=4, dropout=0.3), LoraConfig(rank=2, alpha=5, targets=("q_proj",))


def tables(model: Path, lora: dict[str, Any] | None = None, **run: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), **({} if lora is None else {"lora": lora})},
        "run": run,
        "optimizer": {"learning_rate": 1e-2},
        "reducer": {"use": "sum"},
        "generator": {"use": "hf"},
    }


@pytest.fixture
def base(model: Path) -> Iterator[Engine]:
    with Engine.open(tables(model, {"rank": 1}, seed=3)) as engine:
        yield engine


def step(engine: Engine) -> tuple[float, float]:
    plan = engine.plan(COLUMNS)
    learned = engine.forward_backward(plan).result()
    return learned.metrics["loss"].result, engine.optim_step().result().grad_norm


def sample(engine: Engine) -> list[float]:
    request = GenerationRequest(0, np.array([5, 6], np.int32), Sampling(max_tokens=6, ignore_eos=True), seed=1)
    (completion,) = engine.generate([request]).result()
    return [*completion.token_ids.tolist(), *completion.logprobs.tolist()]


def is_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_two_sets_in_turns_equal_an_engine_of_each(base: Engine, model: Path, tmp_path: Path) -> None:
    """Losses, norms, weights, samples and a continued checkpoint, to the last bit; another loss in force for one is none for the other."""
    wide, narrow = base.add_adapters(WIDE, seed=1), base.add_adapters(NARROW, seed=2)
    wide.use_loss({"use": "ppo"})
    together = {"wide": [step(wide)], "narrow": [step(narrow)]}
    together["wide"].append(step(wide))
    wide.save(tmp_path / "wide")
    together["narrow"].append(step(narrow))
    found = {"wide": (wide.weights(), sample(wide)), "narrow": (narrow.weights(), sample(narrow))}
    assert (wide.step, narrow.step, base.step) == (2, 2, 0)
    kinds = {"wide": ({"rank": 4, "dropout": 0.3}, 1), "narrow": ({"rank": 2, "alpha": 5, "targets": ["q_proj"]}, 2)}
    for name, (lora, seed) in kinds.items():
        with Engine.open(tables(model, lora, seed=seed)) as alone:
            if name == "wide":
                alone.use_loss({"use": "ppo"})
            assert [step(alone), step(alone)] == together[name]
            assert is_same(alone.weights(), found[name][0])
            assert sample(alone) == found[name][1]
            if name == "wide":
                # a checkpoint of a set is one of an engine, moments and random states included
                step(alone)
                alone.load(tmp_path / "wide")
                assert alone.step == 2
                assert step(alone) == step(wide)
    narrow.close()
    step(base)
    assert step(wide)[1] > 0


def test_a_gradient_stays_where_it_was_accumulated(base: Engine) -> None:
    one, other = base.add_adapters(WIDE), base.add_adapters(NARROW)
    one.forward_backward(one.plan(COLUMNS)).result()
    before = one.gradients()
    with pytest.raises(UnsupportedError, match="no gradient was accumulated"):
        other.optim_step()
    step(other)
    step(base)
    other.discard()
    other.close()
    assert is_same(one.gradients(), before)
    assert one.optim_step().result().grad_norm > 0


def test_a_set_is_exported_as_adapters_and_goes_on_from_them(base: Engine, tmp_path: Path) -> None:
    narrow = base.add_adapters(NARROW, seed=2)
    step(narrow)
    narrow.export(tmp_path / "narrow")
    again = base.add_adapters(LoraConfig(path=str(tmp_path / "narrow")))
    one, other = (
        adapter_set.score(adapter_set.plan(COLUMNS)).result().on_actions("logprobs").values for adapter_set in (again, narrow)
    )
    assert np.array_equal(one, other)
    with pytest.raises(ModelError, match="which no linear layer"):
        base.add_adapters(LoraConfig(targets=("no_proj",)))
    (tmp_path / "narrow" / "adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelError, match=r"the adapter .*narrow cannot be read"):
        base.add_adapters(LoraConfig(path=str(tmp_path / "narrow")))
    for seed in (-1, 2**63, 1.5):
        with pytest.raises(ConfigError, match="add_adapters"):
            base.add_adapters(NARROW, seed=seed)
    # one that was refused leaves nothing behind
    assert step(base.add_adapters(NARROW, seed=2))[0] == pytest.approx(step(base.add_adapters(NARROW, seed=2))[0], abs=0)


def test_adapters_of_another_family_are_refused_though_names_and_shapes_are_theirs(base: Engine, tmp_path: Path) -> None:
    """A Llama of the same sizes has the same linear layers as a Qwen3."""
    base.save(tmp_path / "saved")
    (tmp_path / "llama").mkdir()
    write_model(tmp_path / "llama", "llama")
    write_tokenizer(tmp_path / "llama", ["some words to learn from"])
    with Engine.open(tables(tmp_path / "llama", {"rank": 1}, seed=3)) as other:
        with pytest.raises(CheckpointError, match="is of a model of the family qwen3, and this one is of llama"):
            other.load(tmp_path / "saved")
        with other.add_adapters(LoraConfig(rank=1)) as further, pytest.raises(CheckpointError, match="of the family qwen3"):
            further.load(tmp_path / "saved")


def test_a_set_ends_with_its_engine_or_before_it(model: Path) -> None:
    with Engine.open(tables(model, {"rank": 1})) as engine:
        first, second = engine.add_adapters(NARROW), engine.add_adapters(NARROW)
        first.close()
        first.close()
        with pytest.raises(EngineClosedError, match="takes no calls any more: it was closed"):
            first.weights()
        # a set of a set is one more
        third = second.add_adapters(WIDE)
        assert step(second)[1] > 0
        assert step(third)[1] > 0
    with pytest.raises(EngineClosedError, match="it was closed"):
        third.weights()
    third.close()
    second.close()


def test_a_description_says_it_before_anything_is_started(model: Path) -> None:
    """No model is loaded: the directory need not be there."""
    elsewhere = tables(model / "elsewhere", {"rank": 1})
    assert "adapter_sets" in Engine.describe(elsewhere).capabilities
    described = Engine.describe(elsewhere, ["backend.tensor_parallel=2", "run.ranks=4", "run.launch=ray"])
    assert "adapter_sets" in described.capabilities
    assert (described.topology.dp, described.topology.tp) == (2, 2)


def test_what_has_no_sets_says_what_it_takes(model: Path) -> None:
    with Engine.open(tables(model)) as engine:
        assert not engine.has_adapter_sets
        with pytest.raises(UnsupportedError, match="need a model with adapters and the capability 'adapter_sets'") as caught:
            engine.add_adapters(NARROW)
    assert "such as fsdp" in caught.value.remedy
