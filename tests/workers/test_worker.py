"""A rank that cannot start leaves nothing behind, and is placed where its backend said it would be."""

import pytest
import torch.distributed as dist

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.errors import ContractError, ModelError
from skyrl_engine.workers.spec import WorkerSpec
from skyrl_engine.workers.worker import Worker

BACKEND = """
from skyrl_engine import hookimpl
from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.contracts.values.topology import RankCoords, Topology


class Elsewhere:
    coords = RankCoords(dp=1)

    def setup(self, model, optimizer, environment): ...
    def forward(self, batch, objective): ...
    def forward_backward(self, batch, objective): ...
    def optim_step(self, settings=None): ...
    def zero_grad(self): ...
    def save(self, directory): ...
    def load(self, directory): ...
    def export(self, directory): ...
    def weights(self): ...
    def gradients(self): ...
    def close(self): ...


class Plugin:
    @hookimpl
    def skyrl_engine_describe_backend(self, world_size):
        return BackendDescription(Topology(dp=world_size), frozenset({"padded"}))

    @hookimpl
    def skyrl_engine_make_backend(self):
        return Elsewhere()


elsewhere = Plugin()
"""


def spec_with(backend: str) -> WorkerSpec:
    table = {
        "model": {"path": "./missing"},
        "data": {"train": "unused.jsonl"},
        "backend": {"use": backend},
        "collator": {"use": "padded"},
    }
    resolved = resolve(from_dict(table, "test"))
    locks = {kind: resolved.plugins[kind].to_lock_entry() for kind in ("collator", "loss", "backend")}
    return WorkerSpec(locks, FactoryContext(), ModelConfig("./missing"), None, Topology(), "cpu")


def test_a_failed_start_leaves_the_process_group():
    with pytest.raises(ModelError):
        Worker(spec_with("fsdp"), 0)
    assert not dist.is_initialized()


def test_a_backend_that_stands_elsewhere_than_it_described_is_refused(tmp_path):
    """Otherwise the merger would take its outputs for another rank's."""
    (tmp_path / "backend.py").write_text(BACKEND)
    spec = spec_with(f"{tmp_path}/backend.py:elsewhere")
    with pytest.raises(ContractError, match=r"backend 'elsewhere' of .* stands at .*dp=1.* and described .*dp=0"):
        Worker(spec, 0)
