"""Tasks of ranks in the tests: importable by name, because ranks are spawned."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from skyrl_engine import EngineError
from skyrl_engine.contracts import AdamWSettings, MicroBatch, ModelConfig, OptimizerSettings, RankEnvironment, RowKind
from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import ChunkedHead, Score
from skyrl_engine.modeling.optimizer import build_optimizer
from skyrl_engine.modeling.teaching import TeacherStates
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.modeling.vocabulary_parallel import VocabularyParallelScore
from skyrl_engine.proof.plain_model import PlainModel
from skyrl_engine.testing.backends.batches import (
    Arrays,
    Document,
    WeightedObjective,
    build_packed,
    build_padded,
    documents,
    plain_objective,
)
from skyrl_engine_fsdp.backend import FsdpBackend
from skyrl_engine_fsdp.gradients import full
from skyrl_engine_fsdp.plugin import FsdpConfig
from skyrl_engine_fsdp.vocabulary import VocabularyParallelHead


def start(
    directory: str,
    optimizer: OptimizerSettings | None = None,
    *,
    options: FsdpConfig | None = None,
    rows: RowKind = "padded",
    seed: int = 0,
    **model: Any,
) -> FsdpBackend:
    """A backend over the default process group."""
    backend = FsdpBackend(options or FsdpConfig())
    environment = RankEnvironment(dist.get_rank(), dist.get_world_size(), "cpu", seed, rows)
    backend.setup(
        ModelConfig(directory, **{"logits_per_chunk": 5 * VOCABULARY, **model}), optimizer or AdamWSettings(), environment
    )
    return backend


def own_rows(chosen: list[Document], backend: FsdpBackend) -> list[Document]:
    """This data-parallel rank's share: consecutive rows."""
    share = len(chosen) // backend._meshes.topology.dp
    return chosen[backend.coords.dp * share : (backend.coords.dp + 1) * share]


def arrays(pairs: Iterator[tuple[str, torch.Tensor]]) -> Arrays:
    # NumPy has no bfloat16
    return {name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)).numpy().copy() for name, tensor in pairs}


def gradients_of(
    directory: str, *, sizes: tuple[int, ...], unscored: tuple[int, ...] = (), temperature: float = 1.0, **model: Any
) -> list[tuple[float, Arrays]]:
    """Per micro-batch size: this rank's part of the objective, and the gradient summed over ranks."""
    return _gradients_of(directory, build_padded, sizes, unscored, temperature, **model)


def compute_packed_gradients(
    directory: str, *, sizes: tuple[int, ...], unscored: tuple[int, ...] = (), **model: Any
) -> list[tuple[float, Arrays]]:
    """The same from packed rows."""
    return _gradients_of(directory, build_packed, sizes, unscored, 1.0, **model)


def critic_gradients_of(
    directory: str, *needs: str, sizes: tuple[int, ...], unscored: tuple[int, ...] = (), **model: Any
) -> list[tuple[float, Arrays]]:
    """Per micro-batch size: this rank's part of `Critic`, and the gradient summed over ranks."""
    backend = start(directory, value_head=True, **model)
    results = []
    for size in sizes:
        output = backend.forward_backward(
            build_padded(own_rows(documents(unscored=unscored), backend), size), WeightedObjective(needs=needs)
        )
        results.append((output.metrics["loss"].value, arrays(backend.gradients())))
        backend._optimizer.zero_grad()
    backend.close()
    return results


def critic_continued(directory: str, optimizer: OptimizerSettings, checkpoint: Path, target: Path) -> tuple[Any, Any]:
    """(losses, weights) of two more steps: uninterrupted, and by a fresh backend from the checkpoint between; then an export."""

    def learn(backend: FsdpBackend, steps: int) -> list[tuple[float, float]]:
        history = []
        for _ in range(steps):
            output = backend.forward_backward(
                build_padded(own_rows(documents(), backend), 2), WeightedObjective(needs=("logprobs", "values"))
            )
            history.append((output.metrics["loss"].value, backend.optim_step().grad_norm))
        return history

    first = start(directory, optimizer, value_head=True)
    learn(first, 2)
    first.save(checkpoint)
    uninterrupted = learn(first, 2), arrays(first.weights())
    second = start(directory, optimizer, value_head=True)
    learn(second, 1)
    second.load(checkpoint)
    resumed = learn(second, 2), arrays(second.weights())
    second.export(target)
    return uninterrupted, resumed


