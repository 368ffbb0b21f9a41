"""Two hundred steps in bfloat16 over float32 master weights, against the same steps in float64.

    python tests/proof/bfloat16_curves.py docs/reference/precision.md

The definition is a plain torch loop over the Hugging Face model, which shares no code with the engine but the batches: in float64; under
torch's autocast to bfloat16 with float32 weights, which says what rounding of the computation alone does; and with weights in bfloat16 and no
masters, which is the mistake that the bound must show. Backend fsdp takes the steps without masters too, rounding at random.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from attrs import evolve, frozen
from parity import Matrix, resolve_plugins

from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ComputeDtype
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.proof.rollouts import make_rollouts
from skyrl_engine.workers.messages import GatherWeights

STEPS, BATCHES = 200, 4

RUNS: Mapping[str, tuple[str, str]] = {
    "fsdp, one rank": ("fsdp", "dp1"),
    "fsdp, dp 2": ("fsdp", "dp2"),
    "deepspeed z2, dp 2": ("deepspeed z2", "dp2"),
    "megatron, dp 2": ("megatron", "dp2"),
    "deepspeed z3, dp 2": ("deepspeed z3", "dp2"),
    "megatron, tp 2": ("megatron", "tp2"),
}
"""Backends that compute in bfloat16, with weights whole and divided."""

BETAS = (0.9, 0.95)
OPTIMIZER = OptimizerConfig(learning_rate=3e-4, betas=BETAS, max_grad_norm=None)
"""A rate at which a step moves a weight of 0.5 by a sixth of the distance between two numbers of bfloat16, as in real trainings."""

MICRO_BATCH_TOKENS = 128
"""Two or more micro-batches for every rank, whose gradients add up."""

UNIT = 2.0**-9
"""Largest relative error of rounding a number to bfloat16, which has 8 significant bits."""

LOSS = 4 * UNIT
"""Bound of the mean distance of losses, relative to those of float64.

A loss is a sum of hundreds of log-probabilities, each of logits that went through some ten rounded products after each other: errors of a
logit add up to a few units of rounding, and those of tokens are independent and mostly cancel out.
"""

WEIGHTS = 0.15
"""Bound of the distance of all weights at the end, relative to how far they moved in float64.

AdamW divides a gradient by its own size, so a relative error of a gradient is one of a step. Gradients of this model are off by 2 to 5%
of their norm in bfloat16 (bounds of the conformance suites: 5e-2, and 1e-1 for megatron). Where errors of steps were independent they would
cancel out over 200 steps; as the same four batches come again and again they do not, and the bound is above that of one step.
"""

STOCHASTIC_WEIGHTS = 0.3
"""The same for weights in bfloat16 alone that are rounded at random.

A weight of 0.2 has neighbours 0.001 away, and a step of 3e-4 rounds to one of them: over 200 steps these errors, of mean 0, come to
sqrt(200 * 0.3 * 0.7) * 0.001 = 0.0065 (standard deviation). A weight moves by 0.06 at most, where its gradient never changes its sign, and by
half of that in most: the distance is expected between 0.1 and 0.25. Rounded to the nearest it is 0.7.
"""

PLAIN, WITHOUT_MASTERS = "a plain loop, autocast", "a plain loop, bfloat16 weights without masters"

STOCHASTIC = "fsdp, one rank, stochastic rounding without masters"

Masters = Literal["float64", "autocast", "none"]


@frozen(eq=False)
class Training:
    """A loss before each step, float64[steps], and the weights in the end, by name."""

    losses: np.ndarray
    weights: Mapping[str, np.ndarray]


@frozen
class Distance:
    """Distances from float64: losses on average, and weights in the end relative to their movement."""

    loss: float
    weights: float

    def is_within_bounds(self, weights: float = WEIGHTS) -> bool:
        return self.loss <= LOSS and self.weights <= weights


def train_plainly(directory: Path, masters: Masters, steps: int = STEPS) -> Training:
    """Train by a plain torch loop: in float64, by autocast to bfloat16 over float32 weights, or with all weights in bfloat16 alone."""
    from transformers import AutoModelForCausalLM

    dtype = {"float64": torch.float64, "autocast": torch.float32, "none": torch.bfloat16}[masters]
    with quiet_progress():
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(parameters, lr=OPTIMIZER.learning_rate, betas=BETAS, eps=1e-8, weight_decay=0.0)
    batches = [pad(columns) for columns in make_batches()]
    losses = []
    for step in range(steps):
        input_ids_BT, weights_BT = batches[step % BATCHES]
        with torch.autocast("cpu", torch.bfloat16, enabled=masters == "autocast"):
            logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
        logprobs_BTV = torch.log_softmax(logits_BTV.to(torch.float64 if masters == "float64" else torch.float32), -1)
        picked_BT = logprobs_BTV[:, :-1].gather(2, input_ids_BT[:, 1:, None]).squeeze(2)
        weights = weights_BT[:, 1:].to(picked_BT.dtype)
        loss = -(weights * picked_BT).sum() / weights.sum()
        torch.autograd.backward(loss)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    final = {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()}
    return Training(np.array(losses), final)


def make_batches() -> Sequence[SampleColumns]:
    """The batches of every run, which come again and again."""
    return [make_rollouts((), seed) for seed in range(BATCHES)]


def pad(columns: SampleColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids int64[B, T] and the loss weight of each token [B, T], padded on the right, where causal attention does not look."""
    tokens, actions = np.diff(columns.token_offsets), np.diff(columns.action_offsets)
    input_ids_BT = torch.zeros(len(columns), int(tokens.max()), dtype=torch.int64)
    weights_BT = torch.zeros(input_ids_BT.shape, dtype=torch.float64)
    for sample, (length, count) in enumerate(zip(tokens, actions, strict=True)):
        own = slice(columns.token_offsets[sample], columns.token_offsets[sample + 1])
        input_ids_BT[sample, :length] = torch.from_numpy(np.array(columns.input_ids[own]))
        scored = slice(columns.action_offsets[sample], columns.action_offsets[sample + 1])
        weights_BT[sample, length - count : length] = torch.from_numpy(np.array(columns.loss_weight[scored], dtype=np.float64))
    return input_ids_BT, weights_BT


