"""Compiled layers: one program for all lengths and for both kinds of passes, under the model's own names, or an error that says what to do."""

import copy
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.errors import EngineError, ModelError, UnsupportedError
from skyrl_engine.modeling import compiling
from skyrl_engine.modeling.compiling import CLOCK, CompiledForward, compile_forwards, outside, refuse_without_compiler
from skyrl_engine.modeling.load_check import check_loading
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.modeling.lora import adapters_off
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.segments import Segments
from skyrl_engine.modeling.tiny import make_parts_differ, write_model

TOLERANCE = 1e-5
"""Largest difference relative to the largest entry, in float32: sums are taken in another order."""


def _find_no_compiler() -> str | None:
    try:
        refuse_without_compiler("cpu")
    except UnsupportedError as error:
        return f"NOT PROVED HERE: {error.cause}"
    return None


WHY_NOT = _find_no_compiler()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_model(tmp_path)
    make_parts_differ(tmp_path)
    return tmp_path


@pytest.fixture
def eager_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let programs be torch's own operations, which takes no compiler; limits of the process are restored."""
    monkeypatch.setattr(compiling, "_program", lambda forward: torch.compile(forward, backend="eager", dynamic=True))
    # deepspeed leaves its own one to the process
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield
    torch._dynamo.reset()


