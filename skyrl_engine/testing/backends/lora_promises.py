"""Promises of a backend about low-rank adapters: they alone learn, and everybody else sees them merged into the weights."""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_engine.contracts.kinds.backend import Capability
from skyrl_engine.contracts.values.model import LoraConfig
from skyrl_engine.errors import EngineError
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.proof.plain_model import PlainModel
from skyrl_engine.testing.adapters import with_adapter
from skyrl_engine.testing.backends.gradient_comparison import require_same_gradients
from skyrl_engine.testing.backends.held_backend import Arrays
from skyrl_engine.testing.backends.step_promises import SPEC
from skyrl_engine.testing.backends.subject import (
    NUMBERS,
    BackendCase,
    BackendSubject,
    backend_promise,
    exempt_with,
    is_right_loss,
    require_words,
)
from skyrl_engine.testing.promise import Broken, Promise

MERGED = "Yield every weight of the base model once, under its own name, with alpha / rank * B A added to it"


def _has_adapters(subject: BackendSubject, case: BackendCase, *capabilities: Capability) -> bool:
    """Return True where the backend declares adapters on this layout, and these capabilities too."""
    return {"lora", *capabilities} <= subject.describe(case.sizes.options, case.sizes.ranks).capabilities


def _no_lora(subject: BackendSubject) -> str | None:
    if find_spec("peft") is None:
        return "peft is not installed"
    return None if subject.declares("lora") else "the backend does not declare 'lora'"


def _no_switch(subject: BackendSubject) -> str | None:
    if (reason := _no_lora(subject)) is not None:
        return reason
    return None if subject.declares("reference_by_adapters") else "the backend does not declare 'reference_by_adapters'"


@backend_promise(
    "Adapters alone learn, by their gradient in PEFT's own model; weights() gives the base model with them merged, after steps too",
    exempt=_no_lora,
)
def adapters(subject: BackendSubject, case: BackendCase) -> None:
    if not _has_adapters(subject, case):
        return
    bench = subject.bench
    base, adapter = bench.model(case.model), bench.adapter(case.model)
    with tempfile.TemporaryDirectory(prefix="skyrl-engine-adapters-") as name:
        with subject.open_ranks(case, optimizer=SPEC, lora=LoraConfig(path=adapter)) as ranks:
            start = ranks.weights()[0]
            loss = ranks.loss(ranks.forward_backward(case.whole()))
            gradients = ranks.gradients()[0]
            ranks.optim_step()
            after = ranks.weights()[0]
            ranks.export(Path(name))
        trained = _merge(base, name)
    if not is_right_loss(subject, case, loss, adapted=True):
        due = bench.definition(case.model, NUMBERS, adapted=True).loss
        raise Broken(f"the objective with adapters is {loss:.6g}, where PEFT's own model gives {due:.6g}", "Add alpha / rank * B A")
    require_same_gradients(
        gradients,
        bench.definition(case.model, NUMBERS, adapted=True).gradients,
        "of PEFT's own model",
        "Give the gradients of adapters under PEFT's names, and freeze all else",
        facts={"scale of the adapters": 2.0},
    )
    _require_merged(start, _merge(base, adapter), "at the start", MERGED)
    _require_merged(after, trained, "after a step, by what is exported,", "Merge and export the adapters as they are now")
    if all(np.array_equal(start[name], after[name]) for name in start):
        raise Broken("weights() gives the same after a step as before", MERGED)


def _merge(base: str, adapter: str) -> Arrays:
    """Return the weights of a model with the adapters of a directory merged, by the definition of adapters."""
    try:
        with quiet_progress():
            model = PlainModel.load(base, dtype=torch.float32, adapt=lambda plain: with_adapter(plain, adapter))
    except Exception as error:
        raise Broken(
            f"PEFT does not load what was exported: {str(error).splitlines()[0]}", "Write adapters as PEFT does"
        ) from error
    scaling = {name: module.scaling["default"] for name, module in model.model.named_modules() if hasattr(module, "lora_A")}
    whole: dict[str, Any] = {}
    for name, parameter in model.parameters.items():
        if ".lora_" in name:
            continue
        layer = name.partition(".base_layer.")[0]
        weight = parameter.detach()
        if layer != name and name.endswith(".weight"):
            down, up = (model.parameters[f"{layer}.lora_{part}.default.weight"].detach() for part in "AB")
            weight = weight + scaling[layer] * (up @ down)
        whole[name.replace(".base_layer.", ".")] = weight.numpy()
    return whole


