"""Sets of adapters share the memory of frozen weights, sharded or whole, and nothing of what learns; what is freed is gone.

That each learns bit for bit what it learns alone is a promise of the kit.
"""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_lora_tasks import OPTIMIZER, adapters, batch, train
from fsdp_tasks import start
from torch.distributed.tensor import DTensor

from skyrl_engine.contracts import LoraConfig
from skyrl_engine.modeling.lora import list_trained_parameters
from skyrl_engine.testing.adapters import write_adapter
from skyrl_engine.testing.backends.batches import WeightedObjective
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.backend import FsdpBackend
from skyrl_engine_fsdp.plugin import FsdpConfig, fsdp
from skyrl_engine_fsdp.sharding import units

WIDE, NARROW = LoraConfig(rank=4), LoraConfig(rank=2, targets=("q_proj", "v_proj"))


def places(backend: FsdpBackend) -> dict[str, int]:
    """Addresses of what FSDP gathers, or of the parameters of a module that is no unit, by their names in the base model; frozen ones alone."""
    gathered = {}
    for name, parameter in backend._model.named_parameters():
        if not parameter.requires_grad:
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            gathered[name.replace(".base_layer.", ".")] = local.untyped_storage().data_ptr()
    return gathered


def list_gathered_memory(backend: FsdpBackend) -> set[int]:
    """Addresses of the memory that FSDP's units gather frozen weights from."""
    groups = (unit._get_fsdp_state()._fsdp_param_group for unit in units(backend._scorer))
    return {
        fsdp_param._sharded_param_data.untyped_storage().data_ptr()
        for group in groups
        if group is not None
        for fsdp_param in group.fsdp_params
        if not fsdp_param.sharded_param.requires_grad and fsdp_param._sharded_param_data.numel()
    }


def train_sharing(directory: str, **model: Any) -> tuple[bool, bool, int, float]:
    """Compare the memory of frozen weights, by names and by what units gather; also their number, and the least gradient norm of three sets."""
    base = start(directory, OPTIMIZER, lora=LoraConfig(rank=1), **model)
    sets = [base.adapter_set(lora, OPTIMIZER, seed) for seed, lora in enumerate((WIDE, NARROW))]
    norms = [norm for weight_set in (*sets, base) for _, norm in train(weight_set, 2)]
    names, memory = places(base), list_gathered_memory(base)
    same = (
        all(places(weight_set) == names for weight_set in sets),
        all(list_gathered_memory(weight_set) == memory for weight_set in sets),
    )
    for weight_set in (*sets, base):
        weight_set.close()
    return *same, len(memory), min(norms)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_gather_one_memory(pair: World, models: dict[str, str], dtype: str) -> None:
    for by_name, by_unit, count, norm in pair.run(train_sharing, models["llama-untied"], dtype=dtype):
        assert by_name
        assert by_unit
        assert count > 15
        assert norm > 0


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_has_one_memory_tied_and_cast_weights_too(models: dict[str, str], dtype: str) -> None:
    by_name, by_unit, count, norm = train_sharing(models["qwen3-tied"], dtype=dtype)
    assert by_name
    assert by_unit
    assert (count > 0) is (dtype == "bfloat16"), "in float32 one rank has no units"
    assert norm > 0


