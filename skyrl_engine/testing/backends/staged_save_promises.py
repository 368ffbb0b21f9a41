"""Promises of a backend about checkpoints that it writes while it trains."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from skyrl_engine.testing.backends.state_promises import require_equal, train
from skyrl_engine.testing.backends.step_promises import SPEC
from skyrl_engine.testing.backends.subject import BackendCase, BackendSubject, backend_promise, exempt_without
from skyrl_engine.testing.promise import Broken, Promise


@backend_promise(
    "What is staged is written while training goes on: byte for byte what save wrote at that place, and no step notices",
    exempt=exempt_without("asynchronous_saves"),
)
def staged_saves(subject: BackendSubject, case: BackendCase) -> None:
    if "asynchronous_saves" not in subject.describe(case.sizes.options, case.sizes.ranks).capabilities:
        return
    with tempfile.TemporaryDirectory(prefix="skyrl-engine-staged-") as name:
        with subject.open_ranks(case, optimizer=SPEC) as ranks:
            due = train(ranks, case, 5)[-1][1]
        with subject.open_ranks(case, optimizer=SPEC) as ranks:
            for number, begins in enumerate((True, False), 1):
                train(ranks, case, 1)
                saved, staged = (Path(name, f"{kind}-{number}") for kind in ("saved", "staged"))
                for directory in (saved, staged):
                    directory.mkdir()
                ranks.save(saved)
                ranks.stage_save(staged, begins=begins)
                train(ranks, case, 1)
                _require_same_files(saved, staged, ranks.collect_save())
            require_equal(
                train(ranks, case, 1)[-1][1], due, "after saves were staged", "Change nothing but the copies in stage_save"
            )


def _require_same_files(saved: Path, staged: Path, written: Sequence[Sequence[str]]) -> None:
    names = [
        sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) for folder in (saved, staged)
    ]
    if names[0] != names[1]:
        raise Broken(
            f"save writes {', '.join(names[0])}, and what was staged {', '.join(names[1])}", "Write the same files in both"
        )
    told = sorted(name for names_of_rank in written for name in names_of_rank)
    if told != names[0]:
        raise Broken(
            f"the ranks say that they wrote {', '.join(told)}, and there are {', '.join(names[0])}",
            "Return the name of every file from the rank that wrote it",
        )
    for name in names[0]:
        if (saved / name).read_bytes() != (staged / name).read_bytes():
            raise Broken(
                f"{name} of a save that was staged differs from what save wrote at the same place",
                "Copy weights, moments, counts and random states in stage_save, and write from the copies",
            )


STAGED_SAVE_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (staged_saves,)
