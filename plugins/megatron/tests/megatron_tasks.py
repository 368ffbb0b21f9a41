"""Tasks of ranks in the tests: importable by name, because ranks are spawned."""

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen

from skyrl_engine import ModelError
from skyrl_engine.contracts import AdamWSettings, LoraConfig, ModelConfig, RankEnvironment, RankOutput
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.testing.backends.batches import Arrays, Document, WeightedObjective, build_packed, build_padded, documents
from skyrl_engine_megatron import pipeline
from skyrl_engine_megatron.backend import MegatronBackend
from skyrl_engine_megatron.gradients import clip, sum_over_ranks
from skyrl_engine_megatron.plugin import MegatronConfig

VOCABULARY = 250  # divisible by 2 and not by 4
ROWS = {"padded": build_padded, "packed": build_packed}
PAIRS = {
    "tp2": MegatronConfig(tensor_parallel=2),
    "tp2-whole-sequences": MegatronConfig(tensor_parallel=2, sequence_parallel=False),
    "cp2": MegatronConfig(context_parallel=2),
    "pp2": MegatronConfig(pipeline_parallel=2),
    "pp2-interleaved": MegatronConfig(pipeline_parallel=2, virtual_pipeline=2),
    "dp2": MegatronConfig(),
    "dp2-whole-optimizer": MegatronConfig(distributed_optimizer=False),
}
"""Every layout of two ranks."""


def save_tiny(directory: Path, family: str, *, tied: bool, **options: Any) -> str:
    """A random four-layer model of the family, saved as a Hugging Face directory."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        # a token of the data, whose embedding must not learn from being read
        "pad_token_id": int(documents(VOCABULARY)[0].ids[3]),
    }
    write_model(directory, family, tie_word_embeddings=tied, **{**sizes, **options})
    make_parts_differ(directory)
    return str(directory)


def start(
    directory: str,
    optimizer: AdamWSettings | None = None,
    *,
    options: MegatronConfig | None = None,
    learns: bool = True,
    **model: Any,
) -> MegatronBackend:
    """A backend over the default process group."""
    backend = MegatronBackend(options or MegatronConfig())
    environment = RankEnvironment(dist.get_rank(), dist.get_world_size(), "cpu", 0)
    spec = ModelConfig(directory, **{"logits_per_chunk": 5 * VOCABULARY, **model})
    backend.setup(spec, (optimizer or AdamWSettings()) if learns else None, environment)
    return backend


def own(chosen: Sequence[Document], backend: MegatronBackend) -> Sequence[Document]:
    """This data-parallel rank's share: consecutive documents."""
    share = len(chosen) // backend._config.topology(dist.get_world_size()).dp
    return chosen[backend.coords.dp * share : (backend.coords.dp + 1) * share]


def arrays(pairs: Iterator[tuple[str, torch.Tensor]]) -> Arrays:
    return {name: tensor.numpy().copy() for name, tensor in pairs}


@frozen(eq=False)
class Case:
    """Cut of the documents: into rows, micro-batches of `size` rows, and `calls`, which share the documents."""

    rows: str = "padded"
    size: int = 2
    calls: int = 1
    unscored: tuple[int, ...] = ()
    temperature: float = 1.0
    scale: float = 1.0
    needs: tuple[str, ...] = ("logprobs", "entropy")


@frozen(eq=False)
class Passed:
    """A rank's result of one case: outputs of every call, the gradient summed over ranks, outputs of an evaluation of the whole."""

    outputs: list[RankOutput]
    gradients: Arrays
    evaluated: RankOutput


def run_passes(directory: str, options: MegatronConfig, cases: Sequence[Case], **model: Any) -> list[Passed]:
    """Every case, one after the other, with one model."""
    backend = start(directory, options=options, **model)
    results = []
    try:
        for case in cases:
            chosen = own(documents(VOCABULARY, unscored=case.unscored), backend)
            objective = WeightedObjective(temperature=case.temperature, scale=case.scale, needs=case.needs)
            share = -(-len(chosen) // case.calls)
            parts = [chosen[start : start + share] for start in range(0, len(chosen), share)]
            outputs = [backend.forward_backward(ROWS[case.rows](part, case.size), objective) for part in parts]
            gradients = arrays(backend.gradients())
            results.append(Passed(outputs, gradients, backend.forward(ROWS[case.rows](chosen, case.size), objective)))
            backend.zero_grad()
    finally:
        backend.close()
    return results


def learn(
    backend: MegatronBackend, steps: int, *, rows: str = "padded", size: int = 2, needs: tuple[str, ...] = ("logprobs", "entropy")
) -> list[tuple[float, float, float]]:
    """Per step: this rank's part of the objective (0 where it collects nothing), gradient norm, learning rate."""
    history = []
    for _ in range(steps):
        batch = ROWS[rows](own(documents(VOCABULARY), backend), size)
        output = backend.forward_backward(batch, WeightedObjective(needs=needs))
        step = backend.optim_step()
        history.append((output.metrics["loss"].value if "loss" in output.metrics else 0.0, step.grad_norm, step.learning_rate))
    return history


def train_from_start(
    directory: str, options: MegatronConfig, optimizer: AdamWSettings, steps: int, **model: Any
) -> tuple[list[tuple[float, float, float]], Arrays]:
    """History and weights after `steps` steps."""
    with closing(start(directory, optimizer, options=options, **model)) as backend:
        return learn(backend, steps), arrays(backend.weights())


def clip_norms(directory: str, options: MegatronConfig, max_norm: float) -> tuple[float, float]:
    """The norm that is reported, and the norm that the gradients have afterwards, measured on whole ones."""
    with closing(start(directory, options=options)) as backend:
        backend.forward_backward(build_padded(own(documents(VOCABULARY), backend), 2), WeightedObjective())
        sum_over_ranks(backend._learned)
        reported = clip(backend._state, max_norm)
        left = arrays(backend._state.everywhere(lambda piece: piece.gradient))
        return reported, float(np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in left.values())))


