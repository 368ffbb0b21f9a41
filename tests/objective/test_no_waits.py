"""Between forward and backward the host waits for nothing: every loss, reducer and correction that is installed, on a device that counts."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from skyrl_engine.contracts.kinds.needs import ROLE_NEED
from skyrl_engine.contracts.kinds.reducer import BatchStructure
from skyrl_engine.contracts.values.outputs import Metric, RankOutput
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.errors import ResultError
from skyrl_engine.objective.behind import Later, Sent
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.objective.policy_metrics import Watched
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.testing.losses.evaluation import leaves_of
from skyrl_engine.testing.other_device import SENT_AHEAD, OtherDevice
from skyrl_engine.testing.subject import CONTEXT, part_of, select_plugin
from skyrl_engine.testing.tokens.explicit import make_varied_batch
from skyrl_engine.testing.tokens.token_batches import TokenBatch


def installed(kind: str) -> list[str]:
    return [record.name for record in Registry.discover().records(kind)]


def weigh(batch: TokenBatch, reducer: str) -> TokenBatch:
    structure = BatchStructure(
        np.linspace(0.5, 1.5, batch.tokens, dtype=np.float32),
        offsets_of(batch.lengths),
        batch.group_ids,
        batch.unit_ids,
        np.arange(len(batch)) // 2,
        CONTEXT.max_sequence_length,
    )
    return evolve(batch, weights=select_plugin("reducer", reducer, {}).make(CONTEXT).weights(structure))


class Needs:
    """The needs that `leaves_of` asks a loss for, for several plugins together."""

    def __init__(self, *needs: str) -> None:
        self.needs = needs


def run(objective: LossObjective, batch: TokenBatch, needs: Sequence[str]) -> OtherDevice:
    """One micro-batch forward and backward, and its outputs read as a backend reads them; the moments at which the host waited."""
    leaves = leaves_of(batch, Needs(*needs), torch.float32)
    micro_batch = batch.micro_batch()
    with OtherDevice() as device:
        total, output = objective({name: leaf * 1 for name, leaf in leaves.items()}, micro_batch)
        torch.autograd.backward(total)
        RankOutput.concat([output])
    return device


def objective_of(loss: Any, *corrections: Any, terms: Sequence[Any] = (), watch: frozenset[Watched] = frozenset()) -> LossObjective:
    parts = ObjectiveParts(
        part_of(loss, "main", "loss"),
        tuple(part_of(term, f"term {number}", "loss") for number, term in enumerate(terms)),
        tuple(part_of(correction, f"correction {number}", "correction") for number, correction in enumerate(corrections)),
    )
    return LossObjective(parts, seed=5, step=1, per_token_outputs=True, watch=watch)


def require_no_wait(device: OtherDevice) -> None:
    assert device.reads[: device.launched] == []
    assert device.blocking_copies == []
    # one copy of all numbers, and one of the per-token outputs
    assert [read.what for read in device.reads] == [SENT_AHEAD, SENT_AHEAD]


def list_combinations(name: str) -> Iterator[tuple[Any, str, str | None]]:
    """Every reducer and correction with which a loss may be used; corrections are of policies, which have no pairs."""
    loss = select_plugin("loss", name, {}).make(CONTEXT)
    corrections = [] if ROLE_NEED in loss.needs else installed("correction")
    for reducer in installed("reducer") if loss.reducers is None else loss.reducers:
        yield from ((loss, reducer, correction) for correction in (None, *corrections))


def require_no_wait_of(loss: Any, reducer: str, correction: str | None) -> None:
    steps = [] if correction is None else [select_plugin("correction", correction, {}).make(CONTEXT)]
    needs = tuple(dict.fromkeys([*loss.needs, *(need for step in steps for need in step.needs)]))
    require_no_wait(run(objective_of(loss, *steps), weigh(make_varied_batch(needs), reducer), needs))


@pytest.mark.parametrize("name", installed("loss"))
def test_no_loss_waits_under_any_reducer_or_correction(name: str) -> None:
    seen: set[str | None] = set()
    for loss, reducer, correction in list_combinations(name):
        if correction is None or correction not in seen:
            require_no_wait_of(loss, reducer, correction)
        seen.add(correction)


@pytest.mark.nightly
@pytest.mark.parametrize("name", installed("loss"))
def test_no_loss_waits_under_any_reducer_with_any_correction(name: str) -> None:
    for loss, reducer, correction in list_combinations(name):
        require_no_wait_of(loss, reducer, correction)


def test_a_chain_of_corrections_waits_once_for_each_after_the_first() -> None:
    """The number of tokens that an earlier one leaves over is the device's, and the next one is given that many."""
    names = installed("correction")
    steps = [select_plugin("correction", name, {}).make(CONTEXT) for name in names]
    loss = select_plugin("loss", "ppo", {}).make(CONTEXT)
    needs = tuple(dict.fromkeys([*loss.needs, *(need for step in steps for need in step.needs)]))
    device = run(objective_of(loss, *steps), make_varied_batch(needs), needs)
    assert [read.what for read in device.reads[: device.launched]] == ["nonzero()"] * (len(names) - 1)
    assert device.blocking_copies == []


