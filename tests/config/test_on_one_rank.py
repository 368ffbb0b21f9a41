"""A backend's options for one rank: parallel sizes go, everything else stays."""

from skyrl_engine.config import from_dict, resolve


def test_parallel_sizes_go_and_other_options_stay() -> None:
    table = {"use": "megatron", "tensor_parallel": 2, "pipeline_parallel": 4, "virtual_pipeline": 2, "distributed_optimizer": False}
    backend = resolve(from_dict({"backend": table}, "test"), need=()).plugins["backend"]
    alone = backend.on_one_rank()
    assert backend.loaded.describe_backend(backend.options, 8).topology.world_size == 8
    assert alone.loaded.describe_backend(alone.options, 1).topology.world_size == 1
    assert alone.table == {**backend.table, "tensor_parallel": 1, "pipeline_parallel": 1, "virtual_pipeline": 1}
