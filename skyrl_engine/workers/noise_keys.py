"""Keys of the noise of tokens, by seed, step, sample and place: the same wherever a sample is computed."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from skyrl_engine.contracts.kinds.backend import EmbeddingNoise
from skyrl_engine.contracts.kinds.collator import DenseBatch
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import MicroBatchPlan
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.errors import ContractError

Words = npt.NDArray[np.uint64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


@frozen
class NoiseKeys:
    """The noise of one optimizer step, of size `alpha / sqrt(tokens of the sample * width of the embedding)`."""

    alpha: float
    seed: int
    step: int

    def make(self, columns: SampleColumns, plan: MicroBatchPlan, dense: DenseBatch) -> EmbeddingNoise:
        """Return the keys and sizes of a micro-batch's tokens. Raises ContractError for rows that do not hold the samples' tokens."""
        lengths = np.diff(columns.token_offsets)[plan.samples]
        mask_BT = dense.fields["attention_mask"].bool()
        if int(mask_BT.sum()) != lengths.sum():
            raise ContractError(
                f"the collator's rows hold {int(mask_BT.sum())} tokens, and the samples {lengths.sum()}",
                remedy="Correct the collator, or remove model.neftune_alpha",
            )
        base = np.random.SeedSequence([self.seed, self.step]).generate_state(1, np.uint64)
        of_samples = _mix(base + _mix(columns.sample_ids[plan.samples].astype(np.uint64)))
        begins = np.repeat(offsets_of(lengths)[:-1], lengths)
        places = np.arange(lengths.sum(), dtype=np.int64) - begins
        of_tokens = _mix(np.repeat(of_samples, lengths) + places.astype(np.uint64) * _GOLDEN)
        keys, lengths_BT = (torch.zeros(mask_BT.shape, dtype=torch.int64) for _ in range(2))
        keys[mask_BT] = torch.from_numpy(of_tokens.view(np.int64))
        lengths_BT[mask_BT] = torch.from_numpy(np.repeat(lengths, lengths))
        return EmbeddingNoise(self.alpha, keys, lengths_BT)


def _mix(words: Words) -> Words:
    """Return SplitMix64's output at these states (Steele et al. 2014, figure 16)."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
