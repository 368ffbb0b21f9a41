"""Attempts are summed up and chosen as by reading all of them, in work that grows with their number, and in memory that hardly does."""

import gc
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.rollout import journal_index, messages
from skyrl_engine.rollout.arrow_codec import LearnedAttempt
from skyrl_engine.rollout.attempts import GroupSteps, Shortlist, Wanted, choose_attempts, read_steps, summarize_steps
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.journal_index import JournalIndex, read_index
from skyrl_engine.rollout.records import Entry, GroupEntries, Records
from skyrl_engine.testing.rollout_cases import plain_group

STATUSES = ("finished", "truncated", "failed")
MEMBERS = 8


def write(folder, steps: int, *, groups: int = 5, tokens: int = 3, seed: int = 0) -> None:
    """Steps of groups with few different rewards, so that many are a tie; a fifth of the groups waits for the next step, or for none."""
    draw = np.random.default_rng(seed)
    waiting: list[int] = []
    with open_journal(folder, run="x") as journal:
        for step in range(1, steps + 1):
            for place in range(groups):
                ticket = (step - 1) * groups + place
                group = plain_group(ticket, start_version=step - 1, rewards=tuple(draw.integers(0, 4, MEMBERS) / 4))
                members = [evolve(each, status=str(draw.choice(STATUSES, p=(0.6, 0.2, 0.2)))) for each in group.trajectories]
                if tokens > 3:
                    members = [evolve(each, info={"text": "x" * tokens}) for each in members]
                journal.append(evolve(group, trajectories=tuple(members), dropped="equal" if place == 1 else None))
                waiting.append(ticket)
            taken = [ticket for ticket in waiting[:groups] if ticket % 5 != 1]
            waiting = waiting[groups - 1 :]
            values = np.full(3, 0.5, dtype=np.float32)
            journal.record_step(
                step, taken, [LearnedAttempt(ticket, member, values, values) for ticket in taken for member in range(8)]
            )


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attempts")
    write(folder, 7)
    return folder


def every_group(index: JournalIndex) -> list[tuple[int, Group]]:
    """The definition: step and group of every record that counts, by step and ticket."""
    trained = index.steps()
    steps = {ticket: trained.get(ticket, index.groups[ticket].header["start_version"] + 1) for ticket in index.groups}
    return [(steps[ticket], index.groups[ticket].group()) for ticket in sorted(steps, key=lambda ticket: (steps[ticket], ticket))]


def choose_by_reading(index: JournalIndex, wanted: Wanted, limit: int, steps: set[int] | None) -> tuple[list[tuple[int, int]], int]:
    """The definition of a choice: all attempts that are wanted, sorted, and the first of them."""
    attempts = [
        (group.ticket, place, trajectory.reward)
        for step, group in every_group(index)
        for place, trajectory in enumerate(group.trajectories)
        if (steps is None or step in steps)
        and (not wanted.truncated or trajectory.status == "truncated")
        and (not wanted.failed or trajectory.status == "failed")
        and (wanted.order is None or wanted.failed or trajectory.status != "failed")
        and (wanted.fits is None or wanted.fits(trajectory.token_ids))
    ]
    if wanted.order is not None:
        attempts.sort(key=lambda attempt: attempt[2], reverse=wanted.order == "best")
    return [attempt[:2] for attempt in attempts[:limit]], len(attempts)


@pytest.mark.parametrize("order", [None, "best", "worst"])
@pytest.mark.parametrize("status", [{}, {"truncated": True}, {"failed": True}, {"truncated": True, "failed": True}])
@pytest.mark.parametrize("limit", [1, 7, 1000])
@pytest.mark.parametrize("steps", [None, {3}])
@pytest.mark.parametrize("fits", [None, lambda tokens: int(tokens.sum()) % 3 == 0])
def test_a_choice_is_that_of_reading_all(journal, order, status, limit, steps, fits):
    index, wanted = read_index(journal), Wanted(order, **status, fits=fits)
    chosen = choose_attempts(index, read_steps(index), wanted, limit, steps)
    assert (list(chosen.list_attempts()), chosen.count) == choose_by_reading(index, wanted, limit, steps)


