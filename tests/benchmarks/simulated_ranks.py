"""CPU seconds of the controller for one step over a million samples, on 1,024 and on 8,192 simulated ranks.

A step as `Engine` makes it: plan the batch, weigh its tokens, cut and place a shard per rank, call every rank, and merge the answers in the
caller's order. Ranks are simulated: each answers at once with the output of its samples, so that the figures are the controller's alone,
without serializing and sending, which `controller_to_actors.py` measures with real actors. A sample has 16 to 48 tokens, half of them response.
Rows are packed to 4,096 tokens, micro-batches to 16,384. Least CPU time of this process, rounds one after the other. Run with `nox -s bench`.
"""

from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
from attrs import evolve
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine

from skyrl_engine.contracts.kinds.generator import GenerationRequest, Sampling
from skyrl_engine.contracts.values.buffers import ReusableJoin
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import Metric, RankOutput
from skyrl_engine.contracts.values.plan import BatchPlan, Layout
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.contracts.values.topology import RankCoords, Topology
from skyrl_engine.testing.subject import part_of
from skyrl_engine.workers.dispatch import PlacedShard, Shard, batch_structure, compact_weights, cut, merge_outputs, plan_batch
from skyrl_engine.workers.generator_hosts import RankHost
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.worker import Pass, RankReply
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_mergers.ordered import OrderedMerger
from skyrl_engine_reducers.plugin import MeanConfig, token_mean

SAMPLES, MICRO_BATCH_TOKENS, ROUNDS = 1_000_000, 16_384, 3
BARS = {1_024: 1.5, 8_192: 3.0}
"""Most CPU seconds of a step, by the number of ranks."""

SAMPLING_BARS = {64: (0.002, 0.001), 1_024: (0.02, 0.01), 8_192: (0.2, 0.06)}
"""Most CPU seconds of handing a request to every rank, and of a poll of all, by the number of ranks that sample; a poll is to be answered in
`polls.RankPolls.slice_seconds`, 0.25 s of 64 ranks, 0.5 of 1,024 and 4 of 8,192."""


class AnsweringRanks:
    """A transport whose ranks answer every pass at once with `answers`."""

    concurrent, ended, ray_resources = True, None, None

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self._posted: set[int] = set()

    def put(self, shard: Shard) -> Shard:
        return shard

    def send(self, messages: Sequence[Any]) -> Callable[[], list[Any]]:
        assert len(messages) == len(self.answers), "one message per rank"
        return lambda: self.answers

    @property
    def posted_ranks(self) -> set[int]:
        return self._posted

    def post(self, rank: int, message: Any) -> None:
        self._posted.add(rank)

    def collect(self, timeout: float) -> dict[int, Any]:
        posted, self._posted = self._posted, set()
        return {rank: self.answers[rank] for rank in posted}

    def close(self) -> None:
        pass


