"""The gradient that ranks add up between two steps: which mini-batches are in it, and which of them may be."""

from attrs import define, field

from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.plan import Plan
from skyrl_engine.engine.results import PassResult
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.workers.dispatch import PlacedShard
from skyrl_engine.workers.future import Future


@define(eq=False)
class MiniBatchGradient:
    """A mini-batch whose gradient is being added up: its shards on the ranks, its labels, its micro-batches that are done, their passes."""

    plan: Plan
    mini_batch: int
    placed: list[PlacedShard]
    labels: str | None = None
    done: set[int] = field(factory=set)
    passes: list[Future[PassResult]] = field(factory=list)

    @property
    def missing(self) -> list[int]:
        """Numbers of the micro-batches that no call has run, ascending."""
        return sorted(set(range(self.plan.micro_batches(self.mini_batch))) - self.done)


@define(eq=False)
class Accumulation:
    """Everything that was accumulated since the last step.

    Weights of tokens count within their mini-batch, so gradients of two mini-batches do not add up to anything, unless the reducer's weights
    know no batch and the backend has no terms that are means over a step.
    """

    assembly: Assembly
    parts: list[MiniBatchGradient] = field(factory=list)

    def of(self, plan: Plan, mini_batch: int) -> MiniBatchGradient | None:
        """The part of this mini-batch of this plan, if it was begun."""
        return next((part for part in self.parts if part.plan is plan and part.mini_batch == mini_batch), None)

    def to_run(
        self, plan: Plan, mini_batch: int, micro_batches: tuple[int, int] | None, labels: str | None = None
    ) -> tuple[int, int]:
        """Return the half-open range [start, stop) of micro-batches to run now; None stands for all that are left.

        Raises UnsupportedError for another mini-batch than may be added, for other labels than its first micro-batches had, and for
        micro-batches that were run already or do not exist.
        """
        self._refuse_mixing(plan, mini_batch)
        part = self.of(plan, mini_batch)
        if part is not None and part.labels != labels:
            raise UnsupportedError(
                f"mini-batch {mini_batch} was begun with labels = {part.labels!r}, and goes on with {labels!r}",
                remedy="Give the labels of its first micro-batches",
            )
        left = list(range(plan.micro_batches(mini_batch))) if part is None else part.missing
        if not left:
            raise UnsupportedError(f"mini-batch {mini_batch} was run already", remedy="Call optim_step, or drop it with discard")
        first, last = micro_batches or (left[0], left[-1] + 1)
        if first >= last or not set(range(first, last)) <= set(left):
            raise UnsupportedError(
                f"micro-batches {first} to {last - 1} of mini-batch {mini_batch} are not all left to be run, only {left}",
                remedy="Run every micro-batch of a mini-batch once, then optim_step",
            )
        return first, last

    def refuse_incomplete(self) -> None:
        """Raise UnsupportedError where a step would be one of nothing, or of a part of a mini-batch."""
        if not self.parts:
            raise UnsupportedError("no gradient was accumulated since the last step", remedy="Call forward_backward first")
        self.refuse_parts()

    def refuse_parts(self) -> None:
        """Raise UnsupportedError where a mini-batch was run in part."""
        for part in self.parts:
            if part.missing:
                raise UnsupportedError(
                    f"micro-batches {part.missing} of mini-batch {part.mini_batch} were not run, so the gradient is a part of one",
                    remedy="Run them with forward_backward, or drop the gradient with discard",
                )

    def refuse_any(self) -> None:
        """Raise UnsupportedError where something is accumulated."""
        if self.parts:
            raise UnsupportedError(
                "a gradient is accumulated already, and train takes steps on whole mini-batches",
                remedy="Call optim_step first, or drop the gradient with discard",
            )

    def _refuse_mixing(self, plan: Plan, mini_batch: int) -> None:
        if not 0 <= mini_batch < len(plan):
            raise UnsupportedError(
                f"the plan has {len(plan)} mini-batches, and number {mini_batch} was asked for", remedy="Count from 0"
            )
        if not self.parts or self.of(plan, mini_batch) is not None:
            return
        reducer = self.assembly.reducer
        if not getattr(reducer.product, "additive", False):
            raise UnsupportedError(
                f"{reducer.label} weighs tokens within their mini-batch, so the gradient of another mini-batch cannot be added to it",
                remedy="Call optim_step between mini-batches, or use the reducer sum, whose weights know no batch",
            )
        if self.assembly.description.means_over_step:
            raise UnsupportedError(
                "the backend adds terms that are means over an optimizer step, so gradients of two mini-batches do not add up",
                remedy="Call optim_step between mini-batches, or set the coefficients of those terms (of routers) to 0",
            )
