"""First-fit-decreasing against a plain scan over the bins, the same bins, and how full they get. Run with `nox -s bench`.

Lengths are lognormal (median 245 tokens, 16 to 8,192) for rows of 8,192 tokens, or all different, for rows of 2,000,000. The scan is the
peer's (see `measuring/peer.py`); for the largest batches, where it takes minutes, our time stands alone.
"""

import os
from functools import partial

import numpy as np
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine
from measuring.peer import peer_module

from skyrl_engine_collators import kernels
from skyrl_engine_collators.packed.first_fit import first_fit_decreasing

CAPACITY, CAPACITY_OF_DIFFERENT = 8192, 2_000_000
COMPARED, LARGE = (1024, 16384), 131_072
BARS = {1024: 30.0, 16384: 300.0}
"""Cost of a plain scan over that of the compiled kernel."""


def main() -> None:
    peer = peer_module()
    print(f"{machine()}, NumPy {np.__version__}")
    for samples in COMPARED:
        lengths = lognormal(samples)
        ours = partial(first_fit_decreasing, lengths, CAPACITY)
        bins = ours()
        volume = -(-int(lengths.sum()) // CAPACITY)
        print(f"ffd, {samples} lognormal lengths: {len(bins)} bins, {len(bins) / volume - 1:.3%} more than the volume needs")
        if peer is None:
            continue
        scan = partial(peer.first_fit_decreasing, lengths.tolist(), CAPACITY, 1)
        assert scan() == [members.tolist() for members in map(bins.__getitem__, range(len(bins)))], "other bins"
        times = interleave({"peer": scan, **{engine: partial(on_engine, engine, ours) for engine in ("native", "numpy")}}, 5)
        shown = ", ".join(f"{engine} {times['peer'] / times[engine]:.0f}x less" for engine in ("native", "numpy"))
        bar = compare_with_bar(times["peer"] / times["native"], at_least=BARS[samples])
        print(f"  scan {times['peer'] * 1e3:.2f} ms; {shown} {bar}")
    different = np.random.default_rng(0).permutation(LARGE) + 1
    for name, lengths, capacity in (
        ("lognormal", lognormal(LARGE), CAPACITY),
        ("all different", different, CAPACITY_OF_DIFFERENT),
    ):
        work = partial(first_fit_decreasing, lengths, capacity)
        times = interleave({engine: partial(on_engine, engine, work) for engine in ("native", "numpy")}, 5)
        print(f"ffd, {LARGE} {name} lengths: native {times['native'] * 1e3:.1f} ms, numpy {times['numpy'] * 1e3:.1f} ms")


def lognormal(samples: int) -> np.ndarray:
    return np.random.default_rng(0).lognormal(5.5, 0.8, samples).clip(16, 8192).astype(np.int64)


def on_engine(engine: str, work: partial[object]) -> None:
    os.environ[kernels.VARIABLE] = engine
    work()


if __name__ == "__main__":
    main()
