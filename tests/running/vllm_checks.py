"""Requests to a generator over real vLLM servers, whether its tokens are right, and the kit's model with adapters."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_engine.contracts import Completion, GenerationRequest, WeightForm
from skyrl_engine.testing.generators.bench import TinyWeights, due_logprobs
from skyrl_engine_vllm.generator import VllmGenerator

TOLERANCE = 1e-4
"""Nats, in float32."""


def sample(generator: VllmGenerator, requests: Sequence[GenerationRequest], seconds: float = 400.0) -> list[Completion]:
    generator.submit(requests)
    return collect(generator, requests, seconds)


def collect(generator: VllmGenerator, requests: Sequence[GenerationRequest], seconds: float = 400.0) -> list[Completion]:
    done: dict[int, Completion] = {}
    until = time.monotonic() + seconds
    while len(done) < len(requests):
        assert time.monotonic() < until
        done |= {completion.request_id: completion for completion in generator.poll(1.0)}
    return [done[request.request_id] for request in requests]


def require_right(weights: Any, requests: Sequence[GenerationRequest], done: Sequence[Completion], version: int) -> None:
    for request, completion in zip(requests, done, strict=True):
        due = due_logprobs(weights, request, completion)[np.arange(len(completion.token_ids)), completion.token_ids]
        assert completion.error is None
        assert np.abs(due - completion.logprobs).max() < TOLERANCE
        assert completion.versions.versions.tolist() == [version]


class Adapters(TinyWeights):
    """The kit's model with adapters, as a PEFT folder; `model` holds them merged."""

    def __init__(self, folder: Path) -> None:
        super().__init__("adapter")
        self.folder, self.count = folder, 0
        self.renew()

    @property
    def forms(self) -> frozenset[WeightForm]:
        return frozenset({"adapter"})

    def renew(self) -> None:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model

        self.count += 1
        base = TinyWeights("tensors").model
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        adapted = get_peft_model(base, PeftConfig(r=4, lora_alpha=8, target_modules=layers))
        draw = torch.Generator().manual_seed(self.count)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
        self.path = self.folder / str(self.count)
        adapted.save_pretrained(self.path)
        self.model = adapted.merge_and_unload().eval()

    def adapter(self) -> Path:
        return self.path
