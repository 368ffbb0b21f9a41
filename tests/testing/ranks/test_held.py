"""A rank holds one object of each purpose: making another closes the one before, and purposes do not touch each other."""

import pytest
from attrs import define

from skyrl_engine.testing.ranks.held import call_held, hold, let_go
from skyrl_engine.testing.ranks.world import World

_closed: list[str] = []


@define
class Held:
    """Stands for a backend or a worker."""

    name: str

    def greet(self, word: str) -> str:
        return f"{word}, {self.name}"

    def close(self) -> None:
        _closed.append(self.name)


def forget_closed() -> list[str]:
    """Return the names of what was closed on this rank, and forget them."""
    names = _closed.copy()
    _closed.clear()
    return names


def test_another_of_a_purpose_takes_the_place_of_the_one_before(pair: World) -> None:
    pair.run(hold, "worker", Held, "first")
    pair.run(hold, "worker", Held, "second")
    assert pair.run(forget_closed) == [["first"]] * 2
    assert pair.run(call_held, "worker", "greet", "hello") == ["hello, second"] * 2
    pair.run(let_go, "worker")
    pair.run(let_go, "worker")
    assert pair.run(forget_closed) == [["second"]] * 2


def test_a_backend_and_a_worker_are_held_side_by_side(pair: World) -> None:
    pair.run(hold, "backend", Held, "of the kit")
    pair.run(hold, "worker", Held, "of the engine")
    pair.run(let_go, "worker")
    assert pair.run(call_held, "backend", "greet", "still") == ["still, of the kit"] * 2
    pair.run(let_go, "backend")
    assert pair.run(forget_closed) == [["of the engine", "of the kit"]] * 2


def test_what_cannot_be_made_leaves_nothing_behind(pair: World) -> None:
    pair.run(hold, "worker", Held, "first")
    with pytest.raises(AssertionError, match="ValueError: invalid literal"):
        pair.run(hold, "worker", int, "nonsense")
    assert pair.run(forget_closed) == [["first"]] * 2
    pair.run(let_go, "worker")
    assert pair.run(forget_closed) == [[]] * 2
