"""This process's random states (torch, CUDA, Python, NumPy), as values that `torch.load(weights_only=True)` accepts."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from skyrl_engine.contracts.values.topology import RankCoords


def capture(device: torch.device) -> dict[str, Any]:
    """Return the random states of this process and of `device`, from which dropout and model code draw."""
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).copy()), int(position), int(has_gauss), float(cached_gaussian)),
    }


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Set what `capture` returned. A CUDA state is ignored on CPU."""
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached_gaussian = states["numpy"]
    np.random.set_state((name, keys.numpy(), position, has_gauss, cached_gaussian))


def start_anew(seed: int, steps_done: int, coords: RankCoords) -> None:
    """Seed every random state for a run that goes on in another layout of ranks, where the saved states fit no rank.

    The seed is made of the run's, the step and the data-parallel rank: model-parallel ranks of one sample draw equal dropout masks.
    """
    entropy = [seed % 2**64, steps_done, coords.dp]
    reseed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] % 2**63))


def reseed(seed: int) -> None:
    """Start every random state of this process, and of all its CUDA devices, from `seed`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the legacy state: third-party model code draws from it
    torch.manual_seed(seed)


class OwnRandomStates:
    """Random states of one user of this process, which draws from them alone and leaves those of everybody else as they are."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """Begin at those of a process that was seeded with `seed`."""
        self._device = device
        outside = capture(device)
        reseed(seed)
        self._states = capture(device)
        restore(outside, device)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Put them in force until the context is left."""
        outside = capture(self._device)
        restore(self._states, self._device)
        try:
            yield
        finally:
            self._states = capture(self._device)
            restore(outside, self._device)
