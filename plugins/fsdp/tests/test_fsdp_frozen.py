"""A model that nothing trains is held in the precision that computes, and scores what its export scores, bit for bit (CPU)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_frozen import score_frozen
from safetensors.torch import load_file

from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.plugin import FsdpConfig


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("bfloat16", FsdpConfig()), ("bfloat16", FsdpConfig(tensor_parallel=2)), ("float32", FsdpConfig())],
    ids=["bfloat16", "bfloat16-tp2", "float32"],
)
def test_a_frozen_model_is_held_as_its_export(
    pair: World, models: dict[str, str], tmp_path: Path, dtype: str, options: FsdpConfig
) -> None:
    ranks = pair.run(score_frozen, models["llama-untied"], tmp_path, options, dtype)
    size = {"bfloat16": 2, "float32": 4}[dtype]
    numbers = sum(tensor.numel() for tensor in load_file(tmp_path / "export" / "model.safetensors").values())
    for rank in ranks:
        for name, scores in rank.frozen.items():
            np.testing.assert_array_equal(scores, rank.exported[name])
            np.testing.assert_array_equal(scores, rank.trained[name])
            # float32 sums depend on where in memory weights lie
            np.testing.assert_allclose(rank.loaded[name], rank.stepped[name], rtol=1e-6)
        assert any((rank.stepped[name] != rank.trained[name]).any() for name in rank.trained)
        assert rank.dtypes == {getattr(torch, dtype)}
    # halves of all weights, and norms whole on tensor-parallel ranks
    assert numbers * size <= sum(rank.held_bytes for rank in ranks) <= 1.05 * numbers * size
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("of trained", "of loaded"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
