"""A gradient of a tiny model on one rank and on two, against its definition in float64."""

import time
from collections.abc import Iterator

from skyrl_engine.config import resolve
from skyrl_engine.config.reading.sources import from_dict
from skyrl_engine.doctor.finding import DoctorFinding
from skyrl_engine.errors import EngineError
from skyrl_engine.proof.cases import Case
from skyrl_engine.proof.cuts import prove_cuts
from skyrl_engine.proof.prover import TOLERANCE

RANKS = 2


def examine_training() -> Iterator[DoctorFinding]:
    """Compute the gradient of one batch on one rank and on two by Ray, and yield whether both are as defined."""
    resolved = {
        "padded": resolve(from_dict({"collator": {"use": "padded"}, "loss": {"use": "cross_entropy"}}, "self-test"), need=())
    }
    for ranks in (1, RANKS):
        topic = f"self-test on {ranks} rank{'s' if ranks > 1 else ''}"
        began = time.monotonic()
        try:
            (row,) = prove_cuts(resolved, None, ranks, "qwen3", only=[Case("padded", ranks, micro_batch_rows=2)])
        except EngineError as error:
            yield DoctorFinding(topic, "problem", error.args[0], error.remedy)
            continue
        seconds = f"in {time.monotonic() - began:.0f} s"
        if row.difference is None:
            yield DoctorFinding(topic, "problem", f"it did not run: {row.explanation}", "Mend what it says, and run this again")
        elif row.holds:
            allowed = TOLERANCE["float32"]
            found = f"the gradient is as defined, to {row.difference.gradient:.0e} (allowed {allowed:.0e}), {seconds}"
            yield DoctorFinding(topic, "ok", found)
        else:
            cause = f"the gradient is not as defined: {row.explanation}"
            yield DoctorFinding(topic, "problem", cause, "See all cuts: skyrl-engine prove")
