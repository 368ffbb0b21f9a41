"""A cheap check at load: the scorer gives the same log-probabilities as the model's own forward."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.extras import IMAGE_GRID, PIXEL_VALUES, TOKEN_TYPES
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.images import IMAGE
from skyrl_engine.modeling.model_inputs import model_inputs
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.vision import ImageDecoder

ROWS, WIDTH = 2, 6

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Tolerances by the precision that computes, relative to 1 + |logprob|."""


def random_tokens(model: Any, decoder: nn.Module, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw token ids int64[shape], equal for every copy of a model; none is the image token."""
    vocabulary = min(model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0])
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    return torch.where(ids == decoder.tokens.token, (ids + 1) % vocabulary, ids) if isinstance(decoder, ImageDecoder) else ids


@frozen(eq=False)
class Probe:
    """A few tokens to test a model with: ids int64[rows, width], and the scored flat positions, all but the last of each row.

    `own_inputs` are the arguments of the model itself, `decoder_inputs` those of its decoder, with position ids if there are images.
    """

    ids: Tensor
    positions: Tensor
    own_inputs: Mapping[str, Tensor]
    decoder_inputs: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: Any, decoder: nn.Module, device: torch.device) -> "Probe":
        """Make a probe of text, the same for every copy of a model."""
        ids = random_tokens(model, decoder, (ROWS, WIDTH), torch.Generator().manual_seed(0)).to(device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return cls(ids, _all_but_the_last(device), inputs, inputs)

    @classmethod
    def with_images(cls, model: Any, decoder: ImageDecoder, device: torch.device) -> "Probe":
        """Make a probe with an image of two tokens in its first row; decoder and model each compute positions in their own way."""
        tokens, generator = decoder.tokens, torch.Generator().manual_seed(0)
        ids = random_tokens(model, decoder, (ROWS, WIDTH), generator)
        ids[0, 2:4] = tokens.token
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), TOKEN_TYPES: IMAGE * (ids == tokens.token).int()}
        grid = torch.tensor([[1, tokens.merge, 2 * tokens.merge]])
        patches = int(grid.prod())
        inputs |= {IMAGE_GRID: grid, PIXEL_VALUES: torch.randn(patches, tokens.patch, generator=generator)}
        offsets = {IMAGE_GRID: offsets_of([1, 0]), PIXEL_VALUES: offsets_of([patches, 0])}
        lengths = Ragged.from_list([[WIDTH]] * ROWS, np.int64)
        nothing = torch.zeros(0, dtype=torch.int64)
        batch = MicroBatch(inputs, nothing, nothing, lengths, None, ragged_offsets=offsets)
        decoder_inputs = model_inputs(batch, images=tokens).inputs
        return cls(ids.to(device), _all_but_the_last(device), _move(inputs, device), _move(decoder_inputs, device))

    def logprobs(self, scorer: Scorer) -> Tensor:
        """Return the scorer's log-probabilities of the tokens, [rows * (width - 1)]."""
        scores: dict[str, Tensor] = scorer(self.decoder_inputs, self.positions, self.ids[:, 1:].flatten())
        return scores["logprobs"]

    def own_logprobs(self, model: Any) -> Tensor:
        """Return the log-probabilities of the tokens by the model's own forward."""
        logits = model(**self.own_inputs, use_cache=False).logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits[:, :-1].log_softmax(-1).gather(-1, self.ids[:, 1:, None]).flatten()  # type: ignore[no-any-return] # transformers leaves it untyped


def _all_but_the_last(device: torch.device) -> Tensor:
    return (torch.arange(ROWS, device=device)[:, None] * WIDTH + torch.arange(WIDTH - 1, device=device)).flatten()


def _move(inputs: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


@torch.no_grad()
def check_parity(model: Any, scorer: Scorer, *, name: str) -> None:
    """Compare log-probabilities of a few tokens, and of an image, between `model`'s own forward and `scorer`, before any sharding.

    Raises ModelError if they differ: the model then changes its hidden states or logits in a way that the scorer does not know, and training
    would silently optimise another function. The tolerance, relative to 1 + |logprob|, is 1e-4 in float32 and 1e-9 in float64, because both
    sides do the same arithmetic and differ in the order of sums at most; in bfloat16, whose logits keep 8 bits, it is 5e-2.
    """
    training = model.training
    model.eval()
    try:
        for probe in list_probes(model, scorer.decoder, next(model.parameters()).device):
            own, scored = probe.own_logprobs(model), probe.logprobs(scorer)
            head = scorer.head.linear.weight.dtype
            tolerance = _TOLERANCES[head]
            difference = ((scored - own).abs() / (1 + own.abs())).max().item()
            if not difference <= tolerance:  # also true for NaN
                raise ModelError(
                    f"{name} ({type(model).__name__}) computes logits that differ from its decoder and head by {difference:.1e}",
                    remedy="Use a model whose logits are its head's output, scaled or soft-capped at most; no other is supported",
                )
    finally:
        model.train(training)


def list_probes(model: Any, decoder: nn.Module, device: torch.device) -> Iterator[Probe]:
    """Yield a probe of text, and one with an image for a model that takes images."""
    yield Probe.of(model, decoder, device)
    if isinstance(decoder, ImageDecoder):
        yield Probe.with_images(model, decoder, device)
