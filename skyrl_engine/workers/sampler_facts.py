"""Facts of a run that its generators are told as they start, wherever they live."""

from pathlib import Path

from attrs import frozen

from skyrl_engine.contracts.kinds.generator import GeneratorStart, WeightSource
from skyrl_engine.contracts.values.model import ModelConfig


@frozen
class SamplerFacts:
    """`eos_token_ids`, `folder`, `vocabulary` and `longest` as in `GeneratorStart`."""

    eos_token_ids: tuple[int, ...]
    vocabulary: int | None = None
    longest: int | None = None
    folder: Path | None = None

    def make_start(self, model: ModelConfig, device: str, weights: WeightSource, *, version: int) -> GeneratorStart:
        """Return the facts for a generator of `model` on `device` with `weights` of `version`."""
        return GeneratorStart(
            model,
            device,
            self.eos_token_ids,
            weights,
            version,
            folder=self.folder,
            vocabulary=self.vocabulary,
            longest=self.longest,
        )
