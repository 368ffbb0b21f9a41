"""Score one micro-batch and prepare its backward pass, for every backend over Hugging Face models."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from attrs import evolve
from torch import Tensor

from skyrl_engine.contracts.kinds.backend import EmbeddingNoise, MicroBatch, Objective
from skyrl_engine.contracts.kinds.needs import asks_a_teacher, model_score
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.modeling.context_parallel import ContextRanks, DividedSegments, divide_row
from skyrl_engine.modeling.context_scores import ScoredPart
from skyrl_engine.modeling.images import ImageTokens
from skyrl_engine.modeling.model_inputs import check_tokens, model_inputs
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.teaching import HIDDEN_STATES


def score(
    call: Callable[..., dict[str, Tensor]],
    micro_batch: MicroBatch,
    objective: Objective,
    *,
    computes: frozenset[str],
    vocabulary: int,
    device: torch.device,
    backend: str,
    images: ImageTokens | None = None,
    one_row: bool = False,
    context: ContextRanks | None = None,
) -> dict[str, Tensor]:
    """Return the scores that `objective` needs, each [n] on `device`; `call` is the scorer or a wrapper around it.

    `images` and `one_row` are those of `model_inputs`. With `context` this rank computes its share of the tokens, and all ranks of it get all
    scores; they must call this with the same micro-batch. Raises UnsupportedError for scores beyond `computes`, DataError for
    tokens outside of the vocabulary, and what `model_inputs` raises.
    """
    unknown = {need for need in objective.needs if model_score(need) not in computes}
    if unknown:
        raise UnsupportedError(
            f"the loss needs {', '.join(sorted(unknown))}, which the model on the {backend} backend does not compute",
            remedy="Set model.value_head = true" if unknown == {"values"} else "Choose another loss or backend",
        )
    if micro_batch.teacher is None and asks_a_teacher(objective.needs):
        raise UnsupportedError(
            "the loss compares the model with a teacher, and the micro-batch comes without what a teacher knows of it",
            remedy="Add a frozen model of the name teacher, or choose another loss",
        )
    check_tokens(micro_batch, vocabulary)
    return _call_scorer(
        call,
        micro_batch,
        needs=objective.needs,
        temperature=objective.temperature,
        device=device,
        images=images,
        one_row=one_row,
        context=context,
    )


def compute_hidden_states(
    call: Callable[..., dict[str, Tensor]],
    scorer: Scorer,
    micro_batch: MicroBatch,
    *,
    vocabulary: int,
    device: torch.device,
    images: ImageTokens | None = None,
    context: ContextRanks | None = None,
) -> Tensor:
    """Return a frozen model's hidden states [n, h] at a micro-batch's positions, without gradients and in evaluation mode.

    Arguments are those of `score`; `scorer` is what `call` is or wraps. Raises DataError for tokens outside of the vocabulary.
    """
    check_tokens(micro_batch, vocabulary)
    micro_batch = evolve(micro_batch, noise=None)
    scorer.eval()
    with torch.no_grad():
        scores = _call_scorer(
            call,
            micro_batch,
            needs=(HIDDEN_STATES,),
            temperature=1.0,
            device=device,
            images=images,
            one_row=scorer.one_row,
            context=context,
        )
    return scores[HIDDEN_STATES]


def _call_scorer(
    call: Callable[..., dict[str, Tensor]],
    micro_batch: MicroBatch,
    *,
    needs: Collection[str],
    temperature: float,
    device: torch.device,
    images: ImageTokens | None,
    one_row: bool,
    context: ContextRanks | None,
) -> dict[str, Tensor]:
    """Call a scorer on a micro-batch's inputs, on `device`."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    arguments = model_inputs(micro_batch, one_row=one_row or context is not None, images=images)
    part = None
    if context is not None:
        arguments, places = divide_row(arguments, context, images)
        part = ScoredPart.of(micro_batch, places, context, move)
        micro_batch = part.micro_batch
    mask, noise, segments = arguments.inputs.get("attention_mask"), arguments.noise, arguments.segments
    if isinstance(segments, DividedSegments) and segments.order is not None:
        segments = evolve(segments, order=move(segments.order))
    scores = call(
        {name: move(tensor) for name, tensor in arguments.inputs.items()},
        move(arguments.positions),
        move(micro_batch.labels),
        temperature=temperature,
        needs=needs,
        segments=segments,
        padded=None if mask is None else not mask.all(),  # read here, on the CPU, and not on the device
        candidates={column: move(ids) for column, ids in micro_batch.candidates.items()},
        **({} if micro_batch.teacher is None else {"teacher": micro_batch.teacher}),
        **({} if noise is None else {"noise": EmbeddingNoise(noise.alpha, move(noise.keys), move(noise.lengths))}),
        **({} if part is None or part.spread is None else {"spread": part.spread}),
    )
    return scores if part is None else part.join(scores)


def differentiable(total: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
    """Return `total`, connected to the scores if it does not depend on them: other ranks wait in the collectives of backward."""
    if total.requires_grad:
        return total
    return total + torch.stack([0.0 * score.nan_to_num(0.0, 0.0, 0.0).sum() for score in scores.values()]).sum()


def gradient_not_finite(step: int, norm: float, rank: int, names: Sequence[str]) -> ModelError:
    """Return the error for optimizer step `step`, counted from 1, that was not taken; the gradients of `names` are not finite."""
    return ModelError(
        f"the gradient of optimizer step {step} is not finite (norm {norm})",
        remedy="Lower optimizer.learning_rate or inspect this step's samples; the weights are those of the step before",
        details=[f"rank {rank}: the gradient of {name} is not finite" for name in names[:5]],
    )
