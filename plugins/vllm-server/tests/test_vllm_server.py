"""The side of vLLM: checksums and groups need torch alone; the plugin itself needs vLLM, and runs by `nox -s vllm`."""

import ast
import importlib.metadata
import importlib.util
import threading
from pathlib import Path

import pytest
import torch

from skyrl_engine_vllm_server.checksums import LoadedTensors, checksum_of
from skyrl_engine_vllm_server.groups import join_group, receive

SOURCES = Path(__file__).parents[1] / "src"
with_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: nox -s vllm")


def test_a_checksum_tells_values_places_shapes_and_dtypes() -> None:
    draw = torch.Generator().manual_seed(1)
    tensor = torch.randn(64, 33, generator=draw)
    changed = tensor.clone()
    changed[63, 32] = torch.nextafter(changed[63, 32], torch.tensor(9.0))
    others = [changed, tensor.flip(0), tensor.flip(1), tensor.t(), tensor.reshape(33, 64), tensor.double(), tensor.bfloat16()]
    assert len({checksum_of(each) for each in (tensor, *others)}) == 8
    assert checksum_of(tensor) == checksum_of(tensor.t().contiguous().t())
    assert checksum_of(torch.zeros(0)) != checksum_of(torch.zeros(1))


def test_a_checksum_does_not_depend_on_how_many_words_are_summed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl_engine_vllm_server import checksums

    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    whole = checksum_of(tensor)
    monkeypatch.setattr(checksums, "CHUNK", 7)
    assert checksum_of(tensor) == whole


def test_what_loaders_left_out_or_changed_is_not_loaded() -> None:
    loaded = LoadedTensors()
    parts = {name: torch.randn(6, 4) for name in ("whole", "in_parts", "half", "left_out", "spoilt")}
    due = {name: checksum_of(tensor) for name, tensor in parts.items()}
    for name, tensor in parts.items():
        loaded.receive(name, tensor)
    load = loaded.record(lambda parameter, given: parameter.copy_(given))
    load(torch.zeros(6, 4), parts["whole"])
    load(torch.zeros(3, 4), parts["in_parts"][:3])
    load(torch.zeros(3, 4), parts["in_parts"][3:])
    load(torch.zeros(3, 4), parts["half"][:3])
    load(torch.zeros(6, 4), parts["spoilt"].zero_())
    taken = loaded.finish()
    assert loaded.received == due
    assert {name for name, checksum in due.items() if taken.get(name) == checksum} == {"whole", "in_parts"}


def test_tensors_come_as_they_were_sent() -> None:
    """The trainer's side is another process in life, and a thread here."""
    import socket
    from datetime import timedelta
    from typing import Any

    dist: Any = torch.distributed
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    sent = {"a": torch.randn(5, 3), "b": torch.randn(7).bfloat16()}
    came: dict[str, torch.Tensor] = {}

    def serve() -> None:
        group = join_group("127.0.0.1", port, 1, 2, 30.0)
        shapes = [list(tensor.shape) for tensor in sent.values()]
        came.update(
            receive(group, list(sent), ["float32", "bfloat16"], shapes, lambda shape, dtype: torch.empty(*shape, dtype=dtype))
        )

    server = threading.Thread(target=serve)
    server.start()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    settings = dist.ProcessGroupGloo._Options()
    settings._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    settings._timeout = timedelta(seconds=30)
    group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), 0, 2, settings)
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for tensor in sent.values():
        group.broadcast([tensor], options).wait()
    server.join(30)
    assert {name: checksum_of(tensor) for name, tensor in came.items()} == {
        name: checksum_of(tensor) for name, tensor in sent.items()
    }


def test_nothing_here_needs_the_engine() -> None:
    names = set()
    for source in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module).partition(".")[0])
    assert not names & {"skyrl_engine", "attrs", "transformers"}
    assert not importlib.metadata.requires("skyrl-engine-vllm-server")


@with_vllm
def test_vllm_finds_the_plugin_and_registering_twice_is_well() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from skyrl_engine_vllm_server.plugin import register

    (entry,) = [each for each in importlib.metadata.entry_points(group="vllm.general_plugins") if each.name == "skyrl_engine"]
    assert entry.load() is register
    register()
    register()
    assert {"gloo", "torch_nccl", "nccl"} <= set(WeightTransferEngineFactory._registry)


@with_vllm
def test_what_is_mended_in_vllm_is_still_there() -> None:
    """A version in which one of these is gone needs another look."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    assert callable(dispatch_cpu_unquantized_gemm)
    assert callable(layerwise._get_original_loader)
    assert callable(TopKTopPSampler.forward_cpu)
    assert callable(CPUModelRunner._bookkeeping_sync)
