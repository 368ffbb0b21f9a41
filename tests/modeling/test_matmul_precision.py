"""TF32 is set for a run's processes, restored after it, never used for rotary angles, and refused where it would change nothing."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from skyrl_engine.contracts import FactoryContext, ModelConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.modeling.matmul_precision import multiply_in, refuse_matmul_precision
from skyrl_engine.modeling.sampler_model import load_sampler_model
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.process_settings import restore_settings


def test_it_is_set_and_restored() -> None:
    with restore_settings():
        torch.set_float32_matmul_precision("highest")
        with multiply_in("high"):
            assert torch.get_float32_matmul_precision() == "high"
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            with multiply_in("highest"):
                assert torch.backends.cuda.matmul.fp32_precision == "ieee"
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "highest"


def test_both_apis_of_torch_agree_after_somebody_mixed_them() -> None:
    with restore_settings():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with multiply_in("highest"):
            assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("precision", "dtype", "device", "word"),
    [
        ("highest", "float64", "cpu", None),
        ("high", "float32", "cuda:0", None),
        ("high", "bfloat16", "cuda:1", None),
        ("high", "float32", "cpu", "TF32, which CUDA devices have"),
        ("high", "float64", "cuda:0", "model.dtype is float64"),
    ],
)
def test_it_is_refused_where_it_changes_nothing(precision, dtype, device, word) -> None:
    with nullcontext() if word is None else pytest.raises(UnsupportedError, match=word):
        refuse_matmul_precision(precision, dtype, device)


@pytest.mark.parametrize("of", ["scorer", "sampler"])
def test_rotary_angles_stay_in_float32(tmp_path: Path, of: str) -> None:
    write_model(tmp_path, "qwen3")
    spec = ModelConfig(str(tmp_path))
    model = load_scorer(spec)[0] if of == "scorer" else load_sampler_model(spec, "cpu")
    rotary = model.model.rotary_emb
    forward, seen = rotary.forward, []

    def watch(*arguments, **named):
        seen.append(torch.get_float32_matmul_precision())
        return forward(*arguments, **named)

    rotary.forward = watch
    hidden, positions = torch.zeros(1, 4, 8), torch.arange(4)[None]
    with restore_settings(), multiply_in("high"):
        rotary(hidden, positions)
        assert seen == ["highest"]
        assert torch.get_float32_matmul_precision() == "high"
        with pytest.raises(TypeError):
            rotary(hidden, nonsense=1)
        assert seen == ["highest"] * 2
        assert torch.get_float32_matmul_precision() == "high", "a failed pass leaves the setting behind"


def test_a_rank_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own order: refused on this CPU, else in force until it is closed."""
    from skyrl_engine.contracts import Topology
    from skyrl_engine.workers import worker
    from skyrl_engine.workers.spec import WorkerSpec

    spec = WorkerSpec({}, FactoryContext(matmul_precision="high"), ModelConfig("none"), None, Topology(), "cpu")
    with pytest.raises(UnsupportedError, match="TF32"):
        worker.Worker(spec, 0)
    monkeypatch.setattr(worker, "refuse_matmul_precision", lambda *_: None)
    seen = []
    monkeypatch.setattr(worker.Worker, "_set_up", lambda *_: seen.append(torch.get_float32_matmul_precision()))
    with restore_settings():
        rank = worker.Worker(spec, 0)
        assert seen == ["high"]
        rank._leave()
        assert torch.get_float32_matmul_precision() == "highest"