class NotFinite(WeightedObjective):
    """Its gradient is infinite."""

    def __call__(self, scores: Any, micro_batch: Any) -> Any:
        total, output = super().__call__(scores, micro_batch)
        return total * float("inf"), output


def not_finite(directory: str, options: MegatronConfig) -> tuple[str, bool, list[tuple[float, float, float]], Any]:
    """End of a step with an infinite gradient; whether it left weights alone; what two steps after it, and without it, give."""
    with closing(start(directory, options=options)) as backend:
        before = arrays(backend.weights())
        backend.forward_backward(build_padded(own(documents(VOCABULARY), backend), 2), NotFinite())
        try:
            backend.optim_step()
            said = "a step"
        except ModelError as error:
            said = str(error)
        after = arrays(backend.weights())
        same = all(np.array_equal(before[name], after[name]) for name in before)
        history = learn(backend, 2)
    with closing(start(directory, options=options)) as undisturbed:
        return said, same, history, learn(undisturbed, 2)


class SequenceObjective(WeightedObjective):
    """The sum over sequences of the squared mean of a sequence's log-probabilities: no token's gradient is known without the others."""

    def __call__(self, scores: Any, micro_batch: Any) -> Any:
        _, output = super().__call__(scores, micro_batch)
        counts = [int((document.weights != 0).sum()) for document in micro_batch.samples]
        means = [logprobs.mean() for logprobs in scores["logprobs"].split(counts) if len(logprobs)]
        return torch.stack([mean.square() for mean in [*means, scores["logprobs"].new_zeros(())]]).sum(), output


def sequence_loss_passed(directory: str, options: MegatronConfig, *, torn: bool = False) -> Arrays:
    """Gradients of SequenceObjective; `torn`: where every context-parallel rank knows the scores of its own tokens alone."""
    with closing(start(directory, options=options)) as backend:
        with patch.object(pipeline, "gather_scores", own_scores_alone) if torn else nullcontext():
            for rows in ROWS.values():
                backend.forward_backward(rows(own(documents(VOCABULARY), backend), 2), SequenceObjective())
        return arrays(backend.gradients())


def own_scores_alone(own_M: torch.Tensor, places_M: torch.Tensor, count: int, _group: object) -> torch.Tensor:
    return own_M.new_zeros(count).index_copy(0, places_M, own_M)


def inspect_between(directory: str, options: MegatronConfig) -> tuple[Arrays, Arrays]:
    """The gradient of two calls; and the same where somebody has looked at it after the first."""
    results = []
    for looks in (False, True):
        with closing(start(directory, options=options)) as backend:
            chosen = own(documents(VOCABULARY), backend)
            for part in (chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]):
                backend.forward_backward(build_packed(part, 2), WeightedObjective())
                if looks:
                    arrays(backend.gradients())
            results.append(arrays(backend.gradients()))
    return results[0], results[1]


def score_rows(directory: str, options: MegatronConfig, *, rows: str, size: int, learns: bool = True, **model: Any) -> RankOutput:
    """This rank's outputs of one evaluation."""
    with closing(start(directory, options=options, learns=learns, **model)) as backend:
        return backend.forward(ROWS[rows](own(documents(VOCABULARY), backend), size), WeightedObjective())


def continue_training(
    directory: str, options: MegatronConfig, optimizer: AdamWSettings, checkpoint: Path, *, before: int, after: int, **model: Any
) -> tuple[Any, Any]:
    """(history, weights) of the last `after` steps: uninterrupted, and by a fresh backend from the checkpoint between."""
    with closing(start(directory, optimizer, options=options, **model)) as first:
        learn(first, before)
        first.save(checkpoint)
        uninterrupted = learn(first, after), arrays(first.weights())
    with closing(start(directory, optimizer, options=options, **model)) as second:
        learn(second, 1)
        dist.barrier()
        second.load(checkpoint)
        return uninterrupted, (learn(second, after), arrays(second.weights()))


