"""Several objectives on one recorded batch, from the same weights: losses, gradients, clipped tokens, and the policy after one step of each."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.outputs import BatchOutput, results_of
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.engine.results import COUNTED
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.training.replay.step import Progress, RecordedStep
from skyrl_engine.workers.dispatch import batch_structure, compact_weights, cut
from skyrl_engine.workers.scored_tokens import iterate_scored_tokens

OLD_LOGPROBS: Final = "old_logprobs"
_LAYER: Final = re.compile(r"(?:.*\.)?(layers|h|blocks|layer)\.(\d+)\.")
_OF_A_PASS: Final = frozenset({*COUNTED, "padding_share", "shared_share", "loss"})

Numbers = npt.NDArray[np.float64]


@frozen
class ComparedObjective:
    """A loss with its options (`use` among them), and where they are others than the run's a reducer and an estimator of advantages."""

    label: str
    loss: Mapping[str, Any] | None = None
    reducer: Mapping[str, Any] | None = None
    advantage: SelectedPlugin | None = None


@frozen
class TokenPush:
    """A token on which two objectives differ: its place, and by how much each pushes its log-probability up, as a share of all its pushes.

    `sample` is the sample's number in the batch and `token` the place in its text.
    """

    sample: int
    token: int
    token_id: int
    share: float
    other: float


@frozen(eq=False)
class Measured:
    """One objective on the batch.

    `metrics` are those of the loss at the step's weights, `after` those on the same batch after one optimizer step. `cosine` compares the
    gradient with that of the first objective, and `cosines` do so by layer; None where one of them is 0.

    `kl` and `change` are of the policy after the step, over the tokens that carry loss: the estimate k3 (Schulman 2020), in nats, of the
    divergence of the policy before from the one after, and the mean distance of log-probabilities. `pushes` are the tokens that the objective
    treats most differently from the first one; None where a loss reads more than numbers per token.
    """

    label: str
    loss: float
    grad_norm: float
    metrics: Mapping[str, float]
    after: Mapping[str, float]
    cosine: float | None
    cosines: Mapping[str, float | None]
    kl: float | None
    change: float | None
    pushes: tuple[TokenPush, ...] | None


def check_objectives(engine: Engine, objectives: Sequence[ComparedObjective]) -> None:
    """Put every objective in force once, the first one last. Raises what `Engine.use_loss` does for one that does not go with the run."""
    for objective in (*objectives[1:], *objectives[:1]):
        _put_in_force(engine, objective)


def compare_objectives(
    step: RecordedStep,
    objectives: Sequence[ComparedObjective],
    scratch: Path,
    *,
    tokens: int = 10,
    progress: Progress | None = None,
) -> list[Measured]:
    """Compute every objective on the batch of a step, from the step's weights; the first is what the others are compared with.

    The weights and the optimizer's state are written to `scratch`, and loaded again after the optimizer step of each objective. `tokens` counts
    the tokens that are named of each. Raises UnsupportedError for an objective that reads what the batch does not have.
    """
    weights = scratch / "weights"
    weights.mkdir()
    step.engine.save(weights)
    measured: list[Measured] = []
    first: tuple[Mapping[str, npt.NDArray[Any]], Numbers | None] | None = None
    for number, objective in enumerate(objectives):
        if progress is not None:
            progress("objectives", number, len(objectives))
        plan = _use(step, objective)
        result = step.engine.forward_backward(plan, bound=step.bound, temperature=step.temperature).result()
        gradients, pushes = step.engine.gradients(), measure_pushes(step, plan, result.output)
        if first is None:
            first = gradients, pushes
        reported = results_of(result.metrics)
        norms = {name: _norm([values]) for name, values in gradients.items()}
        step.engine.optim_step().result()
        after, kl, change = _look_after_step(step, plan, result.output)
        measured.append(
            Measured(
                objective.label,
                reported["loss"],
                float(np.sqrt(sum(norm**2 for norm in norms.values()))),
                _of_loss(reported),
                after,
                _cosine(list(first[0].values()), [gradients[name] for name in first[0]]),
                _cosines_by_layer(first[0], gradients),
                kl,
                change,
                None if pushes is None or first[1] is None else _differ_most(plan, first[1], pushes, tokens),
            )
        )
        step.engine.load(weights)
    return measured


def _use(step: RecordedStep, objective: ComparedObjective) -> Plan:
    """Put an objective in force; return the plan with what it reads."""
    _put_in_force(step.engine, objective)
    plan = step.plan
    if objective.advantage is not None:
        if step.with_advantage is None:
            raise UnsupportedError(
                "a run over a dataset estimates no advantages",
                remedy="Leave --advantage out, or compare objectives in a run of trainer rl",
            )
        plan = step.with_advantage(objective.advantage)
    known = {*plan.columns.columns, *step.bound}
    missing = sorted(name for name in step.engine.assembly.objective.columns if name not in known)
    if missing:
        raise UnsupportedError(
            f"{objective.label} reads {', '.join(missing)}, which step {step.step:,} of the run did not compute",
            remedy="Compare losses that read what the run's own loss does, or record a run whose loss reads it too",
        )
    return plan


def _put_in_force(engine: Engine, objective: ComparedObjective) -> None:
    if objective.loss is not None:
        engine.use_loss(objective.loss)
    if objective.reducer is not None:
        engine.use_reducer(objective.reducer)