def head_unused(directory: str) -> Arrays:
    """Gradients of an objective that does not read values, of a model that has the head."""
    backend = start(directory, value_head=True)
    backend.forward_backward(build_padded(own_rows(documents(), backend), 2), WeightedObjective())
    backend.optim_step()
    backend.forward_backward(build_padded(own_rows(documents(), backend), 2), WeightedObjective())
    return arrays(backend.gradients())


def asks_for_values(directory: str) -> None:
    backend = start(directory)
    try:
        backend.forward(build_padded(own_rows(documents(), backend), 8), WeightedObjective(needs=("values",)))
    finally:
        backend.close()


def _gradients_of(
    directory: str,
    layout: Callable[[list[Document], int], list[MicroBatch]],
    sizes: tuple[int, ...],
    unscored: tuple[int, ...],
    temperature: float,
    **model: Any,
) -> list[tuple[float, Arrays]]:
    backend = start(directory, **model)
    results = []
    for size in sizes:
        output = backend.forward_backward(
            layout(own_rows(documents(unscored=unscored), backend), size), WeightedObjective(temperature=temperature)
        )
        results.append((output.metrics["loss"].value, arrays(backend.gradients())))
        backend._optimizer.zero_grad()
    backend.close()
    return results


def train(backend: FsdpBackend, steps: int, *, size: int = 2) -> list[tuple[float, float, float]]:
    """Per step: this rank's part of the objective, gradient norm, learning rate."""
    history = []
    for _ in range(steps):
        output = backend.forward_backward(build_padded(own_rows(documents(), backend), size), WeightedObjective())
        step = backend.optim_step()
        history.append((output.metrics["loss"].value, step.grad_norm, step.learning_rate))
    return history


def train_from_start(
    directory: str, optimizer: OptimizerSettings, steps: int, **model: Any
) -> tuple[list[tuple[float, float, float]], Arrays]:
    backend = start(directory, optimizer, **model)
    return train(backend, steps), arrays(backend.weights())


def plain_adamw(
    directory: str, optimizer: OptimizerSettings, rates: tuple[float, ...]
) -> tuple[list[tuple[float, float, float]], Arrays]:
    """Loss, gradient norm and rate of a step at each of `rates`, then the weights, by plain torch: one process, whole logits.

    A large epsilon makes the update follow the gradient's scale, which AdamW would otherwise hide.
    """
    assert optimizer.epsilon >= 0.1
    model = PlainModel.load(directory, dtype=torch.float32)
    parameters = model.parameters.values()
    groups = [
        {"params": [parameter for parameter in parameters if (parameter.ndim > 1) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, optimizer.weight_decay), (False, 0.0))
    ]
    plain = torch.optim.AdamW(groups, eps=optimizer.epsilon)
    history = []
    for rate in rates:
        total, _ = plain_objective(model, documents())
        plain.zero_grad()
        total.backward()
        assert optimizer.max_grad_norm is not None
        norm = torch.nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm)
        for group in plain.param_groups:
            group["lr"] = rate
        plain.step()
        history.append((total.item(), norm.item(), rate))
    return history, {name: parameter.detach().numpy() for name, parameter in model.parameters.items()}


def clip_norms(directory: str, max_norm: float, options: FsdpConfig | None = None) -> tuple[float, float]:
    """The norm that clipping reports, and the norm it leaves, measured on whole gradients."""
    from skyrl_engine_fsdp.gradients import clip_gradients

    backend = start(directory, options=options)
    backend.forward_backward(build_padded(own_rows(documents(), backend), 2), WeightedObjective())
    reported = clip_gradients(backend._parameters().values(), max_norm, torch.device("cpu"))
    return reported, float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in arrays(backend.gradients()).values())))


