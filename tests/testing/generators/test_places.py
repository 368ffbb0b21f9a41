"""Places where the kit holds generators to their promises: which it refuses, and the process that promises share."""

from collections.abc import Iterator

import numpy as np
import pytest

from skyrl_engine import ContractError, UnsupportedError
from skyrl_engine.contracts import GenerationRequest, GeneratorDescription, Sampling
from skyrl_engine.testing import GeneratorConformance, Subject, select_plugin
from skyrl_engine.testing.generators import places
from skyrl_engine.testing.generators.bench import RunningGenerator, due_logprobs, requests_of, run_generator
from skyrl_engine.testing.generators.lifecycle_promises import process_state
from skyrl_engine.workers.replicas import ReplicaHost


def of(description: GeneratorDescription) -> Subject[object]:
    return Subject("mine", object, hooks={"description": lambda: description})


def describe(*accepts: str, placement: str = "rank") -> GeneratorDescription:
    return GeneratorDescription(frozenset({"logprobs"}), accepts, placement, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("description", "placement", "words"),
    [
        (describe("module"), "process", "which a process of its own cannot be given"),
        (describe("tensors", placement="process"), "rank", "cannot live on a rank"),
        (describe("directory", placement="remote"), "rank", "drives servers of its own"),
        (describe("directory", placement="remote"), "process", "drives servers of its own"),
        (describe("tensors"), "process", "a generator without its plugin"),
        (describe("tensors", placement="process"), "auto", "a generator without its plugin"),
    ],
)
def test_a_place_where_it_cannot_be_is_refused(description: GeneratorDescription, placement: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        places.place_subject(of(description), placement)  # type: ignore[arg-type]


def test_a_suite_tells_its_place_to_promises() -> None:
    class Elsewhere(GeneratorConformance):
        plugin = "hf"
        placement = "process"

    class Here(GeneratorConformance):
        plugin = "hf"

    assert [places.placement_of(suite().subject()) for suite in (Elsewhere, Here)] == ["process", "rank"]
    assert process_state.exempt(Elsewhere().subject()) == "it lives in a process of its own"
    assert process_state.exempt(Here().subject()) is None


def process_of(generator: RunningGenerator) -> object:
    assert isinstance(generator.placed, places.HostedGenerator)
    assert isinstance(generator.placed.host, ReplicaHost)
    return generator.placed.host._replicas[0].process


@pytest.fixture
def hf() -> Iterator[Subject[object]]:
    with places.share_starts():
        yield places.place_subject(Subject.of_plugin(select_plugin("generator", "hf", {})), "process")


@pytest.mark.nightly
def test_promises_share_a_process_until_one_fails_in_it(hf: Subject[object]) -> None:
    """The next one begins with the first weights again, under a later version, and hears nothing of what was under way."""
    with run_generator(hf) as first:
        process, (request,) = process_of(first), requests_of(1)
        first.update(1)
        with pytest.raises(ContractError):
            first.sample([GenerationRequest(9, np.array([-1], dtype=np.int32), Sampling(max_tokens=2), 0)])
        first.submit(requests_of(3, first=100, max_tokens=200))
    with run_generator(hf) as second:
        assert process_of(second) is process
        assert second.first_version == 2
        (done,) = second.sample([request])
        assert done.versions.versions.tolist() == [2]
        due = due_logprobs(second.weights, request, done)[np.arange(len(done.token_ids)), done.token_ids]
        np.testing.assert_allclose(done.logprobs, due, atol=1e-4)  # float32, summed in another order
    with run_generator(hf, is_alone=True) as alone:
        assert process_of(alone) is not process
    with pytest.raises(KeyError), run_generator(hf):
        raise KeyError
    with run_generator(hf) as third:
        assert process_of(third) is not process
        assert third.first_version == 0