def measure_pushes(step: RecordedStep, plan: Plan, output: BatchOutput) -> Numbers | None:
    """Return by how much the objective in force pushes the log-probability of every response token up: float64[A], minus its derivative.

    They are exact: an objective depends on the model through its scores of these tokens alone. None where it reads more than log-probabilities,
    entropies and values of tokens.
    """
    engine = step.engine
    assembly = engine.assembly
    if not {*assembly.objective.scores, "logprobs"} <= output.fields.keys():
        return None
    columns, mini_batch = plan.columns, plan.cut.mini_batches[0]
    structure = batch_structure(columns, mini_batch, assembly.context.max_sequence_length, reducer=assembly.reducer, mini_batches=1)
    weights = compact_weights(assembly.reducer, structure)
    needs = [name for name in assembly.objective.columns if name not in step.bound]
    objective = LossObjective(
        assembly.objective,
        assembly.context.seed,
        step.step,
        per_token_outputs=False,
        temperature=step.temperature,
        bound=step.bound,
    )
    scores = {name: output.on_actions(name).values for name in (*assembly.objective.scores, "logprobs")}
    pushes = np.zeros(int(columns.action_offsets[-1]))
    places = {int(sample): int(start) for sample, start in zip(columns.sample_ids, columns.action_offsets[:-1], strict=True)}
    for shard in cut(columns, mini_batch, weights, needs):
        for scored in iterate_scored_tokens(shard, 0, None, "loss"):
            samples = scored.samples
            starts = np.array([places[int(sample)] for sample in samples.sample_ids], dtype=np.int64)
            at = starts[samples.sequence_index] + samples.scored.values
            if not len(at):
                continue
            leaves = {name: torch.from_numpy(values[at].astype(np.float64)).requires_grad_() for name, values in scores.items()}
            total, _ = objective(leaves, cast("MicroBatch", _Tokens(samples)))
            (gradient,) = torch.autograd.grad(total, [leaves["logprobs"]], allow_unused=True)
            if gradient is not None:
                pushes[at] = -gradient.numpy()
    return pushes


@frozen(eq=False)
class _Tokens:
    """The part of a micro-batch that an objective reads."""

    samples: ScoredSamples


def _look_after_step(step: RecordedStep, plan: Plan, before: BatchOutput) -> tuple[dict[str, float], float | None, float | None]:
    """Return the loss's metrics on the batch with the weights as they are now, and how far the policy has moved; None where it is none."""
    engine, columns = step.engine, plan.columns
    old = before.on_actions("logprobs").values
    if OLD_LOGPROBS in step.bound:
        plan = plan.with_columns({OLD_LOGPROBS: old})
    reported = results_of(engine.evaluate(plan, temperature=step.temperature).result().metrics)
    if engine.assembly.objective.scores <= {"values"}:
        return _of_loss(reported), None, None
    now = engine.score(plan, tokens="loss", temperature=step.temperature).result().on_actions("logprobs").values
    carrying = columns.loss_weight != 0
    moved = now[carrying].astype(np.float64) - old[carrying]
    return _of_loss(reported), float(np.mean(np.expm1(moved) - moved)), float(np.abs(moved).mean())


def _of_loss(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in _OF_A_PASS}


def name_layer(parameter: str) -> str:
    """Return the layer that a parameter belongs to: "layers.3", or what it is of where that is no layer."""
    found = _LAYER.match(parameter)
    return f"{found[1]}.{found[2]}" if found else parameter.removesuffix(".weight").removesuffix(".bias")


def _cosines_by_layer(first: Mapping[str, npt.NDArray[Any]], second: Mapping[str, npt.NDArray[Any]]) -> dict[str, float | None]:
    layers: dict[str, list[str]] = {}
    for name in first:
        layers.setdefault(name_layer(name), []).append(name)
    return {layer: _cosine([first[name] for name in names], [second[name] for name in names]) for layer, names in layers.items()}


def _cosine(first: Sequence[npt.NDArray[Any]], second: Sequence[npt.NDArray[Any]]) -> float | None:
    norms = _norm(first) * _norm(second)
    if norms == 0:
        return None
    dot = sum(float(np.vdot(one.astype(np.float64), other.astype(np.float64))) for one, other in zip(first, second, strict=True))
    return dot / norms


def _norm(tensors: Sequence[npt.NDArray[Any]]) -> float:
    return float(np.sqrt(sum(float(np.vdot(wide, wide)) for wide in (tensor.astype(np.float64) for tensor in tensors))))


def _differ_most(plan: Plan, first: Numbers, second: Numbers, count: int) -> tuple[TokenPush, ...]:
    """Return the tokens on which two objectives differ most, each objective's pushes being shares of its own."""
    columns = plan.columns
    shares = [pushes / max(float(np.abs(pushes).sum()), np.finfo(np.float64).tiny) for pushes in (first, second)]
    distance = np.abs(shares[1] - shares[0])
    chosen = [int(place) for place in np.argsort(-distance, kind="stable")[:count] if distance[place] > 0]
    found = []
    for place in chosen:
        sample = int(np.searchsorted(columns.action_offsets, place, side="right")) - 1
        actions = int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
        length = int(columns.token_offsets[sample + 1] - columns.token_offsets[sample])
        token = length - actions + place - int(columns.action_offsets[sample])
        token_id = int(columns.input_ids[int(columns.token_offsets[sample]) + token])
        found.append(TokenPush(sample, token, token_id, float(shares[1][place]), float(shares[0][place])))
    return tuple(found)
