"""Bar B4: CPU nanoseconds per token to lay trajectories out as columns, and to estimate advantages: 512 attempts of about 2,000 tokens, in 5
turns and in 100.

Rounds are interleaved in one process; a figure is the least CPU time. The bars hold where memory that was freed stays with the process, and in
few turns: new pages may take a virtual machine longer than all else takes together, so both are printed. Run with `nox -s bench`.
"""

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine

from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.rollout import SEGMENT_OBSERVED, SEGMENT_PROMPT, SEGMENT_SAMPLED, Group, Trajectory, VersionSpans
from skyrl_engine.rollout.columns import to_columns
from skyrl_engine.training.rl.trainer import advantage_batch
from skyrl_engine_advantages.options import GaeOptions, GrpoOptions
from skyrl_engine_advantages.vectorized import gae, grpo

GROUPS, MEMBERS, TOKENS = 64, 8, 2000
ROUNDS = 15
BARS = {"to columns": 5.0, "grpo": 10.0, "gae": 40.0}
"""Nanoseconds per token, in few turns."""

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1


def groups_of(turns: int) -> list[Group]:
    draw = np.random.default_rng(0)
    kinds = np.array([SEGMENT_PROMPT, *[SEGMENT_SAMPLED, SEGMENT_OBSERVED] * (turns - 1), SEGMENT_SAMPLED], dtype=np.uint8)

    def attempt(ticket: int, member: int) -> Trajectory:
        lengths = draw.integers(1, 2 * TOKENS // len(kinds), len(kinds))
        total, sampled = int(lengths.sum()), int(lengths[kinds == SEGMENT_SAMPLED].sum())
        rewards = np.zeros(sampled)
        rewards[-1] = draw.random()
        return Trajectory(
            ticket=ticket,
            member=member,
            token_ids=draw.integers(0, 150_000, total).astype(np.int32),
            kinds=kinds,
            segment_offsets=offsets_of(lengths),
            logprobs=-draw.random(sampled).astype(np.float32),
            versions=VersionSpans.one(0, sampled),
            rewards=rewards,
        )

    return [Group(ticket, "words", str(ticket), 0, tuple(attempt(ticket, k) for k in range(MEMBERS))) for ticket in range(GROUPS)]


def main() -> None:
    batches = {f"{turns} turns": groups_of(turns) for turns in (5, 100)}
    tokens = {
        name: sum(len(trajectory.token_ids) for group in groups for trajectory in group.trajectories)
        for name, groups in batches.items()
    }
    works: dict[tuple[str, str], Callable[[], object]] = {}
    for name, groups in batches.items():
        works["to columns", name] = partial(to_columns, groups, environments=("words",))
        columns = to_columns(groups, environments=("words",))
        values = np.random.default_rng(1).normal(size=len(columns.loss_weight)).astype(np.float32)
        batch = advantage_batch(columns.with_columns({"old_values": values}), ("old_values",))
        works["grpo", name] = partial(grpo, batch, GrpoOptions())
        works["gae", name] = partial(gae, batch, GaeOptions())
    print(machine())
    for memory in ("new", "kept"):
        if memory == "kept":
            # glibc alone: what is freed is neither given back nor mapped again
            mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
            if mallopt is None or not all(mallopt(name, 2**30) for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD)):
                print("kept memory: this C library cannot be asked for it")
                return
        for (work, name), seconds in interleave(works, ROUNDS).items():
            figure = 1e9 * seconds / tokens[name]
            bar = compare_with_bar(figure, at_most=BARS[work]) if memory == "kept" and name == "5 turns" else ""
            print(f"{work}, {name}, {tokens[name]:,} tokens, {memory} memory: {figure:.1f} ns per token {bar}".rstrip())


if __name__ == "__main__":
    main()
