"""Requests for the generator `hf`, and the weights that it samples from, in this process."""

import numpy as np

from skyrl_engine.contracts import GenerationRequest, Sampling


class Weights:
    """The weights of a model that is loaded here, as a rank offers them."""

    def __init__(self, model, form="tensors"):
        self._model = model
        self.forms = frozenset({form})

    def storage(self):
        named = [*self._model.named_parameters(remove_duplicate=False), *self._model.named_buffers(remove_duplicate=False)]
        return {name: tensor.detach() for name, tensor in named}

    def tensors(self):
        return ((name, tensor.detach()) for name, tensor in self._model.named_parameters())


def build_requests(count, *, first=0, seed=0, **sampling):
    draw = np.random.default_rng(seed)
    return [
        GenerationRequest(
            first + number,
            draw.integers(0, 128, draw.integers(1, 20)).astype(np.int32),
            Sampling(**{"max_tokens": int(draw.integers(1, 12)), **sampling}),
            seed=number,
        )
        for number in range(count)
    ]


def finish_requests(generator, requests):
    generator.submit(requests)
    done = {}
    while len(done) < len(requests):
        for completion in generator.poll(10.0):
            assert completion.request_id not in done
            done[completion.request_id] = completion
    assert generator.poll(0.0) == []
    return [done[request.request_id] for request in requests]
