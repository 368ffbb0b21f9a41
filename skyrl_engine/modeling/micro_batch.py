"""One micro-batch through a scorer, and its gradient's way back: what every backend over Hugging Face models does alike."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from skyrl_engine.contracts.kinds.backend import MicroBatch, Objective
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.modeling.images import ImageTokens
from skyrl_engine.modeling.model_inputs import check_tokens, model_inputs


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
) -> dict[str, Tensor]:
    """The scores that `objective` needs, each [n] on `device`; `call` is the scorer or what wraps it.

    `images` is how the model takes images, as for `model_inputs`. Raises UnsupportedError for scores beyond `computes`, DataError for tokens
    outside of the vocabulary, and what `model_inputs` raises.
    """
    unknown = objective.needs - computes
    if unknown:
        raise UnsupportedError(
            f"the loss needs {', '.join(sorted(unknown))}, which the model on the {backend} backend does not compute",
            remedy="Set model.value_head = true" if unknown == {"values"} else "Choose another loss or backend",
        )
    check_tokens(micro_batch, vocabulary)
    arguments = model_inputs(micro_batch, images=images)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    return call(
        {name: moved(tensor) for name, tensor in arguments.inputs.items()},
        moved(arguments.positions),
        moved(micro_batch.labels),
        temperature=objective.temperature,
        needs=objective.needs,
        segments=arguments.segments,
    )


def differentiable(total: Tensor, scores: Mapping[str, Tensor]) -> Tensor:
    """`total`, joined to the scores where it does not depend on them: backward must run all the same, other ranks wait in its collectives."""
    if total.requires_grad:
        return total
    return total + torch.stack([0.0 * each.nan_to_num(0.0, 0.0, 0.0).sum() for each in scores.values()]).sum()


def gradient_not_finite(step: int, norm: float, rank: int, names: Sequence[str]) -> ModelError:
    """The error for optimizer step `step`, counted from 1, that was not taken; `names` are parameters whose gradient is not finite."""
    return ModelError(
        f"the gradient of optimizer step {step} is not finite (norm {norm})",
        remedy="Lower optimizer.learning_rate or inspect this step's samples; the weights are those of the step before",
        details=[f"rank {rank}: the gradient of {name} is not finite" for name in names[:5]],
    )