def test_steps_are_summed_up_as_by_reading_all(journal):
    index = read_index(journal)
    trained = index.steps()
    rows = list(summarize_steps(index))
    groups = every_group(index)
    assert [row["step"] for row in rows] == sorted({step for step, _ in groups})
    assert any(row["dropped"] for row in rows)
    for row in rows:
        of_step = [group for step, group in groups if step == row["step"]]
        attempts = [trajectory for group in of_step for trajectory in group.trajectories]
        rewards = [trajectory.reward for trajectory in attempts if trajectory.status != "failed"]
        assert row == {
            "step": row["step"],
            "groups": sum(group.ticket in trained for group in of_step),
            "dropped": sum(group.ticket not in trained and group.dropped is not None for group in of_step),
            "attempts": len(attempts),
            "failed": sum(trajectory.status == "failed" for trajectory in attempts),
            "truncated": sum(trajectory.status == "truncated" for trajectory in attempts),
            "reward": sum(rewards) / len(rewards),
            "lowest": min(rewards),
            "highest": max(rewards),
        }


@given(
    rewards=st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0]), max_size=60),
    limit=st.integers(1, 8),
    order=st.sampled_from([None, "best", "worst"]),
    slack=st.integers(1, 9),
)
def test_a_shortlist_is_the_beginning_of_the_sorted_list(rewards, limit, order, slack):
    """However often it lets go of what is too far behind; those with the same reward keep their order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl_engine.rollout.attempts._SLACK", slack)
        shortlist = Shortlist(order, limit)
        for number, reward in enumerate(rewards):
            shortlist.add(reward, number, 2 * number)
        numbers = list(range(len(rewards)))
        if order is not None:
            numbers.sort(key=lambda number: rewards[number], reverse=order == "best")
        assert list(shortlist.list_attempts()) == [(number, 2 * number) for number in numbers[:limit]]
        assert shortlist.count == len(rewards)


@given(
    events=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 4)) | st.integers(0, 4).map(lambda version: (None, version)), max_size=30
    )
)
@example(events=[(0, 3), (0, 1), (None, 2)])
@example(events=[(0, 1), (0, 3), (None, 2)])
def test_groups_of_later_weights_are_forgotten_as_by_looking_at_all(events):
    entries, kept = GroupEntries(), {}
    records = Records(None)
    for number, (ticket, version) in enumerate(events):
        if ticket is None:
            entries.drop_later(version)
            kept = {other: place for other, place in kept.items() if place[1] <= version}
            continue
        records.append(
            {
                "event": "group",
                "ticket": ticket,
                "start_version": 0,
                "newest_version": version,
                "dropped": None,
                "rewards": [1.0],
                "statuses": ["finished"],
            },
            0,
            number,
            number + 1,
        )
        entries.put(records, len(records) - 1)
        kept[ticket] = (number, version)
        assert list(entries) == list(kept)
    assert [(ticket, (entry.offset, entry.newest_version)) for ticket, entry in entries.items()] == list(kept.items())


# --- what it costs -------------------------------------------------------------------------------------------------------------------


def count_work(folder, monkeypatch, work) -> dict[str, int]:
    """Records whose header or rows were read, and looks at groups, while `work` ran on the journal's index."""
    counts = {"headers": 0, "rows": 0, "looks": 0}
    with monkeypatch.context() as patch:

        def count(name, owner, attribute):
            original = getattr(owner, attribute)

            def counted(*given, **named):
                counts[name] += 1
                return original(*given, **named)

            patch.setattr(owner, attribute, counted)

        count("headers", messages, "_read")
        count("rows", Entry, "_read_rows")
        count("looks", GroupEntries, "__getitem__")
        work(read_index(folder))
    return counts