def continue_training(
    directory: str,
    optimizer: OptimizerSettings,
    checkpoint: Path,
    options: FsdpConfig | None = None,
    *,
    before: int,
    after: int,
    **model: Any,
) -> tuple[Any, Any]:
    """(history, weights) of the last `after` steps: uninterrupted, and by a fresh backend from the checkpoint between."""
    first = start(directory, optimizer, options=options, **model)
    train(first, before)
    first.save(checkpoint)
    uninterrupted = train(first, after), arrays(first.weights())
    second = start(directory, optimizer, options=options, **model)
    torch.manual_seed(12345)  # whatever the state was, the checkpoint's counts
    np.random.seed(1)
    train(second, 1)
    second.load(checkpoint)
    return uninterrupted, (train(second, after), arrays(second.weights()))


def step_beside_whole(directory: str, optimizer: OptimizerSettings) -> tuple[Arrays, Arrays, bool]:
    """Three steps over weights that ranks divide, and of an optimizer over whole ones with the same gradients; whether state is divided."""
    unlimited = attrs.evolve(optimizer, max_grad_norm=None)
    backend = start(directory, unlimited)
    whole = {name: torch.nn.Parameter(weight.clone()) for name, weight in backend.weights()}
    reference = build_optimizer(whole, unlimited)
    for _ in range(3):
        backend.forward_backward(build_padded(own_rows(documents(), backend), 2), WeightedObjective())
        for name, gradient in backend.gradients():
            whole[name].grad = gradient.clone()
        backend.optim_step()
        reference.step()
    parameters, state = backend._parameters(), backend._optimizer.state
    divided = all(
        isinstance(value, DTensor) and value.placements == parameter.placements
        for parameter in parameters.values()
        for value in state.get(parameter, {}).values()
        if value is not None and value.shape == parameter.shape
    )
    return arrays(backend.weights()), {name: weight.detach().numpy() for name, weight in whole.items()}, divided


def export_weights(directory: str, target: Path, options: FsdpConfig | None = None) -> tuple[Arrays, list[float]]:
    """Export after two steps; returns weights and the backend's own log-probabilities of the first row's scored tokens."""
    backend = start(directory, AdamWSettings(learning_rate=1e-2), options=options)
    train(backend, 1)
    backend.forward(
        build_padded(own_rows(documents(), backend), 2), WeightedObjective()
    )  # gathered weights of before the step must not survive it
    train(backend, 1)
    backend.export(target)
    output = backend.forward(build_padded(documents()[:1], 1), WeightedObjective())
    return arrays(backend.weights()), output.fields["logprobs"].values.tolist()


def accumulate_gradients(
    directory: str, layout: Callable[[list[Document], int], list[MicroBatch]], options: FsdpConfig, **model: Any
) -> tuple[float, Arrays]:
    """This rank's part of the objective and the gradient, of two calls with two micro-batches each, by rows of different number."""
    backend = start(directory, options=options, **model)
    micro_batches = layout(own_rows(documents(), backend), 1)
    half = len(micro_batches) // 2
    outputs = [backend.forward_backward(part, WeightedObjective()) for part in (micro_batches[:half], micro_batches[half:])]
    result = sum(output.metrics["loss"].value for output in outputs), arrays(backend.gradients())
    backend.close()
    return result


def spoil_step(directory: str, options: FsdpConfig, *, by: str) -> tuple[str, bool, list[str]]:
    """Return how an optimizer step ends, whether it left the weights alone, and the details, when rank 1 alone has a NaN gradient.

    `by` "objective": its data-parallel rank computes it; else the name of a parameter of which rank 1 spoils its piece.
    """
    backend = start(directory, options=options)
    before = arrays(backend.weights())
    scale = float("nan") if by == "objective" and backend.coords.dp == 1 else 1.0
    backend.forward_backward(build_padded(own_rows(documents(), backend), 2), WeightedObjective(scale=scale))
    if by != "objective" and dist.get_rank() == 1:
        gradient = backend._parameters()[by].grad
        assert isinstance(gradient, DTensor)
        gradient.to_local().fill_(float("inf"))
    try:
        backend.optim_step()
    except EngineError as error:
        kept = all(np.array_equal(before[name], weight) for name, weight in arrays(backend.weights()).items())
        return error.cause, kept, list(error.details)
    return "stepped", False, []


