"""`[run]`: the folder that a run writes, and the ranks that it runs on."""

from typing import Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, in_, lt, min_len, optional

from skyrl_engine.contracts.kinds.context import MatmulPrecision
from skyrl_engine.contracts.values.model import CODE, PLACE


@frozen
class RunConfig:
    """The folder that a run writes, and the ranks that it runs on."""

    directory: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "output"})
    """Folder that holds everything the run writes; none: a new folder under `runs/`."""

    seed: int = field(default=0, validator=[ge(0), lt(2**63)])
    """Seed of every random number of the run."""

    launch: Literal["inline", "ray"] = field(default="inline", validator=in_(("inline", "ray")))
    """`inline`: one rank, in this process; `ray`: one Ray actor per rank."""

    ranks: int = field(default=1, validator=ge(1))
    """Processes that train together; more than one needs `launch = "ray"`."""

    oversubscribe: bool = False
    """Allow more than four ranks per core where the engine starts Ray on this machine."""

    device: Literal["auto", "cpu", "cuda"] = field(default="auto", validator=in_(("auto", "cpu", "cuda")))
    """Device of every rank; `auto`: CUDA where torch finds a device, else the CPU."""

    matmul_precision: MatmulPrecision = field(default="highest", validator=in_(("highest", "high")))
    """Products of float32 matrices on ranks and in their generators: "highest": in float32; "high": in TF32 (11 significant bits, on CUDA
    devices). Products of bfloat16, and rotary angles, stay as they are."""

    ray_address: str | None = field(default=None, validator=optional(min_len(1)), metadata={CODE: True})
    """Address of a running Ray cluster; none: start one on this machine."""

    report: bool = True
    """Write `report.html` into the run directory, at the end and, in at most 0.5% of the time, while the run trains."""

    profile_steps: int | None = field(default=None, validator=optional(ge(1)))
    """Optimizer steps that torch's profiler records on every rank, from the session's second one on, into `profile/` of the run directory."""

    profile_memory: bool = False
    """With `profile_steps`, write a snapshot of every allocation of these steps too; on CUDA devices only."""

    observers: tuple[str, ...] = field(
        default=("metrics_jsonl",), validator=deep_iterable(min_len(1)), metadata={PLACE: "reference"}
    )
    """References of the observer plugins; the options of one stand in the table `[observers.NAME]`."""
