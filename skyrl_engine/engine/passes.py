"""Passes over the ranks as the controller sees them: shards are cut and placed, the work is run, and outputs are merged."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field, frozen

from skyrl_engine.contracts.kinds.collator import measure_lengths
from skyrl_engine.contracts.kinds.reducer import PerSequence, TokenWeights
from skyrl_engine.contracts.values.buffers import ReusableJoin
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import BatchOutput, Metric, RankOutput
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MiniBatchPlan
from skyrl_engine.contracts.values.rollout_columns import ROLLOUT_STALENESS
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.plan import Plan
from skyrl_engine.engine.results import PassResult, counts_of, outputs_without_tokens, refuse_not_finite
from skyrl_engine.engine.setting_apart import set_apart
from skyrl_engine.engine.zero_gradients import find_work
from skyrl_engine.objective.policy_metrics import OLD_LOGPROBS, ROLLOUT_LOGPROBS
from skyrl_engine.spans import Spans
from skyrl_engine.workers.dispatch import PlacedShard, batch_structure, compact_weights, cut, merge_outputs, plan_batch
from skyrl_engine.workers.future import Future
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.worker import Pass, RankReply


@frozen(eq=False)
class PlacedAhead:
    """Shards of a plan's first mini-batch that were placed before their turn, under the parts and with the columns of that time."""

    plan: Plan
    assembly: Assembly
    columns: tuple[str, ...]
    placed: list[PlacedShard]

    def is_of(self, plan: Plan, mini_batch: int, assembly: Assembly, columns: Sequence[str]) -> bool:
        """Say whether placing this mini-batch now would give the same shards."""
        return self.plan is plan and mini_batch == 0 and self.assembly is assembly and self.columns == tuple(columns)