WORK = {
    "list": lambda index: list(summarize_steps(index)),
    "best": lambda index: choose_attempts(index, read_steps(index), Wanted("best"), 1),
    "newest": lambda index: choose_attempts(index, read_steps(index), Wanted(), 3, {1}),
    "steps": lambda index: list(read_steps(index).list_tickets_by_step()),
}


@pytest.mark.parametrize("name", list(WORK))
def test_every_record_is_looked_at_once_and_its_rows_never(tmp_path, monkeypatch, name):
    sizes = (6, 12, 24)
    counts = []
    for steps in sizes:
        write(tmp_path / str(steps), steps)
        counts.append(count_work(tmp_path / str(steps), monkeypatch, WORK[name]))
    records = [steps * 6 for steps in sizes]
    assert [count["headers"] for count in counts] == records
    assert [count["rows"] for count in counts] == [0, 0, 0]
    for count, steps in zip(counts, sizes, strict=True):
        assert count["looks"] <= 2 * 5 * steps


def test_a_million_attempts_would_have_some_bytes_each(tmp_path):
    """The bytes that an index holds for a further group of eight attempts; its header alone would be more than a thousand bytes."""
    held = []
    for steps in (2, 20, 120):
        write(tmp_path / str(steps), steps)
        gc.collect()
        tracemalloc.start()
        index = read_index(tmp_path / str(steps))
        groups = read_steps(index)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert isinstance(groups, GroupSteps)
    # the first has paid for what is made once
    assert (held[2] - held[1]) / (100 * 5) < 500


@pytest.mark.parametrize("name", list(WORK))
def test_rows_are_held_of_one_record_at_a_time(tmp_path, name):
    """Records of 0.8 MB each, of which a reader once held all of a segment, and all attempts to choose from."""
    write(tmp_path / "long", 6, tokens=100_000)
    (segment,) = (tmp_path / "long").glob("*.arrow")
    size = segment.stat().st_size / 30
    assert size > 800_000
    WORK[name](read_index(tmp_path / "long"))
    tracemalloc.start()
    WORK[name](read_index(tmp_path / "long"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3.5 * size


def test_only_one_group_is_held_while_tokens_are_searched(tmp_path):
    write(tmp_path, 12, tokens=50_000)
    index = read_index(tmp_path)
    groups = read_steps(index)
    wanted = Wanted("best", fits=lambda tokens: len(tokens) > 0)
    tracemalloc.start()
    chosen = choose_attempts(index, groups, wanted, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert chosen.count > 300
    assert peak < 3.5 * 60_000 * MEMBERS


def test_rows_are_read_without_pandas(journal):
    """It is imported by Arrow's `to_numpy`, where it is installed: a second of CPU time and 50 MB, whatever the journal."""
    code = (
        "import sys; from pathlib import Path; from skyrl_engine.rollout.journal_index import read_index\n"
        "index = read_index(Path(sys.argv[1])); index.groups[0].group(); index.groups[0].read_tokens(); index.learned[1].read_learned()\n"
        "print('pandas' in sys.modules)"
    )
    outcome = subprocess.run([sys.executable, "-c", code, str(journal)], capture_output=True, text=True, check=True)
    assert outcome.stdout == "False\n"


def test_sessions_that_go_on_cost_what_they_take_back(tmp_path, monkeypatch):
    """A hundred marks of sessions over a hundred groups that all of them keep: none is looked at again."""
    with open_journal(tmp_path, run="x") as journal:
        for ticket in range(100):
            journal.append(plain_group(ticket))
        for _ in range(100):
            journal.record_resume(0)
    looks = []
    look = GroupEntries.__getitem__
    monkeypatch.setattr(GroupEntries, "__getitem__", lambda self, ticket: (looks.append(ticket), look(self, ticket))[1])
    assert len(journal_index.read_index(tmp_path).groups) == 100
    assert looks == []
