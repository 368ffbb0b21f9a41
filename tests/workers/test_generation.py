"""Weights reach generators in one form, which every rank knows; a generator that fails leaves no rank waiting."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_engine.contracts.kinds.generator import GeneratorCapability, GeneratorDescription, WeightForm
from skyrl_engine.errors import ModelError, UnsupportedError, WorkerError
from skyrl_engine.registry.host import Owner
from skyrl_engine.workers.generation import GeneratorDriver, OfferedWeights, RankGenerator, form_for
from skyrl_engine.workers.weight_files import INDEX, WrittenWeights, write_weights
from skyrl_engine.workers.wire_weights import iterate_wire_weights


class Gathers:
    """A backend without memory to show; it counts the tensors that were gathered."""

    def __init__(self) -> None:
        self.gathered = 0

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b", "c"):
            self.gathered += 1
            yield name, torch.zeros(1)


class Shows(Gathers):
    def storage(self) -> dict[str, torch.Tensor]:
        return {"a": torch.ones(1)}


class ShowsNone(Gathers):
    def storage(self) -> None:
        return None


def describe(accepts: tuple[WeightForm, ...], *capabilities: GeneratorCapability) -> GeneratorDescription:
    return GeneratorDescription(frozenset(capabilities), accepts, "rank", 1)


@pytest.mark.parametrize(
    ("accepts", "backend", "target", "form"),
    [
        (("module", "tensors"), Shows(), "policy", "module"),
        (("tensors", "module"), Shows(), "policy", "tensors"),
        (("module", "tensors"), ShowsNone(), "policy", "tensors"),
        (("module", "tensors"), Gathers(), "policy", "tensors"),
        (("module", "tensors"), Shows(), "reference", "tensors"),
        (("directory", "tensors"), Gathers(), "policy", "tensors"),
    ],
)
def test_the_first_form_that_both_have(accepts: tuple[WeightForm, ...], backend: Any, target: str, form: str) -> None:
    assert form_for(describe(accepts), backend, "generator 'x'", target) == form


def test_without_a_common_form() -> None:
    with pytest.raises(UnsupportedError, match="generator 'x' takes weights as module, and the backend gives tensors"):
        form_for(describe(("module",)), Gathers(), "generator 'x'")  # type: ignore[arg-type]


def test_what_was_recorded_needs_no_weights() -> None:
    """Nothing is gathered for it, on any rank; without the capability a generator that takes none is refused."""
    backend: Any = Shows()
    offered = OfferedWeights(form_for(describe((), "recorded"), backend, "generator 'x'"), backend)
    offered.finish()
    assert (offered.forms, backend.gathered) == (frozenset(), 0)
    with pytest.raises(UnsupportedError, match="takes weights as nothing"):
        form_for(describe(()), backend, "generator 'x'")


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_weights_are_gathered_to_the_end_however_many_were_taken(taken: int) -> None:
    """Ranks gather together: one that stopped in the middle would leave the others in a collective."""
    backend: Any = Gathers()
    offered = OfferedWeights("tensors", backend)
    if taken:
        stream = offered.tensors()
        for _ in range(taken):
            next(stream)
    offered.finish()
    assert backend.gathered == 3


class Rounds:
    """A backend of one matrix of float32 numbers, which it gives rounded too, and counts what it was asked for."""

    def __init__(self) -> None:
        self.matrix, self.asked = torch.tensor([[1.00390625, -3.1415927], [1e-3, 65504.0]]), list[str]()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.asked.append("float32")
        yield "a", self.matrix

    def weights_in(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        self.asked.append(str(dtype).removeprefix("torch."))
        yield "a", self.matrix.to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("can_round", [True, False])
def test_weights_travel_in_the_precision_of_the_run(tmp_path: Path, dtype: Any, can_round: bool) -> None:
    """Rounded on the ranks that hold them if the backend can, else after they were gathered; exact where the run computes in float32."""
    backend: Any = Rounds()
    if not can_round:
        backend = SimpleNamespace(weights=backend.weights, asked=backend.asked, matrix=backend.matrix)
    (name, tensor), *others = OfferedWeights("tensors", backend, "the backend", dtype).tensors()
    assert (name, others, tensor.dtype) == ("a", [], getattr(torch, dtype))
    assert torch.equal(tensor, backend.matrix.to(tensor.dtype))
    assert backend.asked == [dtype if can_round else "float32"]
    write_weights(tmp_path, iterate_wire_weights("the backend", backend, dtype))
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == 4 * tensor.dtype.itemsize
    ((name, read),) = WrittenWeights(tmp_path, None).tensors()
    assert torch.equal(read, tensor), "what was written is what is checked"


def test_memory_that_is_shown_is_not_gathered() -> None:
    backend: Any = Shows()
    offered = OfferedWeights("module", backend)
    assert offered.forms == {"module"}
    assert list(offered.storage()) == ["a"]
    offered.finish()
    assert backend.gathered == 0


class Refuses:
    """A generator that refuses new weights."""

    def update(self, weights: Any, version: int, target: str) -> None:
        raise ModelError("these weights are of another model", remedy="Give those of this one")


class Breaks(Gathers):
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise WorkerError("a peer is gone", rank=0, remedy="Look for it")


def test_a_collective_that_fails_after_a_generator_does_not_hide_why(caplog: pytest.LogCaptureFixture) -> None:
    backend: Any = Breaks()
    part: Any = SimpleNamespace(product=Refuses(), owner=Owner("generator 'x'", "Mend it"))
    generator = RankGenerator(backend, describe(("tensors",)), "generator 'x'", GeneratorDriver(part))
    with pytest.raises(ModelError, match="these weights are of another model"):
        generator.update(1, "policy")
    assert "a peer is gone" in caplog.text