def outcome_with(directory: str, options: FsdpConfig, *, forgotten: str = "", **model: Any) -> str:
    """Return how setting up ends; `forgotten`: parts whose name ends so are missing in the plan of the layers."""
    from skyrl_engine_fsdp.tensor_parallel import LayerPlan

    whole = LayerPlan.of

    def partial(config: Any, **parts: bool) -> LayerPlan:
        styles = whole(config, **parts).styles
        return LayerPlan({name: style for name, style in styles.items() if not forgotten or not name.endswith(forgotten)})

    with patch.object(LayerPlan, "of", partial):
        try:
            start(directory, options=options, **model).close()
        except EngineError as error:
            return str(error)
    return "set up"


def count_local_numbers(directory: str, options: FsdpConfig, **model: Any) -> int:
    """Count the numbers of all parameters that this rank holds."""
    backend = start(directory, options=options, **model)
    parameters = [*backend._model.parameters()]
    count = sum((value.to_local() if isinstance(value, DTensor) else value).numel() for value in parameters)
    backend.close()
    return count


def scores_of_parts(rule: LogitRule, temperature: float, requested: tuple[str, ...]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Scores and gradients of random logits of all tokens: [of the whole, of this rank's part], float64."""
    draw = torch.Generator().manual_seed(0)
    raw = torch.randn(7, 10, generator=draw, dtype=torch.float64) * 3
    tokens = torch.tensor([[0, 9, 4, 5, 5, 2, 7], [0, 1, 9, 9, 5, 2, 3], [8, 1, 2, 9, 0, 7, 4]]).T
    width = 10 // dist.get_world_size()
    own = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
    whole = Score(rule, temperature, requested)
    part = VocabularyParallelScore(rule, temperature, requested, dist.group.WORLD, own.start, 10)
    raw.requires_grad_()
    scores = whole(raw, tokens)
    upstream = [torch.randn(score.shape, generator=draw, dtype=torch.float64) for score in scores]
    expected = [*scores, torch.autograd.grad(scores, raw, upstream)[0][:, own]]
    raw = raw.detach()
    got = [*part(raw[:, own], tokens), part.gradient(raw[:, own].clone(), tokens, upstream)]
    return [scores.detach().numpy() for scores in expected], [scores.detach().numpy() for scores in got]


def compare_with_a_teacher(
    rule: LogitRule, temperature: float, requested: tuple[str, ...]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Scores and gradients of a student's whole head, and of a divided one, against a teacher whose head is divided too, float64.

    The gradients are of the hidden states and of this rank's part of the weight and of the bias. Chunks are of two positions.
    """
    draw = torch.Generator().manual_seed(0)
    mesh, width = init_device_mesh("cpu", (dist.get_world_size(),)), 12 // dist.get_world_size()
    own = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
    hidden, others = (torch.randn(7, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    tokens = torch.randint(0, 12, (7, 1), generator=draw)
    heads = []
    for kind in (rule, LogitRule()):
        linear = torch.nn.Linear(5, 12, dtype=torch.float64)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
        heads.append(ChunkedHead(linear, kind, 4 * 12))
    divided = []
    for whole in heads:
        part = copy.deepcopy(whole)
        for name, parameter in list(part.linear.named_parameters()):
            setattr(part.linear, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        divided.append(VocabularyParallelHead(part, mesh))
    results = []
    for student, teacher in ((heads[0], TeacherStates.of(heads[1], others)), (divided[0], divided[1].teach(others))):
        states = hidden.clone().requires_grad_()
        scores = student(states, tokens, temperature, requested, teacher)
        upstream = torch.linspace(-1, 2, 7, dtype=torch.float64)
        total = torch.stack([(upstream * score).sum() for score in scores if score.requires_grad]).sum()
        total.backward()
        assert states.grad is not None
        parts = [full_or_part(parameter.grad, own) for parameter in student.linear.parameters()]
        results.append([tensor.detach().numpy() for tensor in (*scores, states.grad, *parts)])
    return results[0], results[1]


def full_or_part(gradient: torch.Tensor | None, own: slice) -> torch.Tensor:
    """This rank's rows of a gradient that is whole, or all that it has of one that is divided."""
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient[own]


def save_checkpoint(
    directory: str, optimizer: OptimizerSettings, checkpoint: Path, options: FsdpConfig
) -> tuple[Any, Arrays, Arrays]:
    """A checkpoint after two steps: the history of two steps more, and the weights and moments that were saved."""
    backend = start(directory, optimizer, options=options)
    train(backend, 2)
    backend.save(checkpoint)
    weights, moments = arrays(backend.weights()), moments_of(backend)
    return train(backend, 2), weights, moments


def resume_checkpoint(
    directory: str, optimizer: OptimizerSettings, checkpoint: Path, options: FsdpConfig
) -> tuple[Any, Arrays, Arrays]:
    """The same of a backend that reads the checkpoint."""
    backend = start(directory, optimizer, options=options)
    backend.load(checkpoint)
    weights, moments = arrays(backend.weights()), moments_of(backend)
    return train(backend, 2), weights, moments


def moments_of(backend: FsdpBackend) -> Arrays:
    """The optimizer's state by parameter and kind."""
    assert backend._optimizer is not None
    return {
        f"{name} {kind}": full(value).numpy().copy()
        for name, parameter in backend._parameters().items()
        for kind, value in backend._optimizer.state[parameter].items()
    }


def losses_after(directory: str, checkpoint: Path, options: FsdpConfig, times: int) -> list[float]:
    """Losses of the first pass after loading the checkpoint, which draws random numbers, so many times."""
    backend = start(directory, options=options)
    losses = []
    for _ in range(times):
        backend.load(checkpoint)
        losses.append(
            backend.forward_backward(build_padded(own_rows(documents(), backend), 2), WeightedObjective()).metrics["loss"].value
        )
    return losses


def place_model(directory: str, *, whole: bool, loose: bool = False) -> tuple[bool, list[str], Arrays, Arrays]:
    """Say if this rank read weights whole, names of tensors left without values, weights, and buffers.

    With `whole` rank 0 reads the model for all; `loose` adds a tensor that nothing fills.
    """
    from skyrl_engine.modeling import placement

    read: list[str] = []
    load_whole, skeleton, in_parts = placement.load_scorer, placement.load_skeleton, placement.load_without_weights

    def load_scorer(spec: ModelConfig, **options: Any) -> Any:
        read.append(spec.path)
        return load_whole(spec, **options)

    def load_skeleton(spec: ModelConfig, **options: Any) -> Any:
        model, scorer = skeleton(spec, **options)
        if loose:
            scorer.decoder.remembered = torch.zeros(3, device="meta")
        return model, scorer

    def load_without_weights(spec: ModelConfig, **options: Any) -> Any:
        return "the test asks for it" if whole else in_parts(spec, **options)

    replaced = {"load_scorer": load_scorer, "load_skeleton": load_skeleton, "load_without_weights": load_without_weights}
    with patch.multiple(placement, **replaced):
        backend = start(directory)
    empty = [name for name, tensor in backend._model.state_dict().items() if tensor.is_meta]
    buffers = {name: buffer.numpy().copy() for name, buffer in backend._model.named_buffers()}
    return bool(read), empty, arrays(backend.weights()), buffers


def outcome(directory: str) -> str:
    """Return how setting up ends on this rank."""
    try:
        start(directory)
    except EngineError as error:
        return str(error)
    return "set up"


def load_elsewhere(directory: str, checkpoint: Path) -> None:
    start(directory).load(checkpoint)


def save_only(directory: str, checkpoint: Path) -> None:
    backend = start(directory)
    train(backend, 1)
    backend.save(checkpoint)
