"""A function as the course of the learning rate: what it returns counts after the warm-up, and what it may not return is refused by step."""

from pathlib import Path

import pytest

from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.engine.own_schedule import OwnSchedule
from skyrl_engine.engine.schedule import learning_rate, load_own_schedule
from skyrl_engine.errors import ContractError, DataError, UnsupportedError
from skyrl_engine.testing.schedules import verify_schedule

FUNCTIONS = """
import math, time

asked = []

def halves(step, steps):
    return 0.5 ** (4 * step // steps)

def undefined(step, steps):
    return 1 / (steps - step)

def negative(step, steps):
    return 0.5 - step / steps

def infinite(step, steps):
    return math.inf if step == 3 else 1

def says_nothing(step, steps):
    pass

def counts(step, steps):
    asked.append(step)
    return 1 / len(asked)

def tells_the_time(step, steps):
    return float(time.time() // 100_000)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def test_warmup_comes_first_and_the_function_counts_from_its_end(file: Path) -> None:
    optimizer = OptimizerConfig(learning_rate=2.0, schedule=f"{file}:halves", warmup_steps=2)
    own = load_own_schedule(optimizer, 10)
    assert own is not None
    assert [learning_rate(optimizer, step, 10, own) for step in range(12)] == [1, 2, 2, 2, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    assert load_own_schedule(OptimizerConfig(schedule="cosine"), 10) is None
    with pytest.raises(UnsupportedError, match="nobody says how many"):
        load_own_schedule(optimizer, None)
    verify_schedule(f"{file}:halves")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("undefined", "at step 4 of 4, raised ZeroDivisionError"),
        ("negative", "at step 3 of 4, returned -0.25"),
        ("infinite", "at step 3 of 4, returned inf"),
        ("says_nothing", "at step 0 of 4, returned None"),
        ("counts", "at step 4 of 4, returned 0.2 and, when asked again, 0.16"),
    ],
)
def test_what_is_no_course_is_refused_by_its_step(file: Path, name: str, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        OwnSchedule.load(f"{file}:{name}").check(4)


def test_a_course_that_depends_on_the_time_is_none(file: Path) -> None:
    OwnSchedule.load(f"{file}:tells_the_time").check(4)
    with pytest.raises(AssertionError, match="in another process"):
        verify_schedule(f"{file}:tells_the_time", (2,))
    with pytest.raises(DataError, match="has no schedule 'halfes'"):
        OwnSchedule.load(f"{file}:halfes")
