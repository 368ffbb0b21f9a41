"""tests/benchmarks/backends_side_by_side.py: its pieces on a tiny model in this process, and on a GPU the backends' parity in bfloat16."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import backends_side_by_side as program
import pytest
from attrs import evolve
from backends_side_by_side import BACKENDS, SIZES, TOLERANCES, Measured, Parity, Setting, Subject
from measuring import ranks as on_rank
from safetensors.numpy import load_file, save_file

from skyrl_engine.contracts.values.model import ComputeDtype
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.testing.ranks.world import alone

TINY = SIZES["tiny"]


class Here:
    """A world of one rank, which is this process."""

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        return [function(*arguments, **keywords)]


def setting(directory: Path, dtype: ComputeDtype) -> Setting:
    return Setting("cpu", dtype, ranks=1, rounds=1, steps=1, logits_per_chunk=2**22, directory=directory)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with alone():
        yield


def test_a_backend_is_measured_against_float32(tmp_path: Path) -> None:
    """bfloat16 differs, by no more than the tolerance; a gradient of twice the size, or without one parameter's share, does not pass."""
    world: Any = Here()
    reference = Subject("fsdp", setting(tmp_path, "float32"), TINY, world)
    expected, file = reference.score_batch(), tmp_path / "gradients.safetensors"
    world.run(on_rank.keep_gradients, file)
    subject = Subject("fsdp", setting(tmp_path, "bfloat16"), TINY, world)
    weights = subject.engine.weights()
    seconds, peak = subject.turn(), subject.peak()
    assert 0 < seconds < 60
    assert peak is None or peak >= 0
    after = subject.engine.weights()
    assert all((weights[name] == weight).all() for name, weight in after.items()), "every step starts from the same weights"

    parity = subject.parity(expected, file)
    limit = TOLERANCES["bfloat16"]
    assert 0 < parity.mean_logprob < parity.largest_logprob
    assert 0 < parity.gradient < parity.worst
    assert parity.within(limit), parity
    subject.engine.discard()
    gradients = load_file(file)
    norm = next(name for name in gradients if "norm" in name)
    for wrong in (
        {name: gradient / 2 for name, gradient in gradients.items()},
        {**gradients, norm: gradients[norm] / 1.3},
    ):
        save_file(wrong, file)
        assert not subject.parity(expected, file).within(limit)
        subject.engine.discard()
    save_file({name: gradient for name, gradient in gradients.items() if name != norm}, file)
    with pytest.raises(AssertionError, match=norm):
        subject.parity(expected, file)
    subject.engine.group.close()


def test_what_a_backend_does_not_do_is_refused(tmp_path: Path) -> None:
    world: Any = Here()
    with pytest.raises(UnsupportedError, match="stage 0"):
        Subject("deepspeed z0", setting(tmp_path, "bfloat16"), TINY, world)


def test_the_table_and_its_place_in_the_page(tmp_path: Path) -> None:
    right = Parity(1e-4, 0.01, 0.02, 0.01, 0.02, "norm")
    found = [
        Measured("fsdp", seconds=2.0, peak=3 * 2**20, parity=right),
        Measured("deepspeed z0", "It does not. Choose another."),
        Measured("megatron", seconds=4.0, parity=Parity(1e-4, 0.01, 0.02, 0.01, float("nan"))),
    ]
    table = program.table(found, setting(tmp_path, "bfloat16"), tokens=100)
    assert "| fsdp | 1.00 | 3 | 1.0e-04 | 1.0e-02 | 2.0e-02 | 1.0e-02 | 2.0e-02 | yes |" in table
    assert "| megatron | 0.50 | not told here | 1.0e-04 | 1.0e-02 | 2.0e-02 | 1.0e-02 | nan | **no** |" in table
    assert "- deepspeed z0: It does not. Choose another." in table
    on_cuda = program.table(found, evolve(setting(tmp_path, "bfloat16"), device="cuda"), tokens=100)
    assert "| fsdp | 50 | 1.00 | 3 | 1.0e-04 |" in on_cuda
    assert "| megatron | 25 | 0.50 | not told here |" in on_cuda
    for rows in (table, on_cuda):
        assert len({line.count("|") for line in rows.splitlines() if line.startswith("|")}) == 1

    page = Path("docs/reference/backends-side-by-side.md").read_text()
    written = program.put_into(program.put_into(page, "cpu", "ON-CPU"), "cuda", "ON-CUDA")
    assert written.count("\nON-CPU\n") == written.count("\nON-CUDA\n") == 1
    assert program.put_into(written, "cpu", "AGAIN") == written.replace("ON-CPU", "AGAIN")
    with pytest.raises(ValueError, match="no lines"):
        program.put_into("", "cuda", "two")


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def on_cuda(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ComputeDtype, dict[str, Measured]]:
    """Every backend measured on one device, in processes of their own."""
    chosen = Setting("cuda", request.param, 1, 1, 1, 2**22, tmp_path_factory.mktemp("cuda"))
    return request.param, {
        measurement.backend: measurement for measurement in program.measure(chosen, SIZES["10m"], list(BACKENDS))
    }


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_parity_on_cuda(on_cuda: tuple[ComputeDtype, dict[str, Measured]], backend: str) -> None:
    """Loss, log-probabilities and gradients of eight layers within the tolerance of the precision, against one float32 process."""
    dtype, found = on_cuda
    result = found[backend]
    if (backend, dtype) == ("deepspeed z0", "bfloat16"):
        assert "stage 0 sums bfloat16 gradients in bfloat16" in result.refused
        return
    assert not result.refused, result.refused
    assert result.parity is not None
    assert result.parity.within(TOLERANCES[dtype]), result.parity
    assert 0 < result.seconds < float("inf")
    assert result.peak is not None
    assert result.peak > 0
