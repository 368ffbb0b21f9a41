"""What ranks run in the tests: importable by name, because ranks are spawned. Also the plain one-process definition they are compared with."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from skyrl_engine.contracts.backend import MicroBatch, ModelSpec, OptimizerSpec, RankEnvironment
from skyrl_engine.contracts.outputs import Metric, RankOutput
from skyrl_engine.contracts.ragged import Ragged
from skyrl_engine.errors import EngineError
from skyrl_engine.modeling.architecture import LogitRule
from skyrl_engine.modeling.chunked_head import Score
from skyrl_engine.modeling.vocabulary_parallel import VocabularyParallelScore
from skyrl_engine_fsdp.backend import FsdpBackend
from skyrl_engine_fsdp.gradients import full
from skyrl_engine_fsdp.plugin import FsdpConfig

VOCABULARY, ROWS, WIDTH = 256, 8, 16
Arrays = dict[str, np.ndarray]


def save_tiny(directory: Path, family: str, *, tied: bool, **options: Any) -> str:
    """A random two-layer model of the family, saved as a Hugging Face directory."""
    transformers_logging.disable_progress_bar()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    everyone = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if family != "gpt2":
        everyone |= {**sizes, "head_dim": 16}
    config = AutoConfig.for_model(family, **{**everyone, **options})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return str(directory)


def add_head(directory: str, target: Path) -> str:
    """A copy of the model with a value head of random weights."""
    shutil.copytree(directory, target)
    draw = torch.Generator().manual_seed(2)
    hidden = AutoConfig.from_pretrained(directory).hidden_size
    head = {"score.weight": torch.randn(1, hidden, generator=draw), "score.bias": torch.randn(1, generator=draw)}
    save_file({**load_file(target / "model.safetensors"), **head}, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


@frozen(eq=False)
class Row:
    """One sequence, left-padded to WIDTH; `weights` float32[length], 0 where the token is not scored. Length 0: an empty row."""

    ids: torch.Tensor
    weights: torch.Tensor


def rows(*, unscored: tuple[int, ...] = ()) -> list[Row]:
    """Eight sequences of different length; number 5 is empty; those in `unscored` carry no loss."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(ROWS):
        length = 0 if number == 5 else WIDTH - number
        ids = torch.randint(0, VOCABULARY, (length,), generator=draw)
        weights = (torch.rand(length, generator=draw) < 0.6) * torch.rand(length, generator=draw)
        weights[:1] = 0  # nothing comes before a first token
        made.append(Row(ids, weights if number not in unscored else torch.zeros_like(weights)))
    return made


def micro_batch(chosen: list[Row]) -> MicroBatch:
    """Left-padded rows with attention mask and position ids, as the padded collator builds them."""
    ids, mask = (torch.zeros(len(chosen), WIDTH, dtype=torch.int64) for _ in range(2))
    positions, labels, weights = [], [], []
    for number, row in enumerate(chosen):
        start = WIDTH - len(row.ids)
        ids[number, start:], mask[number, start:] = row.ids, 1
        scored = row.weights.nonzero()[:, 0]
        positions.append(number * WIDTH + start + scored - 1)
        labels.append(row.ids[scored])
        weights.append(row.weights[scored])
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    lengths = Ragged.from_list([[len(row.ids)] for row in chosen], np.int64)
    return MicroBatch(inputs, torch.cat(positions), torch.cat(labels), lengths, torch.cat(weights))


def cut(chosen: list[Row], size: int) -> list[MicroBatch]:
    """Micro-batches of `size` rows."""
    return [micro_batch(chosen[start : start + size]) for start in range(0, len(chosen), size)]


