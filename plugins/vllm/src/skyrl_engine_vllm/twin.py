"""The present weights on the side of the run: what servers are given, again too, and what they are compared with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve

from skyrl_engine.contracts import GeneratorStart, LoraConfig, WeightForm, WeightSource
from skyrl_engine.modeling.sampler_model import fill, iterate_stored_weights, load_sampler_model

PROOF_TOKENS = 160
"""Tokens of the fixed prompt: more than a block of a prefix cache holds."""


class Twin:
    """A plain transformers model on the CPU with the weights that are published, in the precision that the run computes in.

    It costs the memory of the model once, and twice while new weights come. `source` is the folder of the form "directory" or "adapter".
    """

    def __init__(self, start: GeneratorStart, form: WeightForm) -> None:
        self.form = form
        self.source: Path | None = None
        self._start = start
        self._model: Any = load_sampler_model(start.model, "cpu")
        self.vocabulary = int(self._model.get_input_embeddings().weight.shape[0])

    def take(self, weights: WeightSource) -> None:
        """Take the weights that are offered. Raises ModelError for names or shapes that do not fit, before any weight changes."""
        model = self._start.model
        if self.form == "tensors":
            fill(self._model, weights.tensors(), model.path)
            return
        if self.form == "directory":
            folder = weights.directory()
            spec = evolve(model, path=str(folder), revision=None, lora=None)
        else:
            folder = weights.adapter()
            spec = evolve(model, lora=(model.lora or LoraConfig()).stored_at(str(folder)))
        fill(self._model, iterate_stored_weights(spec), model.path)
        self.source = folder

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under their Hugging Face names, contiguous, on the CPU."""
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach().contiguous()

    def proof_prompt(self, limit: int) -> npt.NDArray[np.int32]:
        """Return the fixed prompt: random tokens, always the same ones, at most `limit`."""
        return np.random.default_rng(2024).integers(0, self.vocabulary, max(2, min(PROOF_TOKENS, limit))).astype(np.int32)

    @torch.no_grad()
    def logprobs(self, tokens: npt.NDArray[np.int32], temperature: float = 1.0) -> npt.NDArray[np.float32]:
        """float32[T - 1]: the log-probability of each token but the first, after those before it."""
        row = torch.from_numpy(tokens.astype(np.int64))[None]
        scores = (self._model(input_ids=row, use_cache=False).logits[0, :-1].float() / temperature).log_softmax(-1)
        logprobs: npt.NDArray[np.float32] = scores.gather(1, row[0, 1:, None])[:, 0].numpy()
        return logprobs
