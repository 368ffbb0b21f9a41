"""All promises of a collator."""

from typing import Any

from skyrl_engine.testing.collators.build_promises import BUILD_PROMISES, copy_arrays
from skyrl_engine.testing.collators.cases import CutCase, builds, cuts
from skyrl_engine.testing.collators.explicit import list_explicit_cuts
from skyrl_engine.testing.collators.extras_promises import EXTRAS_PROMISES
from skyrl_engine.testing.collators.plan_promises import PLAN_PROMISES, same_plan
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.process_promises import process_promises
from skyrl_engine.testing.promise import Broken, Promise, Undecidable
from skyrl_engine.testing.subject import Subject


def _answer(subject: Subject[Any], case: CutCase) -> list[object]:
    """Return the plan's rows and all that is built of them."""
    try:
        built = list(builds(subject, case))
    except Broken as failed:
        raise Undecidable(failed.cause) from failed
    return [
        (rows.samples.tolist(), rows.row_offsets.tolist(), {name: array.tobytes() for name, array in copy_arrays(batch).items()})
        for rows, batch in built
    ]


_process_settings, _another_rank, _another_process = process_promises(_answer, cuts(), list_explicit_cuts)

COLLATOR_PROMISES: tuple[Promise[Any, Any], ...] = (
    _process_settings,  # first: once set they are set
    same_plan,  # soon: what wears off after some calls is seen while it lasts
    _another_rank,
    *PLAN_PROMISES,
    *BUILD_PROMISES,
    *EXTRAS_PROMISES,
    _another_process,  # late: it takes seconds to start
    *PLUGIN_PROMISES,
)