def test_terms_roles_sources_and_watched_metrics_wait_for_nothing() -> None:
    dpo, entropy = (select_plugin("loss", name, {}).make(CONTEXT) for name in ("dpo", "entropy"))
    needs = ("logprobs", "entropy", "logsumexp", "mean_logprob", "ref_logprobs", "old_logprobs", "rollout_logprobs", ROLE_NEED)
    batch = make_varied_batch(needs)
    term = evolve(part_of(entropy, "entropy", "loss"), on="chosen", coefficient=0.5)
    parts = ObjectiveParts(part_of(dpo, "dpo", "loss"), (term,))
    whole = LossObjective(parts, seed=5, step=1, per_token_outputs=True, watch=frozenset(("entropy", "logits", "policy")))
    leaves = leaves_of(batch, Needs(*needs), torch.float32)
    micro_batch = batch.micro_batch()
    staleness = np.arange(batch.tokens) % 2
    samples = evolve(
        micro_batch.samples,
        sources=np.asarray(batch.unit_ids) % 2,
        columns={**micro_batch.samples.columns, "rollout_staleness": staleness},
        carrying=np.arange(batch.tokens) % 4 > 0,
    )
    with OtherDevice() as device:
        total, output = whole({name: leaf * 1 for name, leaf in leaves.items()}, evolve(micro_batch, samples=samples))
        torch.autograd.backward(total)
        metrics = RankOutput.concat([output]).metrics
    require_no_wait(device)
    assert {"logits/chosen", "policy/ratio_mean", "policy/gap_mean", "policy/gap_stale_k3", "loss/0", "loss/1"} <= metrics.keys()
    assert {f"objective/{term.name}", f"{term.name}/entropy"} <= metrics.keys()


def test_a_loss_that_reads_is_counted() -> None:
    """The test above can fail."""

    class Reading:
        needs = ("logprobs",)
        reducers = None

        def __call__(self, tokens: Any) -> torch.Tensor:
            return -tokens.logprobs * float(tokens.logprobs.max() < 1)

    device = run(objective_of(Reading()), make_varied_batch(("logprobs",)), ("logprobs",))
    assert [read.what for read in device.reads[: device.launched]] == ["float(tensor)"]


def test_outputs_that_are_read_before_backward_are_counted() -> None:
    loss = select_plugin("loss", "cross_entropy", {}).make(CONTEXT)
    batch = make_varied_batch(loss.needs)
    micro_batch = batch.micro_batch()
    leaves = leaves_of(batch, loss, torch.float32)
    with OtherDevice() as device:
        total, output = objective_of(loss)({name: leaf * 1 for name, leaf in leaves.items()}, micro_batch)
        assert output.metrics["loss"].value
        torch.autograd.backward(total)
    assert [read.what for read in device.reads[: device.launched]] == [SENT_AHEAD]


def test_a_factor_that_is_none_is_named_after_the_backward_pass() -> None:
    """The error waits for the numbers; whatever of the micro-batch is read first raises it, with the token."""

    class Infinite:
        needs = ("rollout_logprobs",)

        def __call__(self, tokens: Any) -> torch.Tensor:
            factors = torch.ones_like(tokens.rollout_logprobs)
            factors[2] = float("inf")
            return factors

    loss = select_plugin("loss", "ppo", {}).make(CONTEXT)
    needs = (*loss.needs, "rollout_logprobs")
    batch = make_varied_batch(needs)
    scores = {name: leaf * 1 for name, leaf in leaves_of(batch, Needs(*needs), torch.float32).items()}
    for look in (
        lambda output: output.metrics["loss"].value,
        lambda output: output.fields["token_loss"],
        lambda output: RankOutput.concat([output]),
    ):
        _, output = objective_of(loss, Infinite())(scores, batch.micro_batch())
        for _ in range(2):  # it is raised at every read
            with pytest.raises(ResultError, match=rf"correction 0.*factor inf for token 2 of {batch.tokens}"):
                look(output)


def test_numbers_of_any_type_arrive_exactly() -> None:
    later = Later(torch.device("cpu"))
    large = 2**40 + 1
    metrics = later.send_metrics(
        {
            "single": Metric.sum(torch.tensor(0.1)),
            "count": Metric.mean(torch.tensor(1e-300, dtype=torch.float64), torch.tensor(large)),
            "half": Metric.max(torch.tensor([1.5], dtype=torch.bfloat16)),
            "plain": Metric.min(3),
        }
    )
    assert metrics["single"].value == torch.tensor(0.1).item() != 0.1
    assert (metrics["count"].value, metrics["count"].count) == (1e-300, large)
    assert (metrics["half"].value, metrics["plain"].value) == (1.5, 3.0)


def test_a_copy_is_what_the_tensor_was_when_it_was_sent() -> None:
    """A plugin may write into its tensors afterwards."""
    measured = torch.ones(2)
    later = Later(measured.device)
    metrics, fields = later.send_metrics({"a": Metric.sum(measured[0])}), later.send_fields({"b": measured}, offsets_of([2]))
    measured.fill_(7.0)
    assert metrics["a"].value == 1.0
    assert fields["b"].values.tolist() == [1.0, 1.0]
    assert Sent.of(measured).read().tolist() == [7.0, 7.0]