def _require_merged(got: Arrays, due: Arrays, when: str, remedy: str) -> None:
    if got.keys() != due.keys():
        raise Broken(f"weights() gives {when} other names: {', '.join(sorted(got.keys() ^ due.keys())[:3])}", remedy)
    for name, weight in due.items():
        if not np.allclose(got[name], weight, rtol=1e-5, atol=1e-6):
            distance = float(np.abs(got[name] - weight).max())
            raise Broken(f"weights() gives another {name} {when} than the base with its adapters merged, by {distance:.1e}", remedy)


@backend_promise(
    "Without adapters it scores as the base model, before and after steps; then they are on again",
    exempt=_no_switch,
)
def reference_by_adapters(subject: BackendSubject, case: BackendCase) -> None:
    if not _has_adapters(subject, case, "reference_by_adapters"):
        return
    bench, work = subject.bench, case.whole()
    with subject.open_ranks(case, optimizer=SPEC, lora=LoraConfig(path=bench.adapter(case.model))) as ranks:
        without = {"at the start": ranks.loss(ranks.forward_without_adapters(work))}
        on_again = ranks.loss(ranks.forward(work))
        if not is_right_loss(subject, case, on_again, adapted=True):
            raise Broken(
                f"after without_adapters the objective is {on_again:.6g}, not that of the model with adapters",
                "Turn adapters on again where the context is left",
            )
        ranks.forward_backward(work)
        ranks.optim_step()
        without["after a step"] = ranks.loss(ranks.forward_without_adapters(work))
    for when, got in without.items():
        if not is_right_loss(subject, case, got):
            due = bench.definition(case.model, NUMBERS).loss
            raise Broken(
                f"without adapters the objective is {got:.6g} {when}, where the base model gives {due:.6g}",
                "Turn all adapters off in without_adapters: a reference that has them is the policy itself",
            )


def _no_four_bits(subject: BackendSubject) -> str | None:
    if (reason := _no_lora(subject)) is not None:
        return reason
    if find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    return None if subject.declares("load_in_4bit") else "the backend does not declare 'load_in_4bit'"


@backend_promise(
    "Adapters over linear layers in 4 bits learn as over a model of these rounded weights, which weights() gives with them merged",
    exempt=_no_four_bits,
)
def four_bit_layers(subject: BackendSubject, case: BackendCase) -> None:
    if not _has_adapters(subject, case, "load_in_4bit"):
        return
    bench = subject.bench
    adapter = bench.adapter(case.model)
    with subject.open_ranks(case, optimizer=SPEC, lora=LoraConfig(path=adapter, load_in_4bit=True)) as ranks:
        merged = ranks.weights()[0]
        ranks.forward_backward(case.whole())
        gradients = ranks.gradients()[0]
    require_same_gradients(
        gradients,
        bench.definition(case.model, NUMBERS, adapted=True, rounded=True).gradients,
        "of PEFT's own model over weights rounded to 4 bits",
        "Compute with the weights that the codes stand for, as modeling.four_bit does",
        facts={},
    )
    _require_merged(merged, _merge(bench.rounded_model(case.model), adapter), "over weights in 4 bits", MERGED)


def _declares_or_has_none(subject: BackendSubject) -> str | None:
    return exempt_with("load_in_4bit")(subject) or _no_lora(subject)


@backend_promise("Linear layers in 4 bits, which it does not declare, are refused in words", exempt=_declares_or_has_none)
def undeclared_four_bit_layers(subject: BackendSubject, case: BackendCase) -> None:
    try:
        with subject.open_ranks(case, lora=LoraConfig(rank=4, load_in_4bit=True)) as ranks:
            ranks.forward(case.whole())
    except EngineError as error:
        require_words(error)
        return
    raise Broken(
        "trains adapters with model.lora.load_in_4bit although it does not declare 'load_in_4bit'",
        "Declare it, or raise UnsupportedError in setup",
    )


@backend_promise("Adapters, which it does not declare, are refused in words", exempt=exempt_with("lora"))
def undeclared_adapters(subject: BackendSubject, case: BackendCase) -> None:
    try:
        with subject.open_ranks(case, lora=LoraConfig(rank=4)) as ranks:
            ranks.forward(case.whole())
    except EngineError as error:
        require_words(error)
        return
    raise Broken("trains adapters although it does not declare 'lora'", "Declare it, or raise UnsupportedError in setup")


LORA_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (
    adapters,
    reference_by_adapters,
    four_bit_layers,
    undeclared_adapters,
    undeclared_four_bit_layers,
)
