"""Requirements that tests of several layouts of ranks share."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from skyrl_engine.testing.backends.batches import Arrays, DefinedResult, find_worst_difference


def require_definition(ranks: Sequence[tuple[float, Arrays]], due: DefinedResult, sharing: int) -> None:
    """Compare losses and gradients of ranks, so many of which share their samples, with the definition: within 1e-5, and equal on all ranks."""
    assert sum(loss for loss, _ in ranks) / sharing == pytest.approx(due.loss, rel=1e-5)
    for _, gradients in ranks:
        assert find_worst_difference(gradients, due.gradients) <= 1e-5
        for key, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, ranks[0][1][key], err_msg=key)


def zero_routers(folder: Path) -> None:
    """Let every router of a written mixture be zeros, which sends every token to the same two experts."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    routers = [name for name in weights if name.endswith("gate.weight") and "experts" not in name]
    assert routers
    for name in routers:
        weights[name].zero_()
    save_file(weights, file, metadata={"format": "pt"})
