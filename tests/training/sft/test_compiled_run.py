"""A run with compiled layers: what it says of its first step, and what it learns and leaves."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.compiling import refuse_without_compiler
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.trainer import plan_sft, run_sft

Configure = Callable[..., ResolvedConfig]


@pytest.mark.nightly
def test_the_first_step_says_that_it_compiles_and_how_long_it_took(
    configure: Configure, material: Path, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        refuse_without_compiler("cpu")
    except UnsupportedError as error:
        pytest.skip(f"NOT PROVED HERE: {error.cause}")
    caplog.set_level(logging.INFO)
    training = {"steps": 2}
    short = {"training": training, "evaluation": {"at_end": False}}
    compiled = configure("compiled", model={"path": str(material / "model"), "compile": True}, **short)
    assert "the first step compiles the layers" in plan_sft(compiled).compiles
    run = run_sft(compiled).directory
    first, second = (record["metrics"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step")
    assert first["compile_seconds"] > 0
    assert "compile_seconds" not in second, "rows of other lengths"
    assert "compiled the model's layers in" in caplog.text

    plain = configure("plain", **short)
    assert plan_sft(plain).compiles == ""
    own = run_sft(plain).directory
    names = {
        name: load_file(directory / "model" / "model.safetensors").keys() for name, directory in (("compiled", run), ("plain", own))
    }
    assert names["compiled"] == names["plain"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"model": {"compile": True}, "backend": {"use": "fsdp", "tensor_parallel": 2}, "run": {"ranks": 2, "launch": "ray"}},
            "cannot follow the DTensors of tensor-parallel layers",
        ),
        ({"model": {"attention": "flash"}}, 'model.attention = "flash"'),
        ({"model": {"attention": "flex"}, "collator": {"use": "tree"}}, 'model.attention = "flex"'),
    ],
)
def test_what_cannot_be_done_is_refused_while_planning(
    configure: Configure, material: Path, changes: dict[str, dict[str, object]], why: str
) -> None:
    model = {"path": str(material / "model"), **changes["model"]}
    with pytest.raises(UnsupportedError) as met:
        plan_sft(configure(**{**changes, "model": model}))
    assert why in str(met.value)
    assert met.value.remedy


def test_a_machine_without_a_compiler_is_refused_while_planning(configure: Configure, material: Path) -> None:
    from torch._inductor import config

    model = {"path": str(material / "model"), "compile": True}
    with config.patch({"cpp.cxx": ("no-such-compiler-here",)}), pytest.raises(UnsupportedError) as met:
        plan_sft(configure(model=model))
    assert "apt install g++" in str(met.value)
