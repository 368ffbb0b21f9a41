"""Models whose function changes at a length, over rows on both sides of it: loss and gradient do not depend on the cut.

Two ranks have other micro-batches than one, of other longest rows. Rows that are all shorter than a threshold, or equally long, would agree
whatever happens at it: frequencies that follow the longest row of a micro-batch were off by a third of the gradient.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from parity import Key, Matrix, difference
from transformers import AutoConfig

from skyrl_engine.errors import PluginNotFoundError
from skyrl_engine.model_facts.thresholds import thresholds
from skyrl_engine.modeling.tiny import SIZES
from skyrl_engine.proof.rollouts import LONGEST, make_rollouts

THRESHOLD = 16
FACTORS = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": THRESHOLD,
                **FACTORS,
            },
            "original_max_position_embeddings": THRESHOLD,
            "eos_token_id": None,
        },
    ),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": THRESHOLD,
            "tie_word_embeddings": True,
        },
    ),
    "sliding window": ("mistral", {"sliding_window": THRESHOLD}),
    "some layers slide": ("gemma3_text", {"sliding_window": THRESHOLD, "layer_types": ["sliding_attention", "full_attention"]}),
}
KEYS: tuple[Key, ...] = (("cross_entropy", "padded"), ("cross_entropy", "packed"))


@pytest.fixture(scope="module", params=MODELS)
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    family, settings = MODELS[request.param]
    with Matrix(family, settings, LONGEST, KEYS) as made:
        yield made


@pytest.mark.parametrize("name", MODELS)
def test_rows_lie_on_both_sides_of_every_threshold(name: str) -> None:
    family, settings = MODELS[name]
    found = thresholds(AutoConfig.for_model(family, **{**SIZES, **settings}))
    assert found, f"{name} names no threshold"
    lengths = np.diff(make_rollouts(()).token_offsets)
    for threshold in found.values():
        assert lengths.min() < threshold < lengths.max()


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed z2"])
def test_two_ranks_compute_what_one_computes(matrix: Matrix, backend: str) -> None:
    try:
        entry = matrix.entry(backend, "dp2", KEYS)
    except PluginNotFoundError as error:
        pytest.skip(f"{backend} is not installed: {error.cause}")
    assert not entry.refused + entry.failed
    wrong = {key: cell for key, cell in entry.cells.items() if not cell.agrees}
    assert not wrong, f"{entry.name}: {wrong}"


@pytest.mark.proof
def test_a_packed_batch_computes_what_a_padded_one_computes(matrix: Matrix) -> None:
    padded, packed = (matrix.reference(key) for key in KEYS)
    cell = difference(packed, padded)
    assert cell.agrees, cell
