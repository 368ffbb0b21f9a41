"""One cheap proof at load: the scorer says what the model's own forward says."""

from typing import Any

import torch

from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.scorer import Scorer

ROWS, WIDTH = 2, 6


@torch.no_grad()
def check_parity(model: Any, scorer: Scorer, *, name: str) -> None:
    """Compare log-probabilities of a few tokens between `model`'s own forward and `scorer`, before any sharding.

    Raises ModelError: the model does something to its hidden states or logits that the scorer does not know of, and training it would
    silently optimise another function. The tolerance, relative to 1 + |logprob|, is 1e-4 in float32 and 1e-9 in float64: both sides do the
    same arithmetic and differ in the order of sums at most.
    """
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0])
    ids = torch.randint(0, vocabulary, (ROWS, WIDTH), generator=generator).to(parameter.device)
    mask = torch.ones_like(ids)
    training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        own = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()
        positions = (torch.arange(ROWS)[:, None] * WIDTH + torch.arange(WIDTH - 1)).flatten().to(ids.device)
        scored = scorer({"input_ids": ids, "attention_mask": mask}, positions, ids[:, 1:].flatten())["logprobs"]
    finally:
        model.train(training)
    tolerance = 1e-9 if scored.dtype == torch.float64 else 1e-4
    difference = ((scored - own).abs() / (1 + own.abs())).max().item()
    if not difference <= tolerance:  # also true for NaN
        raise ModelError(
            f"{name} ({type(model).__name__}) computes logits that differ from its decoder and head by {difference:.1e}",
            remedy="Use a model whose logits are its head's output, scaled or soft-capped at most; no other is supported",
        )
