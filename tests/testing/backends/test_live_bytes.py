"""The bytes of tensors that a process holds are counted once each, whatever wraps them."""

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from skyrl_engine.testing.backends.live_bytes import count_bytes, count_live_bytes

BYTES = 4 * 1000


class Silent(torch.Tensor):
    """A wrapper that does not say what it wraps."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise NotImplementedError(function)


def ones():
    return torch.ones(1000)


def test_all_tensors_of_a_process_are_counted_a_gradient_beside_its_parameter():
    before = count_live_bytes()
    parameter = torch.nn.Parameter(ones())
    parameter.sum().backward()
    silent = Silent(ones())
    assert count_live_bytes() - before == 3 * BYTES, silent.held


def test_a_view_is_counted_with_its_whole_memory_and_once():
    whole = ones()
    assert count_bytes([whole, whole[:10], whole[20:]]) == count_bytes([whole[:10]]) == BYTES


def test_what_a_wrapper_holds_is_counted_where_it_says_what_that_is():
    assert count_bytes([AsyncCollectiveTensor(ones())]) == BYTES
    assert count_bytes([Silent(ones())]) == 0


def test_a_sparse_tensor_is_counted_by_its_parts():
    assert count_bytes([ones().to_sparse()]) == BYTES + 8 * 1000


def test_what_torch_traces_with_and_what_has_no_size_yet_hold_nothing():
    with FunctionalTensorMode():
        traced = FunctionalTensor.to_functional(ones())
    with FakeTensorMode():
        fake = ones()
    assert count_bytes([traced, fake, torch.nn.parameter.UninitializedParameter(), torch.ones(1000, device="meta")]) == 0
