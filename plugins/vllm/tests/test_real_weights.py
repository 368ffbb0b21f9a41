"""Weights of a real server: folders, a tensor that is left out, and a head that is the embedding."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_engine import ModelError
from skyrl_engine.contracts import Completion, GenerationRequest, GeneratorStart
from skyrl_engine.testing.generators.bench import TinyWeights, due_logprobs, requests_of
from skyrl_engine_vllm.generator import VllmGenerator
from skyrl_engine_vllm.options import VllmOptions

pytestmark = pytest.mark.usefixtures("server_url")

TOLERANCE = 1e-4
Starts = Callable[..., GeneratorStart]
Opens = Callable[..., tuple[VllmGenerator, TinyWeights]]


@pytest.fixture
def opens(starts: Starts) -> Iterator[Opens]:
    """`opens(form, **options)`: a started generator and its weights, closed in the end."""
    opened: list[VllmGenerator] = []

    def open_one(form: str, **options: Any) -> tuple[VllmGenerator, TinyWeights]:
        start: Any = starts(form)
        opened.append(generator := VllmGenerator(VllmOptions(urls=(os.environ["SKYRL_ENGINE_VLLM_URL"],), **options)))
        generator.start(start)
        return generator, start.weights

    yield open_one
    for generator in opened:
        generator.close()


def sample(generator: VllmGenerator, requests: Sequence[GenerationRequest]) -> list[Completion]:
    generator.submit(requests)
    done: dict[int, Completion] = {}
    while len(done) < len(requests):
        done |= {completion.request_id: completion for completion in generator.poll(1.0)}
    return [done[request.request_id] for request in requests]


def gaps(weights: TinyWeights, requests: Sequence[GenerationRequest], done: Sequence[Completion]) -> float:
    pairs = zip(requests, done, strict=True)
    due = [
        due_logprobs(weights, request, each)[np.arange(len(each.token_ids)), each.token_ids] - each.logprobs
        for request, each in pairs
    ]
    return float(np.abs(np.concatenate(due)).max())


@pytest.mark.parametrize("form", ["directory", "tensors"])
def test_weights_of_a_model_whose_head_is_its_embedding_arrive(opens: Opens, form: str) -> None:
    """Alone, vLLM keeps the head's packed copy of the old embedding: 7 nats off."""
    generator, weights = opens(form)
    assert weights.model.config.tie_word_embeddings
    for version in (1, 2):
        weights.change(version)
        generator.update(weights, version)
        requests = requests_of(6, first=10 * version)
        done = sample(generator, requests)
        assert gaps(weights, requests, done) < TOLERANCE
        assert {int(version) for each in done for version in each.versions.versions} == {version}


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(opens: Opens) -> None:
    generator, weights = opens("tensors")

    class Short(TinyWeights):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter([(name, tensor[..., :-1]) for name, tensor in super().tensors()])

    with pytest.raises(ModelError):
        generator.update(Short("tensors"), 1)
    requests = requests_of(4)
    assert gaps(weights, requests, sample(generator, requests)) < TOLERANCE


def test_a_tensor_that_is_left_out_is_told_though_the_server_says_200(opens: Opens) -> None:
    from skyrl_engine_vllm.errors import ServerFault

    class Less:
        """A twin that sends less than it says."""

        form = "tensors"

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            return (each for each in servers.twin.tensors() if "layers.1.mlp.up" not in each[0])

    generator, weights = opens("tensors")
    servers: Any = generator._servers
    (server,) = servers.all
    with pytest.raises(ServerFault, match=r"received another model\.layers\.1\.mlp\.up_proj\.weight"):
        server.delivery.deliver(Less(), servers._tag, servers._checksums)
    # its session is open and it is paused; the next update closes that one first
    weights.change(1)
    generator.update(weights, 1)
    requests = requests_of(4)
    assert gaps(weights, requests, sample(generator, requests)) < TOLERANCE


def test_a_proof_tells_a_step_that_did_not_arrive(opens: Opens) -> None:
    """Log-probabilities alone: a server that kept the weights of before would be told by them too."""
    from skyrl_engine_vllm.delivery import Proof
    from skyrl_engine_vllm.errors import ServerFault

    generator, weights = opens("tensors")
    servers: Any = generator._servers
    (server,) = servers.all
    weights.change(5)
    servers.twin.take(weights)
    with pytest.raises(ServerFault, match="differ from those of the weights"):
        Proof(servers.twin, server.facts.longest).require(server.client, server.delivery.model, "float32", servers._tag)
