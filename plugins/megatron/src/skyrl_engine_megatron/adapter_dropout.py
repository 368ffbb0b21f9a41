"""Dropout of adapters' inputs, as a function of the token and not of the order of draws (ADR 89): every layout of ranks drops the same numbers.

A number is dropped or kept by a key made of the run's seed, the steps taken, the sample's id, the token's place in it, the layer's name, and
the number's place among the layer's inputs. So there is no random state: nothing of it is in checkpoints, activations that are computed again
drop what they dropped before, and ranks that share a sample agree without a message. With m the output of SplitMix64 at a state (Steele et al.
2014, figure 16) and g its increment:

    token = m(m(base + m(sample)) + place g)        base: 64 bits that NumPy's SeedSequence makes of seed and steps
    layer = m(token xor the first 8 bytes of SHA-256 of the layer's name, the lowest first)

Number i is kept where the upper 24 bits of m(layer + (i - 1) g), over 2^24, are at least the rate, and then multiplied by 1 / (1 - rate).
"""

from hashlib import sha256
from typing import Final

import numpy as np
import torch
from torch import Tensor

from skyrl_engine import ContractError
from skyrl_engine.contracts import IntArray, MicroBatch
from skyrl_engine.modeling.embedding_noise import GOLDEN, draw_noise

_AT_ONCE: Final = 1 << 22
"""Numbers that are decided at a time."""


def make_token_keys(micro_batch: MicroBatch, document_of_T: Tensor, place_of_T: Tensor, seed: int, steps_done: int) -> Tensor:
    """Return int64[tokens], the keys of this rank's tokens, on the CPU.

    `document_of_T` int64 numbers each token's document among those that have a token, and is their count at padding; `place_of_T` int64 is its
    place in the document. Raises ContractError for a micro-batch with samples that have no ids.
    """
    lengths: IntArray = micro_batch.sequence_lengths.values
    sample_ids = np.zeros(0, dtype=np.int64) if micro_batch.sample_ids is None else micro_batch.sample_ids
    if len(sample_ids) != len(lengths):
        raise ContractError(
            f"a micro-batch of {len(lengths)} samples has {len(sample_ids)} sample_ids, and dropout of adapters is drawn by them",
            remedy="Set MicroBatch.sample_ids, or model.lora.dropout = 0.0",
        )
    words = np.random.SeedSequence([seed % 2**64, steps_done]).generate_state(1, np.uint64)
    base = torch.from_numpy(words.view(np.int64).copy())
    # the last one is that of padding, which nobody reads
    ids_D = torch.tensor([*sample_ids[lengths > 0].tolist(), 0])
    return mix(mix(base + mix(ids_D))[document_of_T] + place_of_T * GOLDEN)


def hash_name(layer: str) -> int:
    """Return 64 bits of a layer's name, as a signed number."""
    return int.from_bytes(sha256(layer.encode()).digest()[:8], "little", signed=True)


def choose_kept(keys_T: Tensor, layer: int, first: int, width: int, rate: float) -> Tensor:
    """Return bool[tokens, width], True for what is kept of `width` inputs of the layer that begin at input `first`.

    `layer` is what `hash_name` gives. Equal on every device.
    """
    states_T = mix(keys_T ^ layer) + _wrap(first * GOLDEN)
    kept_TW = torch.empty(len(keys_T), width, dtype=torch.bool, device=keys_T.device)
    size = max(1, _AT_ONCE // width)
    for start in range(0, len(keys_T), size):
        # uniform in [-1, 1), in steps of 2^-23
        kept_TW[start : start + size] = draw_noise(states_T[start : start + size], width) >= 2 * rate - 1
    return kept_TW


def mix(states: Tensor) -> Tensor:
    """Return SplitMix64's output at these states, int64 as they are."""
    bits = states + GOLDEN
    bits = (bits ^ _shift_right(bits, 30)) * _wrap(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _wrap(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift int64 as if it were unsigned."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _wrap(number: int) -> int:
    """Return the number modulo 2^64, as int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63
