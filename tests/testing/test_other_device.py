"""Code that fails or waits on a device other than the CPU is refused on the CPU already, and code that does not is left alone."""

import numpy as np
import pytest
import torch

from skyrl_engine.testing.other_device import OTHER, OtherDevice, WrongDevice

X = torch.arange(1.0, 5.0)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        context.save_for_backward(values)
        return values * 2

    @staticmethod
    def backward(_context, gradient):
        return gradient * torch.full((len(gradient),), 2.0)  # on the CPU


WRONG = {
    "a factory without a device": lambda: X * torch.arange(4),
    "NumPy": X.numpy,
    "NumPy, asked politely": lambda: np.asarray(X),
    "back from NumPy": lambda: X + torch.from_numpy(np.ones(4, dtype=np.float32)),
    "what came to the CPU": lambda: X.cpu() + X,
    "an index of the other device": lambda: torch.ones(4)[(X > 2)],
    "a list that is joined": lambda: torch.stack([X.sum(), torch.tensor(1.0)]),
    "a buffer of the CPU": lambda: torch.zeros(4).add_(X),
    "a class of the CPU": lambda: torch.FloatTensor([1.0, 2.0, 3.0, 4.0]) * X,
    "a view of a factory": lambda: X + torch.ones(4, 2)[:, 0].clone(),
    "a product of matrices": lambda: X @ torch.ones(4),
    "a device by name": lambda: X + torch.zeros(4, device="cpu"),
    "a gradient by hand": lambda: Doubled.apply(torch.ones(4, requires_grad=True)).sum().backward(),
}


@pytest.mark.parametrize("code", WRONG.values(), ids=WRONG)
def test_code_of_the_cpu_is_told_the_line(code):
    code()  # works on the CPU
    with OtherDevice(), pytest.raises(WrongDevice, match=r"at test_other_device\.py:\d+"):
        code()


def _in_block():
    with X.device:
        return X + torch.arange(4)


RIGHT = {
    "a factory with the device of its input": lambda: X * torch.arange(4, device=X.device),
    "a factory of the input": lambda: X + X.new_ones(4) + torch.zeros_like(X) + X.new_tensor([1.0, 2.0, 3.0, 4.0]),
    "a single number": lambda: X * torch.tensor(2.0) + torch.where(X > 1, X, torch.tensor(0.0)),
    "what was moved there": lambda: X + torch.arange(4).to(X.device) + torch.ones(4).to(X) + torch.from_numpy(np.ones(4)).to(OTHER),
    "an index of the CPU": lambda: X[torch.tensor([0, 1])],
    "numbers of the device": lambda: torch.rand(4, generator=torch.Generator(X.device), device=X.device) + X,
    "what is of the CPU throughout": lambda: torch.arange(3) + torch.ones(3).cumsum(0),
    "a copy from the CPU": lambda: torch.empty_like(X).copy_(torch.ones(4)) + X,
    "a device of a torch.device block": _in_block,
    "a distribution": lambda: torch.distributions.Categorical(logits=X, validate_args=False).entropy() + X,
    "a backward pass": lambda: (torch.ones(4, device=X.device, requires_grad=True) * X).sum().backward(),
}


@pytest.mark.parametrize("code", RIGHT.values(), ids=RIGHT)
def test_code_that_works_everywhere_computes_what_it_did(code):
    expected = code()
    with OtherDevice() as device:
        got = code()
    if not isinstance(expected, torch.Tensor) or "Generator" in code.__code__.co_names:
        return
    assert torch.equal(got, expected)
    assert device.reads == []


READS = {
    "nonzero()": X.nonzero,
    "x[mask]": lambda: X[X > 2],
    "bincount()": lambda: X.long().bincount(),
    "masked_select()": lambda: X.masked_select(X > 2),
    "repeat_interleave() without output_size": lambda: X.repeat_interleave(X.long()),
    "a copy sent ahead": lambda: X.to("cpu", non_blocking=True).tolist(),
    ".item()": lambda: X.sum().item(),
    ".cpu()": X.cpu,
    ".to(cpu)": lambda: X.to("cpu"),
    ".tolist()": X.tolist,
    "bool(tensor)": lambda: X.sum() > 1 and 1,
    "float(tensor)": lambda: float(X.sum()),
    "int(tensor)": lambda: int(X.sum()),
    "copy_": lambda: torch.empty(4).copy_(X),
    "torch.equal": lambda: torch.equal(X, X),
    "a tensor of tensors": lambda: torch.tensor([X[0], X[1]]),
    "a tensor in a text": lambda: f"{X.sum():.2f}",
}


@pytest.mark.parametrize(("what", "code"), READS.items(), ids=READS)
def test_each_moment_at_which_the_host_waits_is_counted(what, code):
    with OtherDevice() as device:
        code()
    assert [read.what for read in device.reads] == [what]
    assert device.reads[0].where.startswith("test_other_device.py:")


def test_a_copy_that_is_sent_ahead_is_read_where_it_is_first_used():
    with OtherDevice() as device:
        copy = X.to("cpu", non_blocking=True)
        assert device.reads == []
        device.note_launch()
        assert copy.sum().item() == 10.0
        assert copy.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert [read.what for read in device.reads] == ["a copy sent ahead"]
    assert device.launched == 0


BLOCKING = {
    ".to(device)": lambda: torch.arange(4).to(X.device),
    ".to(tensor)": lambda: torch.ones(4).to(X),
    "copy_": lambda: torch.empty_like(X).copy_(torch.ones(4)),
    "a tensor of numbers": lambda: torch.tensor([1.0], device=X.device),
    "new_tensor()": lambda: X.new_tensor([1.0]),
    "x[mask]": lambda: X[torch.tensor([True, False, True, True])],
}


@pytest.mark.parametrize(("what", "code"), BLOCKING.items(), ids=BLOCKING)
def test_each_copy_for_which_the_host_waits_is_counted(what, code):
    with OtherDevice() as device:
        code()
        torch.arange(4).to(X.device, non_blocking=True)
    assert [copy.what for copy in device.blocking_copies] == [what]
    assert device.reads == []


def test_writing_one_number_by_a_mask_waits_for_nothing():
    with OtherDevice() as device:
        X.clone()[X > 2] = 0.0
    assert device.reads == []


def test_reads_of_the_cpu_wait_for_nothing():
    with OtherDevice() as device:
        torch.ones(3).sum().item()
        torch.arange(3).tolist()
    assert device.reads == []


def test_a_constant_made_before_counts_as_the_cpus_where_it_is_named():
    table = torch.ones(4)
    with OtherDevice() as device:
        device.put_on_host({"table": [table]})
        with pytest.raises(WrongDevice):
            X + table


def test_a_model_and_its_optimizer_take_a_step_there():
    def step():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer

    def move(model, optimizer, device):
        loss = model(torch.ones(2, 3, device=device)).square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    expected, optimizer = step()
    move(expected, optimizer, "cpu")
    got, optimizer = step()
    with OtherDevice() as device:
        move(got, optimizer, next(got.parameters()).device)
    for one, other in zip(expected.parameters(), got.parameters(), strict=True):
        assert torch.equal(one, other)
    assert device.reads == []


def test_everything_is_as_it_was_afterwards():
    makers = (torch.from_numpy, torch.FloatTensor)
    with OtherDevice(), OtherDevice():
        assert X.device == OTHER
    assert (torch.from_numpy, torch.FloatTensor) == makers
    assert X.device == torch.device("cpu")