@pytest.mark.usefixtures("alone")
def test_a_further_set_takes_the_memory_of_what_it_trains(models: dict[str, str]) -> None:
    """Bytes of storages that the base has not: adapters and, after a step, two moments and a count each; and copies of small buffers."""
    base = start(models["qwen3-tied"], OPTIMIZER, lora=LoraConfig(rank=1))
    adapter_set = base.adapter_set(WIDE, OPTIMIZER, 1)
    train(adapter_set, 1)
    assert adapter_set._optimizer is not None
    moments = [tensor for state in adapter_set._optimizer.state.values() for tensor in state.values()]
    theirs = {tensor.untyped_storage().data_ptr() for tensor in [*base._model.parameters(), *base._model.buffers()]}
    storages = [tensor.untyped_storage() for tensor in [*adapter_set._model.parameters(), *adapter_set._model.buffers(), *moments]]
    own = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in theirs}
    learns = list(list_trained_parameters(adapter_set._model).values())
    buffers = sum(buffer.untyped_storage().nbytes() for buffer in adapter_set._model.buffers())
    assert sum(own.values()) == 3 * sum(4 * parameter.numel() for parameter in learns) + 4 * len(learns) + buffers
    assert buffers < 200
    assert all(parameter.grad is None for parameter in learns)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_set_that_is_closed_is_freed_and_the_others_go_on(models: dict[str, str], dtype: str) -> None:
    """Its adapters and moments are gone with it; the base's frozen weights are not."""
    base = start(models["llama-untied"], OPTIMIZER, lora=LoraConfig(rank=1), dtype=dtype)
    adapter_set = base.adapter_set(WIDE, OPTIMIZER, 1)
    train(adapter_set, 1)
    assert adapter_set._optimizer is not None
    held = [weakref.ref(parameter) for parameter in list_trained_parameters(adapter_set._model).values()]
    held += [weakref.ref(tensor) for state in adapter_set._optimizer.state.values() for tensor in state.values()]
    before = {name: value.clone() for name, value in base.weights()}
    adapter_set.close()
    del adapter_set
    gc.collect()
    assert not [reference for reference in held if reference() is not None]
    assert all(torch.equal(value, before[name]) for name, value in base.weights())
    assert train(base, 1)[0][1] > 0


@pytest.mark.usefixtures("alone")
def test_a_set_draws_reads_and_keeps_random_states_as_a_product_of_its_own(models: dict[str, str], tmp_path: Any) -> None:
    """New adapters are those of its seed, existing ones those of their files; whoever else draws in the process notices nothing."""
    base = start(models["llama-untied"], OPTIMIZER, lora=LoraConfig(rank=1))
    torch.manual_seed(7)
    due = torch.randint(0, 2**31, (4,)).tolist()
    torch.manual_seed(7)
    adapter_set = base.adapter_set(LoraConfig(rank=4, dropout=0.5), OPTIMIZER, 11)
    train(adapter_set, 1)
    adapter_set.save(tmp_path)
    adapter_set.load(tmp_path)
    assert torch.randint(0, 2**31, (4,)).tolist() == due
    for lora in (WIDE, LoraConfig(path=write_adapter(models["llama-untied"], tmp_path / "adapters"))):
        own = start(models["llama-untied"], OPTIMIZER, lora=lora, seed=11)
        expected, weights = adapters(own), adapters(base.adapter_set(lora, OPTIMIZER, 11))
        assert expected.keys() == weights.keys()
        assert all(np.array_equal(expected[name], weights[name]) for name in expected)


@pytest.mark.usefixtures("alone")
def test_a_set_has_a_value_head_of_its_own(models: dict[str, str]) -> None:
    """It begins as the model's own does, and learns alone."""
    base = start(models["critic"], OPTIMIZER, lora=LoraConfig(rank=1), value_head=True)
    adapter_set, head = base.adapter_set(NARROW, OPTIMIZER, 1), adapters(base)["score.weight"]
    assert head.any()
    assert np.array_equal(adapters(adapter_set)["score.weight"], head)
    adapter_set.forward_backward(batch(adapter_set, "padded", 2), WeightedObjective(needs=("logprobs", "values")))
    adapter_set.optim_step()
    assert not np.array_equal(adapters(adapter_set)["score.weight"], head)
    assert np.array_equal(adapters(base)["score.weight"], head)


def test_sets_are_declared_where_weights_can_be_shared() -> None:
    def declares(world_size: int, **options: Any) -> bool:
        described = fsdp.skyrl_engine_describe_backend(config=FsdpConfig(**options), world_size=world_size)
        return "adapter_sets" in described.capabilities

    assert declares(1)
    assert declares(4, replicate=2)
    assert declares(2, tensor_parallel=2)
    assert not declares(1, cpu_offload=True)