def save_checkpoint(
    directory: str, options: MegatronConfig, optimizer: AdamWSettings, checkpoint: Path, *, before: int, after: int
) -> Any:
    """Learn, save, and learn on; (history, weights) of the last `after` steps."""
    with closing(start(directory, optimizer, options=options)) as backend:
        learn(backend, before)
        backend.save(checkpoint)
        return learn(backend, after), arrays(backend.weights())


def resume_checkpoint(directory: str, options: MegatronConfig, optimizer: AdamWSettings, checkpoint: Path, *, after: int) -> Any:
    """(history, weights) of `after` steps from a checkpoint that another layout wrote."""
    with closing(start(directory, optimizer, options=options)) as backend:
        backend.load(checkpoint)
        return learn(backend, after), arrays(backend.weights())


def round_on_ranks(directory: str, options: MegatronConfig, dtype: str) -> tuple[Arrays, Arrays]:
    """Weights after two steps, rounded to bfloat16 after they were gathered, and as `weights_in` gives them; both in float32."""
    with closing(start(directory, AdamWSettings(learning_rate=1e-2), options=options, dtype=dtype)) as backend:
        learn(backend, 2)
        due = arrays((name, weight.bfloat16().float()) for name, weight in backend.weights())
        rounded = dict(backend.weights_in(torch.bfloat16))
        assert {weight.dtype for weight in rounded.values()} == {torch.bfloat16}
        return due, arrays((name, weight.float()) for name, weight in rounded.items())


def export_weights(directory: str, options: MegatronConfig, target: Path) -> tuple[Arrays, RankOutput]:
    """Export after two steps; whole weights and this rank's scores."""
    with closing(start(directory, AdamWSettings(learning_rate=1e-2), options=options)) as backend:
        learn(backend, 2)
        backend.export(target)
        output = backend.forward(build_padded(own(documents(VOCABULARY), backend), 3), WeightedObjective())
        return arrays(backend.weights()), output


def train_critic(
    directory: str, options: MegatronConfig, optimizer: AdamWSettings, checkpoint: Path, target: Path
) -> tuple[tuple[Any, Arrays], tuple[Any, Arrays]]:
    """(history, weights) of the last step of a model with a value head: uninterrupted, and from a checkpoint before it; and its export."""
    needs = ("logprobs", "values")
    with closing(start(directory, optimizer, options=options, value_head=True)) as first:
        learn(first, 2, needs=needs)
        first.save(checkpoint)
        uninterrupted = learn(first, 1, needs=needs), arrays(first.weights())
        first.export(target)
    with closing(start(directory, optimizer, options=options, value_head=True)) as second:
        dist.barrier()
        second.load(checkpoint)
        return uninterrupted, (learn(second, 1, needs=needs), arrays(second.weights()))


def train_adapters(
    directory: str, options: MegatronConfig, optimizer: AdamWSettings, checkpoint: Path, target: Path, lora: LoraConfig
) -> tuple[tuple[Any, Arrays], tuple[Any, Arrays], RankOutput]:
    """(history, merged weights) of the last step, uninterrupted and from a checkpoint before it; this rank's scores; and their export."""
    with closing(start(directory, optimizer, options=options, lora=lora)) as first:
        learn(first, 2)
        first.save(checkpoint)
        uninterrupted = learn(first, 1), arrays(first.weights())
        first.export(target)
        output = first.forward(build_padded(own(documents(VOCABULARY), first), 3), WeightedObjective())
    with closing(start(directory, optimizer, options=options, lora=lora)) as second:
        dist.barrier()
        second.load(checkpoint)
        return uninterrupted, (learn(second, 1), arrays(second.weights())), output


def draw_adapters(directory: str, options: MegatronConfig, lora: LoraConfig) -> Arrays:
    """New adapters."""
    with closing(start(directory, options=options, lora=lora)) as backend:
        return arrays(backend._state.everywhere(lambda piece: piece.master))


def weights_of(directory: str, checkpoint: Path, **model: Any) -> Arrays:
    """Weights of a checkpoint for scoring alone, those in bfloat16 as float32, which NumPy has."""
    with closing(start(directory, learns=False, **model)) as backend:
        backend.load(checkpoint)
        return arrays((name, tensor.float() if tensor.dtype == torch.bfloat16 else tensor) for name, tensor in backend.weights())


def set_up(directory: str, options: MegatronConfig, target: Path | None = None, **model: Any) -> None:
    """Start, export to `target` if there is one, and close."""
    with closing(start(directory, options=options, **model)) as backend:
        if target is not None:
            backend.export(target)
