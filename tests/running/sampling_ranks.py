"""Tasks of ranks that sample together, importable by name, because ranks are processes of their own."""

import torch
import torch.distributed as dist
from hf_requests import Weights, build_requests

from skyrl_engine.contracts import GeneratorStart, ModelConfig, TensorParallelGroup
from skyrl_engine.modeling.loading import load_causal_lm
from skyrl_engine_generators.generator import HfGenerator
from skyrl_engine_generators.options import HfOptions


def sample_together(folder, requests, slots=4, **settings):
    """Completions, which weights there are on this rank beside those of the whole model, and the completions after an update."""
    size = dist.get_world_size()
    group = TensorParallelGroup(dist.get_rank(), size, dist.group.WORLD) if size > 1 else None
    model = load_causal_lm(ModelConfig(folder, **settings)).eval()
    generator = HfGenerator(HfOptions(slots=slots))
    generator.start(GeneratorStart(ModelConfig(folder, **settings), "cpu", (), Weights(model), 0, together=group))
    done = finish_in_steps(generator, requests)
    held = sum(parameter.numel() for parameter in generator._sets["policy"].model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    generator.update(Weights(model), 1)
    return (
        done,
        held / whole,
        finish_in_steps(generator, build_requests(3, first=10_000)),
        type(generator._sets["policy"].rows).__name__,
    )


def finish_in_steps(generator, requests):
    """As ranks poll that sample together: step by step."""
    generator.submit(requests)
    done = {}
    while len(done) < len(requests):
        done |= {completion.request_id: completion for completion in generator.poll(0.0)}
    return [done[request.request_id] for request in requests]
