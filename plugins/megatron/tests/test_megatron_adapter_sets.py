"""Sets of adapters over one base: its memory, their own values and files. That each learns as alone is a promise of the conformance kit."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from attrs import frozen
from by_day import now
from megatron_tasks import PAIRS, VOCABULARY, arrays, learn, own, start
from safetensors.torch import load_file

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import AdamWSettings, LoraConfig
from skyrl_engine.testing.backends.batches import Arrays, WeightedObjective, build_padded, documents
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.backend import MegatronBackend
from skyrl_engine_megatron.plugin import MegatronConfig

LORA = LoraConfig(rank=4, dropout=0.2, targets=("k_proj", "o_proj", "up_proj"))
OPTIMIZER = AdamWSettings(learning_rate=1e-2)


@frozen(eq=False)
class Learned:
    """A set's steps and merged weights, and its scores with adapters and without."""

    history: list[tuple[float, float, float]]
    weights: Arrays
    scores: list[np.ndarray]
    base_scores: list[np.ndarray]


def score(backend: MegatronBackend) -> list[np.ndarray]:
    output = backend.forward(build_padded(own(documents(VOCABULARY), backend), 3), WeightedObjective())
    return list(output.fields["logprobs"]) if output.coords.collects else []


def teach(backend: MegatronBackend, target: Path) -> Learned:
    history = learn(backend, 2)
    backend.export(target)
    with backend.without_adapters():
        base_scores = score(backend)
    return Learned(history, arrays(backend.weights()), score(backend), base_scores)


def train_beside(
    directory: str, options: MegatronConfig, beside: Path, alone: Path, dtype: str
) -> tuple[Learned, Learned, bool, int]:
    """A set that learned beside another one, and alone; whether its frozen weights are those of the other; how many it has."""
    with closing(start(directory, OPTIMIZER, options=options, lora=LoraConfig(rank=1), dtype=dtype)) as base:
        learn(base, 1)
        with closing(base.adapter_set(LORA, OPTIMIZER, 0)) as further:
            learned = teach(further, beside)
            assert further._frozen is not None
            assert base._frozen is not None
            own_weights, shared = further._frozen.parameters, base._frozen.parameters
            is_shared = own_weights.keys() == shared.keys() and all(own_weights[name] is shared[name] for name in shared)
        learn(base, 1)
    with closing(start(directory, OPTIMIZER, options=options, lora=LORA, dtype=dtype)) as backend:
        return learned, teach(backend, alone), is_shared, len(own_weights)


@pytest.mark.parametrize("dtype", now(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("layout", now(PAIRS, "tp2"))
def test_a_set_is_what_it_is_alone_over_the_memory_of_another(
    pair: World, models: dict[str, str], tmp_path: Path, layout: str, dtype: str
) -> None:
    beside, alone = tmp_path / "beside", tmp_path / "alone"
    for learned, due, is_shared, count in pair.run(train_beside, models["qwen3-tied"], PAIRS[layout], beside, alone, dtype):
        assert is_shared
        assert count
        assert learned.history == due.history
        assert learned.weights.keys() == due.weights.keys()
        for name, weight in due.weights.items():
            np.testing.assert_array_equal(learned.weights[name], weight, err_msg=name)
        for got, expected in zip((*learned.scores, *learned.base_scores), (*due.scores, *due.base_scores), strict=True):
            np.testing.assert_array_equal(got, expected)
    exported, expected_files = (load_file(folder / "adapter_model.safetensors") for folder in (beside, alone))
    assert exported.keys() == expected_files.keys()
    assert all(np.array_equal(exported[name], tensor) for name, tensor in expected_files.items())


@pytest.mark.usefixtures("alone")
def test_what_sets_do_not_have_is_refused(models: dict[str, str]) -> None:
    with closing(start(models["llama-untied"], OPTIMIZER, lora=LoraConfig(rank=1))) as base:
        with pytest.raises(UnsupportedError, match=r"model\.lora\.load_in_4bit is set, and the adapters of the megatron backend"):
            base.adapter_set(LoraConfig(load_in_4bit=True), OPTIMIZER, 0)
        assert len(learn(base, 1)) == 1