def score(
    loaded: tuple[Any, Scorer], lengths: tuple[int, ...], parents: tuple[int, ...] | None = None, *, learn: bool = True
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probabilities over a row of segments, and with `learn` gradients by name."""
    model, scorer = loaded
    tokens = sum(lengths)
    ids = torch.randint(1, 128, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    segments = Segments(lengths, parents)
    positions = torch.cat([torch.arange(start, start + length) for start, length in zip(segments.starts, lengths, strict=True)])
    model.zero_grad()
    scorer.train(learn)
    with torch.set_grad_enabled(learn):
        inputs = {"input_ids": ids, "position_ids": positions[None]}
        logprobs = scorer(inputs, torch.arange(tokens - 1), ids[0, 1:], segments=segments)["logprobs"]
    if learn:
        logprobs.sum().backward()
    return logprobs.detach(), {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def require_equal(got: dict[str, torch.Tensor], due: dict[str, torch.Tensor]) -> None:
    assert got.keys() == due.keys()
    largest = max(float(gradient.abs().max()) for gradient in due.values())
    for name, gradient in due.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=TOLERANCE * largest)


@pytest.mark.parametrize(
    "compiler",
    # how many programs are made, and of what, does not depend on who translates them: by day without C++
    ["aot_eager", pytest.param("inductor", marks=(needs_compiler, pytest.mark.nightly))],
)
def test_one_program_serves_all_lengths_trees_and_both_kinds_of_passes(
    directory: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_program", cache(partial(torch.compile, backend=compiler, dynamic=True)))
    plain, compiled = load_scorer(ModelConfig(str(directory))), load_scorer(ModelConfig(str(directory), compile=True))
    assert plain[0].state_dict().keys() == compiled[0].state_dict().keys()
    score(compiled, (5, 9, 3))
    CLOCK.drain()
    for lengths, parents in (((7, 8), None), ((20, 1, 2, 4), None), ((8, 4, 5), (-1, 0, 0))):
        due, due_gradients = score(plain, lengths, parents)
        got, gradients = score(compiled, lengths, parents)
        torch.testing.assert_close(got, due, rtol=0, atol=TOLERANCE * float(due.abs().max()))
        require_equal(gradients, due_gradients)
        scored, _ = score(compiled, lengths, parents, learn=False)
        assert torch.equal(scored, got)
        assert not scored.requires_grad
    assert CLOCK.drain() == 0, "another length made another program"


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3_text"])
@pytest.mark.parametrize("options", [{"activation_checkpointing": True}, {"lora": LoraConfig(rank=4)}, {"value_head": True}])
def test_options_of_training_go_with_programs(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    settings = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3_text" else {}
    write_model(tmp_path, family, **settings)
    make_parts_differ(tmp_path)
    plain, compiled = (load_scorer(ModelConfig(str(tmp_path), compile=on, **options)) for on in (False, True))
    for lengths in ((5, 9, 3), (30,)):
        due, due_gradients = score(plain, lengths)
        got, gradients = score(compiled, lengths)
        torch.testing.assert_close(got, due, rtol=0, atol=TOLERANCE * float(due.abs().max()))
        require_equal(gradients, due_gradients)
        assert torch.equal(score(compiled, lengths, learn=False)[0], got)
    if "lora" in options:
        with adapters_off(compiled[0]), adapters_off(plain[0]):
            due, got = (score(loaded, (5, 9, 3), learn=False)[0] for loaded in (plain, compiled))
        torch.testing.assert_close(got, due, rtol=0, atol=TOLERANCE * float(due.abs().max()))


@pytest.mark.usefixtures("eager_programs")
def test_a_copy_runs_its_own_layers(directory: Path) -> None:
    model, scorer = load_scorer(ModelConfig(str(directory), compile=True))
    other = copy.deepcopy(scorer)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    due, _ = score((model, scorer), (5, 3), learn=False)
    assert not torch.equal(score((other, other), (5, 3), learn=False)[0], due)
    assert torch.equal(score((model, scorer), (5, 3), learn=False)[0], due)


class Deciding(nn.Module):
    """A layer that asks for a program of its own for every width."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if hidden.shape[-1] == self.width else hidden  # type: ignore[return-value]

    width = 0


class Reading(nn.Module):
    """A part of a layer that reads a number of the batch."""

    @outside
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * int(hidden.detach().sum().item())


@pytest.mark.usefixtures("eager_programs")
def test_layers_share_their_programs_around_a_part_that_stays_outside() -> None:
    layers = [nn.Sequential(nn.Linear(3, 3), Reading(), nn.ReLU()) for _ in range(4)]
    hidden = torch.full((2, 3), 2.0)
    due = [layer(hidden) for layer in layers]
    compile_forwards(layers, "tiny", drops=False)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for layer, expected in zip(layers, due, strict=True):
            torch.testing.assert_close(layer(hidden), expected)


@pytest.mark.usefixtures("eager_programs")
def test_too_many_programs_are_an_error_and_no_slow_run() -> None:
    layer = Deciding()
    forward = CompiledForward(layer, compiling._program(Deciding.forward), "tiny", drops=False)

    def run_with_ever_new_widths() -> None:
        for width in range(4):
            layer.width = width
            forward(torch.zeros(2, width + 2))

    limits = torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
    with limits, pytest.raises(ModelError, match="the layers of tiny need more than") as met:
        run_with_ever_new_widths()
    assert met.value.remedy == "Set model.compile = false"


@pytest.mark.usefixtures("eager_programs")
def test_what_torch_cannot_compile_is_named() -> None:
    def fail(*_: object) -> None:
        raise torch._dynamo.exc.InternalTorchDynamoError("backend='inductor' raised:\nno such operation\nand a long trace")

    with pytest.raises(ModelError, match=r"the layers of tiny \(Deciding\) cannot be compiled: no such operation"):
        CompiledForward(Deciding(), fail, "tiny", drops=False)(torch.zeros(2, 3))

    def refuse(*_: object) -> None:
        raise UnsupportedError("a layer's own refusal", remedy="Do something else")

    with pytest.raises(UnsupportedError, match="a layer's own refusal"):
        CompiledForward(Deciding(), refuse, "tiny", drops=False)(torch.zeros(2, 3))


def test_a_machine_without_a_compiler_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler-here",)}), pytest.raises(UnsupportedError, match="C\\+\\+ compiler") as met:
        refuse_without_compiler("cpu")
    assert "apt install g++" in str(met.value.remedy)
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    with pytest.raises(UnsupportedError, match="Triton"):
        refuse_without_compiler("cuda:0")


def test_routers_are_refused_while_planning(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    with pytest.raises(EngineError, match="mixture of experts"):
        check_loading(ModelConfig(str(tmp_path), compile=True), "packed")
    check_loading(ModelConfig(str(tmp_path)), "packed")