class Controller:
    """The parts of a step that the controller computes, one method each; every part takes what the one before it left."""

    columns: SampleColumns
    plan: BatchPlan
    placed: list[PlacedShard]
    outputs: list[RankOutput]

    def __init__(self, ranks: int) -> None:
        self._layout = Layout(dp=ranks, micro_batch_tokens=MICRO_BATCH_TOKENS)
        self._ranks = AnsweringRanks()
        self._group = WorkerGroup(self._ranks, Topology(dp=ranks))
        self._join = ReusableJoin()
        self._collator = part_of(PackedCollator(), "packed", "collator")
        self._reducer = part_of(token_mean.skyrl_engine_make_reducer(MeanConfig()), "token_mean", "reducer")
        self._merger = part_of(OrderedMerger(), "ordered", "merger")
        self.columns = make_columns()

    def plan_step(self) -> None:
        self.plan = plan_batch(self._collator, self.columns, self._layout)

    def dispatch(self) -> None:
        (mini_batch,) = self.plan.mini_batches
        structure = batch_structure(self.columns, mini_batch, None, self._join, self._reducer)
        weights = compact_weights(self._reducer, structure)
        self.placed = self._group.put(cut(self.columns, mini_batch, weights, ("old_logprobs",), self._join))

    def call(self) -> None:
        replies = self._group.run(Pass("forward_backward"), self.placed).result()
        self.outputs = [reply.output for reply in replies]

    def merge(self) -> None:
        merge_outputs(self._merger, self.outputs, self.plan)

    def answer(self) -> None:
        """Compute, uncounted, what every rank will answer."""
        whole = self.columns
        scored = Ragged(np.arange(whole.action_offsets[-1], dtype=np.int32), whole.action_offsets)
        fields = {name: Ragged(whole.columns["old_logprobs"], whole.action_offsets) for name in ("logprobs", "token_loss")}
        everything = RankOutput(whole.sample_ids, np.diff(whole.action_offsets), scored, fields)
        (mini_batch,) = self.plan.mini_batches
        self._ranks.answers = []
        for dp in range(self._layout.dp):
            output = evolve(
                everything.take(mini_batch.rank_samples(dp)), metrics={"loss": Metric.sum(1.0)}, coords=RankCoords(rank=dp, dp=dp)
            )
            self._ranks.answers.append(RankReply(output, {}))


def make_columns() -> SampleColumns:
    generator = np.random.default_rng(0)
    actions = generator.integers(8, 25, SAMPLES)
    token_offsets, action_offsets = offsets_of(2 * actions), offsets_of(actions)
    return SampleColumns.create(
        input_ids=generator.integers(0, 32_000, token_offsets[-1], dtype=np.int32),
        token_offsets=token_offsets,
        action_offsets=action_offsets,
        columns={"old_logprobs": generator.random(action_offsets[-1], dtype=np.float32)},
        sample_ids=generator.permutation(SAMPLES) * 3 + 7,
    )


def measure_step(ranks: int) -> dict[str, float]:
    """Return the least CPU seconds of each part."""
    controller = Controller(ranks)
    controller.plan_step()
    controller.answer()
    parts: dict[str, Callable[[], None]] = {
        "plan": controller.plan_step,
        "dispatch": controller.dispatch,
        "calls": controller.call,
        "merge": controller.merge,
    }
    return interleave(parts, ROUNDS)


def measure_polls(ranks: int) -> dict[str, float]:
    """Return the least CPU seconds of handing a request to every rank's generator, and of a poll of all of them."""
    answers = AnsweringRanks()
    answers.answers = [[] for _ in range(ranks)]
    host = RankHost(WorkerGroup(answers, Topology(dp=ranks)))
    sampling, prompt = Sampling(max_tokens=16), np.ones(16, dtype=np.int32)

    numbers = count()

    def submit() -> None:
        host.submit([GenerationRequest(number, prompt, sampling, seed=0, session=number) for number in islice(numbers, ranks)])

    return interleave({"submit": submit, "poll": lambda: host.poll(1e-9)}, ROUNDS)


def main() -> None:
    print(f"{machine()}, NumPy {np.__version__}; {SAMPLES:,} samples, {ROUNDS} rounds")
    for ranks, (most_of_submits, most_of_polls) in SAMPLING_BARS.items():
        sampling = measure_polls(ranks)
        submits = compare_with_bar(sampling["submit"], at_most=most_of_submits)
        polls = compare_with_bar(sampling["poll"], at_most=most_of_polls)
        print(
            f"{ranks:,} ranks that sample: a request to each {sampling['submit']:.4f} CPU s {submits}, a poll {sampling['poll']:.4f} {polls}"
        )
    for ranks, most in BARS.items():
        parts = measure_step(ranks)
        whole = sum(parts.values())
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        print(f"{ranks:,} ranks: {whole:.2f} CPU s {compare_with_bar(whole, at_most=most)}: {shown}")


if __name__ == "__main__":
    main()
