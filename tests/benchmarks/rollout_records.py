"""Bars B5 and B6: the cost of the journal per 1,000 tokens, and of the ledger per event with 10,000 tickets alive.

CPU time of one thread, the median of several rounds. Run with `nox -s bench`.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine

from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.rollout import SEGMENT_OBSERVED, SEGMENT_PROMPT, SEGMENT_SAMPLED, Group, Trajectory, VersionSpans
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.journal_index import read_groups
from skyrl_engine.rollout.ledger import RolloutLedger

MILLISECONDS_PER_THOUSAND_TOKENS = 1.0
MICROSECONDS_PER_EVENT = 20.0


def group(ticket: int, members: int = 8, prompt: int = 60, tokens: int = 150) -> Group:
    """A group of two turns per attempt, shorter than what models write: the worst case for a cost per token."""
    lengths = [prompt, tokens // 2, 20, tokens // 2]
    sampled = 2 * (tokens // 2)
    one = {
        "token_ids": np.arange(sum(lengths), dtype=np.int32),
        "kinds": np.array([SEGMENT_PROMPT, SEGMENT_SAMPLED, SEGMENT_OBSERVED, SEGMENT_SAMPLED], dtype=np.uint8),
        "segment_offsets": offsets_of(lengths),
        "logprobs": np.full(sampled, -0.7, dtype=np.float32),
        "versions": VersionSpans.one(3, sampled),
        "rewards": np.zeros(sampled),
        "stops": ("stop", "stop"),
        "parts": {"exact": 1.0, "format": 0.5},
        "info": {"answer": "something to read"},
        "seconds": {"queue": 0.1, "generate": 1.2, "environment": 0.01},
    }
    return Group(
        ticket, "spell", f"task-{ticket}", 3, tuple(Trajectory(ticket=ticket, member=number, **one) for number in range(members))
    )


def journal_cost(rounds: int = 7, count: int = 200) -> tuple[float, float]:
    """Milliseconds of CPU per 1,000 tokens, to write and to read."""
    groups = [group(ticket) for ticket in range(count)]
    thousands = sum(len(each.token_ids) for one in groups for each in one.trajectories) / 1000
    writing, reading = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.process_time()
            with open_journal(Path(folder), run="benchmark") as journal:
                for each in groups:
                    journal.append(each)
            middle = time.process_time()
            assert sum(1 for _ in read_groups(Path(folder))) == count
            writing.append(1000 * (middle - begin) / thousands)
            reading.append(1000 * (time.process_time() - middle) / thousands)
    return median(writing), median(reading)


def ledger_cost(order: str, alive: int = 10_000, steps: int = 12) -> float:
    """Microseconds of CPU per event with so many tickets alive; a fifth of them is dropped, and they finish in any order."""
    groups = alive // 4
    ledger = RolloutLedger(groups=groups, staleness=3, order=order, max_drop_share=0.9)
    draw = np.random.Generator(np.random.PCG64(0))
    events = 0
    begin = time.process_time()
    while ledger.step < steps:
        tickets = list(ledger.start_tickets())
        running = np.array(ledger.running())
        events += len(tickets)
        chosen = draw.permutation(running)[: max(1, len(running) // 2)].tolist()
        for ticket in chosen:
            if draw.random() < 0.2:
                ledger.drop_group(ticket, "zero variance")
            else:
                ledger.finish_group(ticket)
            events += 1
        taken = ledger.next_batch(ledger.step + 1)
        if taken is not None:
            ledger.finish_step(ledger.step + 1, taken)
            ledger.publish(ledger.step)
            events += 2
    return 1e6 * (time.process_time() - begin) / events


def main() -> None:
    print(machine())
    write, read = journal_cost()
    bar = compare_with_bar(write, at_most=MILLISECONDS_PER_THOUSAND_TOKENS)
    print(f"B5 journal: {write:.3f} ms CPU per 1,000 tokens to write {bar}, {read:.3f} to read")
    costs = {order: median(ledger_cost(order) for _ in range(3)) for order in ("finished", "ticket")}
    for order, cost in costs.items():
        bar = compare_with_bar(cost, at_most=MICROSECONDS_PER_EVENT)
        print(f"B6 ledger, order {order}: {cost:.1f} us CPU per event with 10,000 tickets alive {bar}")


if __name__ == "__main__":
    main()
