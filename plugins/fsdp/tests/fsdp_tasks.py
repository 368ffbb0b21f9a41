"""What ranks run in the tests: importable by name, because ranks are spawned. Also the plain one-process definition they are compared with."""

import multiprocessing
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from skyrl_engine.contracts.backend import MicroBatch, ModelSpec, OptimizerSpec, RankEnvironment
from skyrl_engine.contracts.outputs import Metric, RankOutput
from skyrl_engine.errors import EngineError
from skyrl_engine_fsdp.backend import FsdpBackend
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
    return MicroBatch(inputs, torch.cat(positions), torch.cat(labels), (), torch.cat(weights))


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
    lengths = tuple(np.array([len(row.ids) for row in one], dtype=np.int64) for one in bins)
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


def own_rows(chosen: list[Row]) -> list[Row]:
    """This rank's share: consecutive rows."""
    share = len(chosen) // dist.get_world_size()
    return chosen[dist.get_rank() * share : (dist.get_rank() + 1) * share]


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
        output = backend.forward_backward(layout(own_rows(rows(unscored=unscored)), size), Weighted(temperature=temperature))
        results.append((output.metrics["loss"].value, arrays(backend.gradients())))
        backend._optimizer.zero_grad()
    backend.close()
    return results


def train(backend: FsdpBackend, steps: int, *, size: int = 2) -> list[tuple[float, float, float]]:
    """Per step: this rank's part of the objective, gradient norm, learning rate."""
    history = []
    for _ in range(steps):
        output = backend.forward_backward(cut(own_rows(rows()), size), Weighted())
        step = backend.optim_step()
        history.append((output.metrics["loss"].value, step.grad_norm, step.learning_rate))
    return history


def trained(directory: str, optimizer: OptimizerSpec, steps: int, **model: Any) -> tuple[list[tuple[float, float, float]], Arrays]:
    backend = start(directory, optimizer, **model)
    return train(backend, steps), arrays(backend.weights())


def clipped_norms(directory: str, max_norm: float) -> tuple[float, float]:
    """The norm that clipping reports, and the norm it leaves, measured on whole gradients."""
    from skyrl_engine_fsdp.gradients import clip_gradients

    backend = start(directory)
    backend.forward_backward(cut(own_rows(rows()), 2), Weighted())
    reported = clip_gradients(backend._parameters().values(), max_norm)
    return reported, float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in arrays(backend.gradients()).values())))


def continued(directory: str, optimizer: OptimizerSpec, checkpoint: Path, *, before: int, after: int) -> tuple[Any, Any]:
    """(history, weights) of the last `after` steps: uninterrupted, and by a fresh backend from the checkpoint between."""
    first = start(directory, optimizer)
    train(first, before)
    first.save(checkpoint)
    uninterrupted = train(first, after), arrays(first.weights())
    second = start(directory, optimizer)
    torch.manual_seed(12345)  # whatever the state was, the checkpoint's counts
    np.random.seed(1)
    train(second, 1)
    second.load(checkpoint)
    return uninterrupted, (train(second, after), arrays(second.weights()))


def exported(directory: str, target: Path) -> tuple[Arrays, list[float]]:
    """Export after two steps; returns weights and the backend's own log-probabilities of the first row's scored tokens."""
    backend = start(directory, OptimizerSpec(learning_rate=1e-2))
    train(backend, 1)
    backend.forward(cut(own_rows(rows()), 2), Weighted())  # gathered weights of before the step must not survive it
    train(backend, 1)
    backend.export(target)
    kept: list[float] = []

    class Keep(Weighted):
        def __call__(self, scores: Mapping[str, torch.Tensor], micro: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
            kept.extend(scores["logprobs"].tolist())
            return super().__call__(scores, micro)

    backend.forward([micro_batch(rows()[:1])], Keep())
    return arrays(backend.weights()), kept


def placed(directory: str, *, loose: bool) -> tuple[bool, list[str], Arrays, Arrays]:
    """Whether this rank read weights, names of tensors left without values, weights, and buffers; `loose` adds an unfillable tensor."""
    from skyrl_engine_fsdp import placement

    read: list[str] = []
    whole, skeleton = placement.load_scorer, placement.load_skeleton

    def load_scorer(spec: ModelSpec) -> Any:
        read.append(spec.path)
        return whole(spec)

    def load_skeleton(spec: ModelSpec) -> Any:
        model, scorer = skeleton(spec)
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


class World:
    """`size` spawned ranks in one gloo group; `run` calls a function of this module on all of them at once."""

    def __init__(self, size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, size, port), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Results by rank. A rank's EngineError is raised here as it was; anything else fails with its traceback."""
        for pipe in self._pipes:
            pipe.send((function, arguments, keywords))
        replies = []
        for pipe in self._pipes:
            assert pipe.poll(120), "a rank did not answer"
            replies.append(pipe.recv())
        for kind, value in replies:
            if kind == "engine error":
                raise value
            assert kind == "result", value
        return [value for _, value in replies]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()


@contextmanager
def inline_world() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    while (task := pipe.recv()) is not None:
        function, arguments, keywords = task
        try:
            pipe.send(("result", function(*arguments, **keywords)))
        except EngineError as error:
            pipe.send(("engine error", error))
        except Exception:  # noqa: BLE001 - reported to the test
            pipe.send(("failure", traceback.format_exc()))
    dist.destroy_process_group()
