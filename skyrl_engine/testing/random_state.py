"""The global random states that a plugin must leave alone: Python's, NumPy's and torch's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

RandomState = tuple[object, bytes, int, bytes]


def seed_everything(seed: int) -> None:
    """Seed all three."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def global_random_state() -> RandomState:
    """Return all three states, comparable."""
    _, keys, place, *_ = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), int(place), torch.random.get_rng_state().numpy().tobytes()


@contextmanager
def restore_random_state() -> Iterator[None]:
    """Restore all three states in the end."""
    python, numpy, tensors = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.set_rng_state(tensors)
