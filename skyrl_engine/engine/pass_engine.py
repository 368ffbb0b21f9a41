"""Passes over batches on ranks that were started already: plan, evaluate, differentiate. `Engine` adds a model's files, steps and samples."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from attrs import evolve

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.engine.accumulation import Accumulation, MiniBatchGradient
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.automatic import find_largest_unit
from skyrl_engine.engine.passes import Passes
from skyrl_engine.engine.plan import Plan
from skyrl_engine.engine.results import PassResult, weight_per_sample
from skyrl_engine.engine.validation import labels_in, name_call_in_errors, refuse_no_teacher
from skyrl_engine.objective.policy_metrics import Watched
from skyrl_engine.workers.future import Future
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.messages import BeginProfile, DropGradient, EndProfile, GatherGradients, GatherWeights
from skyrl_engine.workers.scored_tokens import Selection
from skyrl_engine.workers.worker import Pass

NOTHING_BOUND: Final[Mapping[str, str]] = MappingProxyType({})


class PassEngine:
    """The part of `Engine` that plans batches, evaluates and differentiates: all that a proof needs, whose ranks keep their model.

    `layout` is the default cut of `plan`, and `step` counts the optimizer steps that were taken.
    """

    def __init__(self, assembly: Assembly, group: WorkerGroup, layout: Layout) -> None:
        self.group = group
        self.step = 0
        self._layout = layout
        self._passes = Passes(assembly, group)
        self._gradient = Accumulation(assembly)

    @property
    def assembly(self) -> Assembly:
        """The parts in force; `Engine.use_loss` puts another there."""
        return self._passes.assembly

    def begin_profile(self, path: str | Path, *, memory: bool = False) -> None:
        """Record with torch's profiler what every rank does, until `end_profile`, for files whose names begin with `path` and the rank.

        `memory` records every allocation too. Raises UnsupportedError for that where ranks do not compute on CUDA devices.
        """
        self.group.refuse_ended()
        self.group.ask(BeginProfile(Path(path).resolve(), memory))

    def end_profile(self) -> None:
        """Write `<path>-rank-N.trace.json.gz`, in Chrome's format, and `.memory.pickle` for https://pytorch.org/memory_viz."""
        self.group.refuse_ended()
        self.group.ask(EndProfile())

    @property
    def vocabulary_size(self) -> int | None:
        """The number of token ids that the model knows; None where nobody says."""
        return None

    def plan(
        self,
        columns: SampleColumns,
        *,
        mini_batch_size: int | None = None,
        micro_batch_rows: int | None = None,
        micro_batch_tokens: int | None = None,
        skip_zero_gradients: bool = False,
        model: str | None = None,
    ) -> Plan:
        """Cut a batch into mini-batches, ranks, micro-batches and rows, for all passes over it.

        `mini_batch_size` is the number of samples of an optimizer step (None: all of them); groups are never cut. `micro_batch_rows` or
        `micro_batch_tokens` stand for the configured size.

        `skip_zero_gradients` sets samples apart whose gradient is known to be 0, so that `train` computes none of them: those without a token
        that carries loss, and those of advantages of 0, which the columns hold then, where every loss is `homogeneous` in them. No sample is
        where leaving it out could change another's gradient: with corrections, losses of pairs, parts that are `batch_local`, terms of the
        backend that are means over a step, or dropout.

        `model` names the frozen model whose tokens the columns hold; None: those of the trained model.

        Raises DataError for a sample that fits nowhere or holds a token that the model does not know, and UnsupportedError for one that is
        longer than the length for which rotary frequencies are fixed (`model.rotary_length`).
        """
        self.group.refuse_ended()
        self._check_columns(columns, model)
        layout = evolve(self._layout, mini_batch_size=mini_batch_size)
        if micro_batch_rows is not None or micro_batch_tokens is not None:
            layout = evolve(layout, micro_batch_rows=micro_batch_rows, micro_batch_tokens=micro_batch_tokens)
        elif self.assembly.budget_grows and layout.micro_batch_tokens is not None:
            largest = find_largest_unit(columns, self.assembly.collator.product.rows, self.assembly.description.topology)
            layout = evolve(layout, micro_batch_tokens=max(layout.micro_batch_tokens, largest))
        plan = self._passes.plan(columns, layout)
        return self._passes.set_apart(plan) if skip_zero_gradients and not self._draws_masks else plan

    def evaluate(
        self,
        plan: Plan,
        *,
        temperature: float = 1.0,
        per_token_outputs: bool = True,
        over: Literal["tokens", "sequences"] = "tokens",
        tokens: Selection = "loss",
        labels: str | None = None,
        watch: Iterable[Watched] = (),
    ) -> Future[PassResult]:
        """Compute the objective of a batch without gradients.

        `loss`, and each part's contribution to it, is the mean over loss weights, whatever reducer the training uses: the sum of each term
        times its loss weight, over the sum of the loss weights, divided once however many passes are combined. `over` "sequences" takes that
        mean within each sequence, and then the mean of all sequences that carry loss. `tokens`, `labels` and `watch` as in `forward_backward`.
        """
        self.group.refuse_ended()
        refuse_no_teacher(self.assembly, self.group.frozen)
        with name_call_in_errors("evaluate"):
            work = Pass("evaluate", self.step, per_token_outputs, temperature, tokens=tokens, labels=labels, watch=frozenset(watch))
        divisors, total = None, float(plan.columns.loss_weight.sum(dtype=np.float64))
        if over == "sequences":
            sums = weight_per_sample(plan.columns)
            divisors, total = np.where(sums == 0, 1.0, sums), float(np.count_nonzero(sums))
        needs = (*self.assembly.objective.columns, *labels_in(plan.columns, labels, tokens, self.vocabulary_size))
        outputs = self._passes.forward(plan, work, needs=needs, divisors=divisors)
        return outputs.then(lambda merged: self._passes.collect_evaluation(merged, plan, total))

    def forward_backward(
        self,
        plan: Plan,
        mini_batch: int = 0,
        *,
        micro_batches: tuple[int, int] | None = None,
        temperature: float = 1.0,
        per_token_outputs: bool = True,
        tokens: Selection = "loss",
        labels: str | None = None,
        bound: Mapping[str, str] = NOTHING_BOUND,
        watch: Iterable[Watched] = (),
    ) -> Future[PassResult]:
        """Differentiate the objective of one mini-batch, and add the gradient to what is accumulated on the ranks.

        `micro_batches` is the half-open range [start, stop) of micro-batches that every rank runs now, out of `plan.micro_batches(mini_batch)`;
        None: all that are not done. However a mini-batch is cut into calls, the gradient is the same.

        Per-token outputs hold the model's scores, "logprobs" always, of the loss-carrying tokens, or with `tokens` "actions" of every response
        token; the objective is the same. `labels` names a column of token ids int64[A, 1] that the model is scored on in the place of the
        samples' own tokens, which stay its input: `logprobs` and `logits` are those of the labels then.

        `bound` names columns that this pass's own scores stand for, detached: `{"old_logprobs": "logprobs"}` makes the policy its own old one,
        so that every ratio is exactly 1. `watch` adds metrics: "policy" distances from the old and the sampling policy, "entropy" the model's.

        Raises DataError for labels that are no column of one token id per token; UnsupportedError for a micro-batch that was run already or
        begun with other labels, and for another mini-batch than the one that is being accumulated: weights of tokens count within their
        mini-batch, so gradients of two of them do not add up to anything. The exception is an additive reducer, such as `sum`, on a backend
        without terms that are means over a step.
        """
        self.group.refuse_ended()
        with name_call_in_errors("forward_backward"):
            work = self._learning_pass(per_token_outputs, temperature, bound, watch)
        work = evolve(work, tokens=tokens, labels=labels)
        first, last = self._gradient.to_run(plan, mini_batch, micro_batches, labels)
        current = self._gradient.of(plan, mini_batch)
        if current is None:
            columns = (*self._passes.columns_of(work), *labels_in(plan.columns, labels, tokens, self.vocabulary_size))
            current = MiniBatchGradient(plan, mini_batch, self._passes.weigh_and_ship(plan, mini_batch, columns), labels)
            self._gradient.parts.append(current)
        current.done |= set(range(first, last))
        work = evolve(work, micro_batches=(first, last))
        outputs = self._passes.run(work, current.placed)
        learned = outputs.then(
            lambda merged: self._passes.collect_train(merged, plan, plan.part(mini_batch, (first, last)), work.step)
        )
        current.passes.append(learned)
        return learned

    def discard(self) -> None:
        """Drop the accumulated gradient, as if the calls since the last step had never been: the next step is the same, bit for bit.

        Of a set that `add_adapters` made, its own gradient alone. Raises what an earlier call met whose result nobody took.
        """
        self.group.refuse_ended()
        self._gradient.parts.clear()
        self.group.ask(DropGradient())

    def gradients(self) -> dict[str, npt.NDArray[Any]]:
        """Gather the accumulated gradient by Hugging Face parameter name, summed over ranks, before `optim_step`."""
        self.group.refuse_ended()
        return self.group.ask(GatherGradients())[0]

    def weights(self) -> dict[str, npt.NDArray[Any]]:
        """Gather the weights by Hugging Face parameter name, adapters merged."""
        self.group.refuse_ended()
        return self.group.ask(GatherWeights())[0]

    @property
    def _draws_masks(self) -> bool:
        """Say whether training draws random masks, which depend on the rows of a pass; False where the model is not known."""
        return False

    def _check_columns(self, columns: SampleColumns, model: str | None) -> None:
        """Refuse samples that the model does not take, where the model is known; `model` names a frozen one."""

    def _learning_pass(
        self, per_token_outputs: bool, temperature: float, bound: Mapping[str, str], watch: Iterable[Watched]
    ) -> Pass:
        refuse_no_teacher(self.assembly, self.group.frozen)
        return Pass(
            "forward_backward",
            self.step + 1,
            per_token_outputs,
            temperature,
            bound=dict(bound),
            watch=frozenset(watch),
        )