def packed(bins: list[list[Row]], *, align: int = 4, padding: int = 3) -> MicroBatch:
    """Every list of sequences a row, each sequence rounded up to `align`, as the packed collator builds them."""
    occupied = [[-(-len(row.ids) // align) * align for row in one] for one in bins]
    width = max(sum(spaces) for spaces in occupied) + padding
    ids, mask, places = (torch.zeros(len(bins), width, dtype=torch.int64) for _ in range(3))
    positions, labels, weights = [], [], []
    for number, one in enumerate(bins):
        starts = np.cumsum([0, *occupied[number]]).tolist()
        for start, row in zip(starts[:-1], one, strict=True):
            here = slice(start, start + len(row.ids))
            ids[number, here], mask[number, here], places[number, here] = row.ids, 1, torch.arange(len(row.ids))
            scored = row.weights.nonzero()[:, 0]
            positions.append(number * width + start + scored - 1)
            labels.append(row.ids[scored])
            weights.append(row.weights[scored])
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
    lengths = Ragged.from_list([[len(row.ids) for row in one] for one in bins], np.int64)
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        inputs, torch.cat([nothing, *positions]), torch.cat([nothing, *labels]), lengths, torch.cat([torch.zeros(0), *weights])
    )


def pack(chosen: list[Row], size: int) -> list[MicroBatch]:
    """Micro-batches of `size` rows: two sequences in the first row, an empty row, then three sequences a row."""
    bins = [chosen[:2], [], *(chosen[start : start + 3] for start in range(2, len(chosen), 3))]
    return [packed(bins[start : start + size]) for start in range(0, len(bins), size)]


class Weighted:
    """-sum w logprob - 0.1 sum w entropy; the sum and the log-probabilities come back as metrics. `scale` spoils or scales it."""

    needs = frozenset({"logprobs", "entropy"})

    def __init__(self, scale: float = 1.0, temperature: float = 1.0) -> None:
        self.scale = scale
        self.temperature = temperature

    def __call__(self, scores: Mapping[str, torch.Tensor], micro: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
        weights = micro.samples.to(scores["logprobs"].dtype)
        total = self.scale * -(weights * (scores["logprobs"] + 0.1 * scores["entropy"])).sum()
        empty = RankOutput.empty()
        return total, RankOutput(empty.sample_ids, empty.action_lengths, empty.scored, {}, {"loss": Metric.sum(total.item())})


class Critic(Weighted):
    """sum w (value - 0.3)^2, and -sum w logprob where `needs` has it."""

    def __init__(self, *needs: str) -> None:
        super().__init__()
        self.needs = frozenset(needs)

    def __call__(self, scores: Mapping[str, torch.Tensor], micro: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
        assert scores.keys() == self.needs
        weights = micro.samples.to(scores["values"].dtype)
        total = (weights * (scores["values"] - 0.3) ** 2).sum()
        if "logprobs" in scores:
            total = total - (weights * scores["logprobs"]).sum()
        empty = RankOutput.empty()
        return total, RankOutput(empty.sample_ids, empty.action_lengths, empty.scored, {}, {"loss": Metric.sum(total.item())})


def critic_definition(directory: str, chosen: list[Row], *needs: str, dtype: torch.dtype = torch.float32) -> tuple[float, Arrays]:
    """What `Critic` computes the plain way: one process, one sequence at a time, whole logits, a linear layer on the hidden states."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    stored = load_file(Path(directory) / "model.safetensors")
    head = torch.nn.Linear(model.config.hidden_size, 1, dtype=dtype)
    head.load_state_dict({kind: stored[f"score.{kind}"] for kind in ("weight", "bias")})
    total = torch.zeros((), dtype=dtype)
    for row in chosen:
        if len(row.ids) < 2:
            continue
        hidden = model.model(input_ids=row.ids[None], use_cache=False)[0][0, :-1]
        weights = row.weights[1:].to(dtype)
        total = total + (weights * (head(hidden)[:, 0] - 0.3) ** 2).sum()
        if "logprobs" in needs:
            logprobs = model.lm_head(hidden).log_softmax(-1)
            total = total - (weights * logprobs.gather(-1, row.ids[1:, None])[:, 0]).sum()
    total.backward()
    named = [*model.named_parameters(), *((f"score.{name}", parameter) for name, parameter in head.named_parameters())]
    return total.item(), {name: parameter.grad.numpy() for name, parameter in named if parameter.grad is not None}


def definition(
    directory: str, chosen: list[Row], *, dtype: torch.dtype = torch.float32, temperature: float = 1.0
) -> tuple[float, Arrays]:
    """The same objective the plain way: one process, one sequence at a time without padding, whole logits, log_softmax."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    total = torch.zeros((), dtype=dtype)
    for row in chosen:
        if len(row.ids) < 2:
            continue
        logprobs = (model(input_ids=row.ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        own = logprobs.gather(-1, row.ids[1:, None])[:, 0]
        total = total - (row.weights[1:].to(dtype) * (own + 0.1 * entropy)).sum()
    total.backward()
    return total.item(), {
        name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def worst(gradients: Arrays, reference: Arrays) -> float:
    """The largest per-parameter ||g - g'|| / ||g'||."""
    assert gradients.keys() == reference.keys()
    return max(
        float(np.linalg.norm(gradients[name].astype(np.float64) - true) / np.linalg.norm(true.astype(np.float64)))
        for name, true in reference.items()
    )


def start(
    directory: str, optimizer: OptimizerSpec | None = None, *, options: FsdpConfig | None = None, **model: Any
) -> FsdpBackend:
    """A backend over the default process group."""
    backend = FsdpBackend(options or FsdpConfig())
    environment = RankEnvironment(dist.get_rank(), dist.get_world_size(), "cpu", 0)
    backend.setup(ModelSpec(directory, **{"logits_per_chunk": 5 * VOCABULARY, **model}), optimizer or OptimizerSpec(), environment)
    return backend


def own_rows(chosen: list[Row], backend: FsdpBackend) -> list[Row]:
    """This data-parallel rank's share: consecutive rows."""
    share = len(chosen) // backend._topology.dp
    return chosen[backend.coords.dp * share : (backend.coords.dp + 1) * share]


def arrays(pairs: Iterator[tuple[str, torch.Tensor]]) -> Arrays:
    return {name: tensor.numpy().copy() for name, tensor in pairs}


def gradients_of(
    directory: str, *, sizes: tuple[int, ...], unscored: tuple[int, ...] = (), temperature: float = 1.0, **model: Any
) -> list[tuple[float, Arrays]]:
    """Per micro-batch size: this rank's part of the objective, and the gradient summed over ranks."""
    return _gradients_of(directory, cut, sizes, unscored, temperature, **model)


def packed_gradients_of(
    directory: str, *, sizes: tuple[int, ...], unscored: tuple[int, ...] = (), **model: Any
) -> list[tuple[float, Arrays]]:
    """The same from packed rows."""
    return _gradients_of(directory, pack, sizes, unscored, 1.0, **model)


def critic_gradients_of(
    directory: str, *needs: str, sizes: tuple[int, ...], unscored: tuple[int, ...] = (), **model: Any
) -> list[tuple[float, Arrays]]:
    """Per micro-batch size: this rank's part of `Critic`, and the gradient summed over ranks."""
    backend = start(directory, value_head=True, **model)
    results = []
    for size in sizes:
        output = backend.forward_backward(cut(own_rows(rows(unscored=unscored), backend), size), Critic(*needs))
        results.append((output.metrics["loss"].value, arrays(backend.gradients())))
        backend._optimizer.zero_grad()
    backend.close()
    return results


def critic_continued(directory: str, optimizer: OptimizerSpec, checkpoint: Path, target: Path) -> tuple[Any, Any]:
    """(losses, weights) of two more steps: uninterrupted, and by a fresh backend from the checkpoint between; then an export."""

    def learn(backend: FsdpBackend, steps: int) -> list[tuple[float, float]]:
        history = []
        for _ in range(steps):
            output = backend.forward_backward(cut(own_rows(rows(), backend), 2), Critic("logprobs", "values"))
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
    backend.forward_backward(cut(own_rows(rows(), backend), 2), Weighted())
    backend.optim_step()
    backend.forward_backward(cut(own_rows(rows(), backend), 2), Weighted())
    return arrays(backend.gradients())


def asks_for_values(directory: str) -> None:
    backend = start(directory)
    try:
        backend.forward(cut(own_rows(rows(), backend), 8), Critic("values"))
    finally:
        backend.close()


def _gradients_of(
    directory: str,
    layout: Callable[[list[Row], int], list[MicroBatch]],
    sizes: tuple[int, ...],
    unscored: tuple[int, ...],
    temperature: float,
    **model: Any,
) -> list[tuple[float, Arrays]]:
    backend = start(directory, **model)
    results = []
    for size in sizes:
        output = backend.forward_backward(
            layout(own_rows(rows(unscored=unscored), backend), size), Weighted(temperature=temperature)
        )
        results.append((output.metrics["loss"].value, arrays(backend.gradients())))
        backend._optimizer.zero_grad()
    backend.close()
    return results


def train(backend: FsdpBackend, steps: int, *, size: int = 2) -> list[tuple[float, float, float]]:
    """Per step: this rank's part of the objective, gradient norm, learning rate."""
    history = []
    for _ in range(steps):
        output = backend.forward_backward(cut(own_rows(rows(), backend), size), Weighted())
        step = backend.optim_step()
        history.append((output.metrics["loss"].value, step.grad_norm, step.learning_rate))
    return history


def trained(directory: str, optimizer: OptimizerSpec, steps: int, **model: Any) -> tuple[list[tuple[float, float, float]], Arrays]:
    backend = start(directory, optimizer, **model)
    return train(backend, steps), arrays(backend.weights())


def plain_adamw(
    directory: str, optimizer: OptimizerSpec, rates: tuple[float, ...]
) -> tuple[list[tuple[float, float, float]], Arrays]:
    """Loss, gradient norm and rate of a step at each of `rates`, then the weights, by plain torch: one process, whole logits.

    A large epsilon makes the update follow the gradient's scale, which AdamW would otherwise hide.
    """
    assert optimizer.epsilon >= 0.1
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    groups = [
        {"params": [parameter for parameter in model.parameters() if (parameter.ndim > 1) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, optimizer.weight_decay), (False, 0.0))
    ]
    plain = torch.optim.AdamW(groups, eps=optimizer.epsilon)
    history = []
    for rate in rates:
        total = torch.zeros(())
        for row in rows():
            if len(row.ids):
                logprobs = model(input_ids=row.ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
                score = logprobs.gather(-1, row.ids[1:, None])[:, 0] - 0.1 * (logprobs.exp() * logprobs).sum(-1)
                total = total - (row.weights[1:] * score).sum()
        plain.zero_grad()
        total.backward()
        assert optimizer.max_grad_norm is not None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
        for group in plain.param_groups:
            group["lr"] = rate
        plain.step()
        history.append((total.item(), norm.item(), rate))
    return history, {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def clipped_norms(directory: str, max_norm: float, options: FsdpConfig | None = None) -> tuple[float, float]:
    """The norm that clipping reports, and the norm it leaves, measured on whole gradients."""
    from skyrl_engine_fsdp.gradients import clip_gradients

    backend = start(directory, options=options)
    backend.forward_backward(cut(own_rows(rows(), backend), 2), Weighted())
    reported = clip_gradients(backend._parameters().values(), max_norm, torch.device("cpu"))
    return reported, float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in arrays(backend.gradients()).values())))


def continued(
    directory: str, optimizer: OptimizerSpec, checkpoint: Path, options: FsdpConfig | None = None, *, before: int, after: int
) -> tuple[Any, Any]:
    """(history, weights) of the last `after` steps: uninterrupted, and by a fresh backend from the checkpoint between."""
    first = start(directory, optimizer, options=options)
    train(first, before)
    first.save(checkpoint)
    uninterrupted = train(first, after), arrays(first.weights())
    second = start(directory, optimizer, options=options)
    torch.manual_seed(12345)  # whatever the state was, the checkpoint's counts
    np.random.seed(1)
    train(second, 1)
    second.load(checkpoint)
    return uninterrupted, (train(second, after), arrays(second.weights()))


def exported(directory: str, target: Path, options: FsdpConfig | None = None) -> tuple[Arrays, list[float]]:
    """Export after two steps; returns weights and the backend's own log-probabilities of the first row's scored tokens."""
    backend = start(directory, OptimizerSpec(learning_rate=1e-2), options=options)
    train(backend, 1)
    backend.forward(cut(own_rows(rows(), backend), 2), Weighted())  # gathered weights of before the step must not survive it
    train(backend, 1)
    backend.export(target)
    kept: list[float] = []

    class Keep(Weighted):
        def __call__(self, scores: Mapping[str, torch.Tensor], micro: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
            kept.extend(scores["logprobs"].tolist())
            return super().__call__(scores, micro)

    backend.forward([micro_batch(rows()[:1])], Keep())
    return arrays(backend.weights()), kept


def accumulated(
    directory: str, layout: Callable[[list[Row], int], list[MicroBatch]], options: FsdpConfig, **model: Any
) -> tuple[float, Arrays]:
    """This rank's part of the objective and the gradient, of two calls with two micro-batches each, by rows of different number."""
    backend = start(directory, options=options, **model)
    micro_batches = layout(own_rows(rows(), backend), 1)
    half = len(micro_batches) // 2
    outputs = [backend.forward_backward(part, Weighted()) for part in (micro_batches[:half], micro_batches[half:])]
    result = sum(output.metrics["loss"].value for output in outputs), arrays(backend.gradients())
    backend.close()
    return result


def spoiled(directory: str, options: FsdpConfig, *, by: str) -> tuple[str, bool, list[str]]:
    """How an optimizer step ends here, whether it left the weights alone, and the details, when rank 1 alone has a gradient that is no number.

    `by` "objective": its data-parallel rank computes it; else the name of a parameter of which rank 1 spoils its piece.
    """
    backend = start(directory, options=options)
    before = arrays(backend.weights())
    scale = float("nan") if by == "objective" and backend.coords.dp == 1 else 1.0
    backend.forward_backward(cut(own_rows(rows(), backend), 2), Weighted(scale))
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
    """How setting up ends; `forgotten`: parts whose name ends so are missing in the plan of the layers."""
    from skyrl_engine_fsdp.tensor_parallel import LayerPlan

    whole = LayerPlan.of

    def partial(config: Any) -> LayerPlan:
        styles = whole(config).styles
        return LayerPlan({name: style for name, style in styles.items() if not forgotten or not name.endswith(forgotten)})

    with patch.object(LayerPlan, "of", partial):
        try:
            start(directory, options=options, **model).close()
        except EngineError as error:
            return str(error)
    return "set up"


def scores_of_parts(rule: LogitRule, temperature: float, asked: tuple[str, ...]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Scores and gradients of random logits of all tokens: [of the whole, of this rank's part], float64."""
    draw = torch.Generator().manual_seed(0)
    raw, upstream = (
        torch.randn(7, 10, generator=draw, dtype=torch.float64) * 3,
        torch.randn(len(asked), 7, generator=draw, dtype=torch.float64),
    )
    labels = torch.tensor([0, 9, 4, 5, 5, 2, 7])
    width = 10 // dist.get_world_size()
    own = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
    whole = Score(rule, temperature, asked)
    part = VocabularyParallelScore(dist.group.WORLD, own.start, rule, temperature, asked)
    expected = [*whole(raw, labels), whole.gradient(raw.clone(), labels, list(upstream))[:, own]]
    got = [*part(raw[:, own], labels), part.gradient(raw[:, own].clone(), labels, list(upstream))]
    return [each.detach().numpy() for each in expected], [each.detach().numpy() for each in got]


def saved_by(directory: str, optimizer: OptimizerSpec, checkpoint: Path, options: FsdpConfig) -> tuple[Any, Arrays, Arrays]:
    """A checkpoint after two steps: the history of two steps more, and the weights and moments that were saved."""
    backend = start(directory, optimizer, options=options)
    train(backend, 2)
    backend.save(checkpoint)
    weights, moments = arrays(backend.weights()), moments_of(backend)
    return train(backend, 2), weights, moments


def resumed_by(directory: str, optimizer: OptimizerSpec, checkpoint: Path, options: FsdpConfig) -> tuple[Any, Arrays, Arrays]:
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
        losses.append(backend.forward_backward(cut(own_rows(rows(), backend), 2), Weighted()).metrics["loss"].value)
    return losses


def placed(directory: str, *, loose: bool) -> tuple[bool, list[str], Arrays, Arrays]:
    """Whether this rank read weights, names of tensors left without values, weights, and buffers; `loose` adds an unfillable tensor."""
    from skyrl_engine.modeling import placement

    read: list[str] = []
    whole, skeleton = placement.load_scorer, placement.load_skeleton

    def load_scorer(spec: ModelSpec, **options: Any) -> Any:
        read.append(spec.path)
        return whole(spec, **options)

    def load_skeleton(spec: ModelSpec, **options: Any) -> Any:
        model, scorer = skeleton(spec, **options)
        if loose:
            scorer.decoder.remembered = torch.zeros(3, device="meta")
        return model, scorer

    with patch.multiple(placement, load_scorer=load_scorer, load_skeleton=load_skeleton):
        backend = start(directory)
    empty = [name for name, tensor in backend._model.state_dict().items() if tensor.is_meta]
    buffers = {name: buffer.numpy().copy() for name, buffer in backend._model.named_buffers()}
    return bool(read), empty, arrays(backend.weights()), buffers


def outcome(directory: str) -> str:
    """How setting up ends on this rank."""
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