@define(eq=False)
class Passes:
    """The controller's side of every pass, with the CPU time that it takes. `assembly` holds the parts in force."""

    assembly: Assembly
    group: WorkerGroup
    spans: Spans = field(factory=Spans, init=False)
    _join: ReusableJoin = field(factory=ReusableJoin, init=False)
    _ahead: PlacedAhead | None = field(default=None, init=False)

    def plan(self, columns: SampleColumns, layout: Layout) -> Plan:
        """Cut a batch with the collator."""
        with self.spans("plan"):
            return Plan(columns, plan_batch(self.assembly.collator, columns, layout))

    def set_apart(self, plan: Plan) -> Plan:
        """Cut a plan again where samples of it are known to have no gradient; the plan itself where none is."""
        with self.spans("plan"):
            work = find_work(plan.columns, self.assembly)
            if not work.any():
                return plan
            collator = self.assembly.collator
            cut, shares = set_apart(collator, measure_lengths(collator.product, plan.columns), plan.cut, work)
            return evolve(plan, cut=cut, shares=shares)

    def columns_of(self, work: Pass) -> list[str]:
        """Name the columns that a learning pass reads on the ranks."""
        watched = (OLD_LOGPROBS, ROLLOUT_LOGPROBS, ROLLOUT_STALENESS) if "policy" in work.watch else ()
        return [name for name in (*self.assembly.objective.columns, *watched) if name not in work.bound]

    def weigh_and_ship(self, plan: Plan, mini_batch: int, columns: Sequence[str]) -> list[PlacedShard]:
        """Send shards of a mini-batch with the reducer's weights on their way to the ranks, or give those that were placed ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.is_of(plan, mini_batch, self.assembly, columns):
            return ahead.placed
        chosen = plan.cut.mini_batches[mini_batch]
        with self.spans("reduce"):
            structure = batch_structure(
                plan.columns,
                chosen,
                self.assembly.context.max_sequence_length,
                self._join,
                self.assembly.reducer,
                mini_batches=len(plan),
            )
            weights = compact_weights(self.assembly.reducer, structure)
        return self._ship(plan.columns, chosen, weights, columns)

    def place_ahead(self, plan: Plan, columns: Sequence[str]) -> None:
        """Place the shards of a plan's first mini-batch now, for the next `weigh_and_ship`, which drops those of another plan."""
        self._ahead = PlacedAhead(plan, self.assembly, tuple(columns), self.weigh_and_ship(plan, 0, columns))

    def forward(
        self, plan: Plan, work: Pass, *, needs: Sequence[str], divisors: npt.NDArray[np.float64] | None = None
    ) -> Future[list[RankOutput]]:
        """Run one pass over every mini-batch, each token weighing its loss weight, over its sample's entry of `divisors` float64[N]."""
        passes = []
        for mini_batch in plan.cut.mini_batches:
            weights = PerSequence(np.ones(len(mini_batch.samples)) if divisors is None else divisors[mini_batch.samples])
            passes.append(self.run(work, self._ship(plan.columns, mini_batch, weights, needs)))
        return Future(lambda: [output for pass_ in passes for output in pass_.result()])

    def learn(
        self, work: Pass, plan: Plan, mini_batch: int, placed: Sequence[PlacedShard], meanwhile: Callable[[], None]
    ) -> list[RankOutput]:
        """Run a pass with gradients over a mini-batch of a plan, and `meanwhile` while the ranks are at it; outputs hold all its samples.

        Those that were set apart are computed without gradients, or not at all, and then have outputs without a token.
        """
        if plan.shares is None:
            outputs_of_all = self.run(work, placed)
            meanwhile()
            return outputs_of_all.result()
        learned, scored = plan.shares[mini_batch].learned, plan.shares[mini_batch].scored
        passes = []
        if scored:
            # first, as every backend is used: no pass comes between a gradient and its step
            passes.append(self.run(evolve(work, mode="evaluate", micro_batches=(learned, learned + scored)), placed))
        passes.append(self.run(evolve(work, micro_batches=(0, learned)), placed))
        meanwhile()
        outputs = [output for pass_ in passes for output in pass_.result()]
        left_out = plan.without_work(mini_batch)
        return [*outputs, outputs_without_tokens(plan.columns, left_out, outputs)] if len(left_out) else outputs

    def run(self, work: Pass, placed: Sequence[PlacedShard]) -> Future[list[RankOutput]]:
        """Run a pass over shards that were placed; one output per rank."""

        def collect_outputs(replies: list[RankReply]) -> list[RankOutput]:
            for reply in replies:
                self.spans.add(reply.cpu_seconds)
            return [reply.output for reply in replies]

        return self.group.run(work, placed).then(collect_outputs)

    def merge(self, outputs: Sequence[RankOutput], plan: BatchPlan) -> BatchOutput:
        """Join what the ranks gave, in the order of the columns."""
        with self.spans("merge"):
            return merge_outputs(self.assembly.merger, outputs, plan)

    def collect_evaluation(self, outputs: Sequence[RankOutput], plan: Plan, total: float) -> PassResult:
        """Give the result of a pass without gradients: the loss and each part's contribution are means over the weight `total`."""
        output = self.merge(outputs, plan.cut)
        means = {
            name: Metric.mean(metric.value, total)
            for name, metric in output.metrics.items()
            if name == "loss" or name.startswith("objective/")
        }
        return PassResult({**output.metrics, **means, **counts_of(plan.columns, plan.cut)}, output, self.spans.drain())

    def collect_train(self, outputs: Sequence[RankOutput], plan: Plan, part: BatchPlan, step: int) -> PassResult:
        """Give the result of a pass with gradients over a part of a plan. Raises ModelError where its loss is not finite."""
        refuse_not_finite(outputs, step)
        output = self.merge(outputs, part)
        return PassResult({**output.metrics, **counts_of(plan.columns, part)}, output, self.spans.drain())

    def _ship(
        self, columns: SampleColumns, mini_batch: MiniBatchPlan, weights: TokenWeights, needs: Sequence[str]
    ) -> list[PlacedShard]:
        with self.spans("dispatch"):
            return self.group.put(cut(columns, mini_batch, weights, needs, self._join))