def train(
    matrix: Matrix,
    backend: str,
    layout: str,
    dtype: ComputeDtype = "bfloat16",
    steps: int = STEPS,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> Training:
    """Train by the engine on a backend's ranks."""
    with matrix.group(backend, layout, optimizer, dtype=dtype) as group:
        engine = matrix.engine(group, resolve_plugins("cross_entropy", "packed"), optimizer, steps, MICRO_BATCH_TOKENS)
        plans = [engine.plan(columns) for columns in make_batches()]
        losses = [engine.train(plans[step % BATCHES]).metrics["loss"].result for step in range(steps)]
        weights = {name: np.asarray(weight, dtype=np.float64) for name, weight in group.ask(GatherWeights())[0].items()}
    return Training(np.array(losses), weights)


def measure(got: Training, expected: Training, start: Mapping[str, np.ndarray]) -> Distance:
    """Compare a training with that of float64, whose weights were `start`."""
    assert got.weights.keys() == expected.weights.keys()
    off = sum(float(((got.weights[name] - weight) ** 2).sum()) for name, weight in expected.weights.items())
    moved = sum(float(((start[name] - weight) ** 2).sum()) for name, weight in expected.weights.items())
    return Distance(float(np.mean(np.abs(got.losses - expected.losses) / expected.losses)), (off / moved) ** 0.5)


def measure_all(matrix: Matrix) -> Mapping[str, Distance]:
    """Return the distance from float64 of each run, and of the two plain loops in bfloat16, by name."""
    directory = Path(matrix.model().path)
    start = train_plainly(directory, "float64", 0).weights
    expected = train_plainly(directory, "float64")
    distances = {}

    def add(name: str, training: Training) -> None:
        distances[name] = measure(training, expected, start)
        print(f"{name}: {distances[name]}", flush=True)

    add(PLAIN, train_plainly(directory, "autocast"))
    add(WITHOUT_MASTERS, train_plainly(directory, "none"))
    for name, (backend, layout) in RUNS.items():
        add(name, train(matrix, backend, layout))
    add(STOCHASTIC, train(matrix, "fsdp", "dp1", optimizer=evolve(OPTIMIZER, stochastic_rounding=True)))
    return distances


def table(distances: Mapping[str, Distance]) -> str:
    """Return the rows of the page, in Markdown."""
    lines = ["| run | mean distance of the loss | distance of the weights after 200 steps |", "|---|---|---|"]
    lines += [f"| {name} | {distance.loss:.1e} | {distance.weights:.1%} |" for name, distance in distances.items()]
    return "\n".join(lines)


def list_outside(distances: Mapping[str, Distance]) -> list[str]:
    """Return the names of runs that are not as they are due: within the bounds, or outside of both without masters."""
    bounds = {STOCHASTIC: STOCHASTIC_WEIGHTS}
    wrong = [
        name
        for name, distance in distances.items()
        if name != WITHOUT_MASTERS and not distance.is_within_bounds(bounds.get(name, WEIGHTS))
    ]
    if (
        WITHOUT_MASTERS in distances
        and min(distances[WITHOUT_MASTERS].loss / LOSS, distances[WITHOUT_MASTERS].weights / WEIGHTS) <= 1
    ):
        wrong.append(WITHOUT_MASTERS)
    return wrong


MARK = "<!-- measured by tests/proof/bfloat16_curves.py -->"


def main(target: str) -> None:
    """Measure everything and put the table between the marks of a page. Ends with an error where a run is not as it is due."""
    with Matrix(keys=()) as matrix:
        distances = measure_all(matrix)
    if wrong := list_outside(distances):
        sys.exit(f"not written: {', '.join(wrong)}")
    before, _, after = Path(target).read_text(encoding="utf-8").split(MARK)
    Path(target).write_text(f"{before}{MARK}\n\n{table(distances)}\n\n{MARK}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
