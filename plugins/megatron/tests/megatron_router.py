"""Losses of routers by their plain definition, and what ranks run to be compared with it. Importable by name, because ranks are spawned."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from megatron_tasks import ROWS, VOCABULARY, Case, arrays, learn, own, start
from transformers import AutoModelForCausalLM

from skyrl_engine.contracts import AdamWSettings, Metric, MicroBatch, RankOutput, StepCounts, combine_metrics, results_of
from skyrl_engine.testing.backends.batches import Arrays, Document, WeightedObjective, documents
from skyrl_engine_megatron.plugin import MegatronConfig

CORRECTION = "e_score_correction_bias"
"""End of the names of biases that routers choose by."""


@frozen(eq=False)
class Truth:
    """Gradients of the losses alone, of parameters that they reach, and what is to be reported."""

    gradients: Arrays
    metrics: Mapping[str, float]


def truth_of(directory: str, chosen: Sequence[Document], *, balance: float, z: float) -> Truth:
    """From the router logits of transformers' own model, in float64 and without a mean of means: one document and layer at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    experts, experts_per_token = model.config.num_experts, model.config.num_experts_per_tok
    layers = range(model.config.num_hidden_layers)
    held = [document for document in chosen if len(document.ids)]
    balances: list[list[torch.Tensor]] = [[] for _ in layers]
    squares: list[list[torch.Tensor]] = [[] for _ in layers]
    loads: list[list[float]] = [[] for _ in layers]
    for document in held:
        router_logits = model(input_ids=document.ids[None], use_cache=False, output_router_logits=True).router_logits
        for layer, logits in zip(layers, router_logits, strict=True):
            probabilities = logits.double().softmax(-1)
            assigned = torch.nn.functional.one_hot(probabilities.topk(experts_per_token).indices, experts).sum(1).double()
            balances[layer].append(experts * (assigned.mean(0) / experts_per_token * probabilities.mean(0)).sum())
            squares[layer] += list(logits.double().exp().sum(-1).log().square())
            loads[layer].append(float(assigned.sum(0).max() / assigned.sum(0).mean()))
    loss = sum(balance * torch.stack(balances[layer]).mean() + z * torch.stack(squares[layer]).mean() for layer in layers)
    torch.autograd.backward(loss)
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None}
    reached = {name: gradient for name, gradient in gradients.items() if gradient.any()}
    metrics = {f"router_load/{layer}": float(np.mean(loads[layer])) for layer in layers}
    for name, values in (("router_balance", balances), ("router_z", squares)):
        metrics[name] = torch.cat([torch.stack(layer_values) for layer_values in values]).mean().item()
    return Truth(gradients=reached, metrics=metrics)


@frozen(eq=False)
class Routed:
    """A rank's result of one case: the gradient summed over ranks, its metrics, and those of an evaluation."""

    gradients: Arrays
    metrics: Mapping[str, Metric]
    evaluated: Mapping[str, Metric]
    collects: bool


def route_rows(directory: str, options: MegatronConfig, cases: Sequence[Case], **model: Any) -> list[Routed]:
    """Every case, one after the other, with one model."""
    everything = documents(VOCABULARY)
    step = counts(everything)
    results = []
    with closing(start(directory, options=options, **model)) as backend:
        for case in cases:
            objective, chosen = WeightedObjective(scale=case.scale), own(everything, backend)
            share = -(-len(chosen) // case.calls)
            outputs = [
                backend.forward_backward(count_routes(ROWS[case.rows](chosen[first : first + share], case.size), step), objective)
                for first in range(0, len(chosen), share)
            ]
            gradients = arrays(backend.gradients())
            backend.zero_grad()
            evaluated = backend.forward(ROWS[case.rows](chosen, case.size), objective)
            collects = backend.coords.collects
            results.append(Routed(gradients, RankOutput.concat(outputs).metrics, evaluated.metrics, collects))
    return results


def counts(chosen: Sequence[Document]) -> StepCounts:
    lengths = [len(document.ids) for document in chosen]
    return StepCounts(sequences=sum(length > 0 for length in lengths), tokens=sum(lengths))


def count_routes(batch: Iterable[MicroBatch], step: StepCounts) -> list[MicroBatch]:
    return [evolve(micro_batch, step=step) for micro_batch in batch]


def report_metrics(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """The routers' of all ranks that collect, as a merger combines them."""
    return {name: value for name, value in results_of(combine_metrics(list(metrics))).items() if name.startswith("router")}


def step_biases(directory: str, options: MegatronConfig) -> tuple[Arrays, Arrays]:
    """Biases after a step with one row in a micro-batch, as `weights` gives them, and before it."""
    with closing(start(directory, AdamWSettings(learning_rate=0.0), options=options)) as backend:
        before = {name: tensor.numpy().copy() for name, tensor in backend.weights() if name.endswith(CORRECTION)}
        learn(backend, 1, rows="packed", size=1)
        return {name: tensor.numpy().copy() for name, tensor in backend.weights() if name.endswith(CORRECTION)}, before
