"""What must hold of every loss: what it leaves alone."""

import gc
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from skyrl_engine.contracts.kinds.loss import as_loss_output
from skyrl_engine.testing.comparison import (
    change,
    same_evaluation,
)
from skyrl_engine.testing.losses.cases import (
    decided_evaluation,
    ordinary,
)
from skyrl_engine.testing.process_settings import another_rank, settings_left_alone
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, promise
from skyrl_engine.testing.random_state import global_random_state, restored_random_state, seed_everything
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens.evaluation import Listening, decided
from skyrl_engine.testing.tokens.rollouts import TokenBatch


@promise("It leaves the global random state alone, and does not depend on it", cases=ordinary)
def global_random_numbers(subject: Subject[Any], batch: TokenBatch) -> None:
    with restored_random_state():
        results = []
        for seed in (1, 2, 1):
            seed_everything(seed)
            before = global_random_state()
            results.append(decided_evaluation(subject, batch))
            if global_random_state() != before:
                raise Broken("draws from the global random state, which differs from rank to rank", "Draw from tokens.generator")
    one, other, again = results
    if same_evaluation(one, again) and not same_evaluation(one, other):
        raise Broken("depends on the global random state", "Draw from tokens.generator")


@promise("Replicas of one micro-batch get the same numbers, random ones included", cases=ordinary)
def replicas(subject: Subject[Any], batch: TokenBatch) -> None:
    with restored_random_state():
        seed_everything(7)
        made = [decided_evaluation(subject, batch)]
        seed_everything(7)
        with another_rank():
            made.append(decided_evaluation(subject, batch))
    if not same_evaluation(*made, relative=0, absolute=0):
        how, factor = change(*made) if not same_evaluation(*made) else ("changes in the last digits", None)
        raise Broken(
            f"{how} between two replicas: it draws from a source of its own, counts its calls, or asks which rank it is on",
            "Make it a function of its tokens; draw from tokens.generator, which replicas share",
            factor=factor,
        )


@promise("It does not change what it is given", cases=ordinary)
def inputs_unchanged(subject: Subject[Any], batch: TokenBatch) -> None:
    loss = Listening(subject.make())
    listening = _Copying(loss)
    decided(subject.label, listening, batch, dtype=torch.float32)
    for name, (before, after, written) in listening.given.items():
        if written or not torch.equal(before, after):
            raise Broken(
                f"changes {name} in place, which other parts of the objective read too", "Work on a copy: x * y, not x.mul_(y)"
            )


class _Copying:
    """The loss, with copies of what it was given beside what it left behind."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.given: Mapping[str, tuple[torch.Tensor, torch.Tensor, bool]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, tokens: Any) -> Any:
        sequences = {f"sequences.{name}": getattr(tokens.sequences, name) for name in ("index", "counts", "unit_ids", "group_ids")}
        tensors = {**tokens.needs, **sequences}
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        versions = {name: tensor._version for name, tensor in tensors.items()}  # noqa: SLF001 - counts writes, which the same values hide
        result = self.loss(tokens)
        self.given = {
            name: (copies[name], tensor.detach(), tensor._version != versions[name])  # noqa: SLF001 - as above
            for name, tensor in tensors.items()
        }
        return result


@promise("It leaves torch's settings as they are", cases=ordinary, effort=0.1)
def process_settings(subject: Subject[Any], batch: TokenBatch) -> None:
    with settings_left_alone(), suppress(Undecidable):
        decided_evaluation(subject, batch)


@promise("It keeps no tensor of a micro-batch alive", cases=ordinary, effort=0.1)
def memory(subject: Subject[Any], batch: TokenBatch) -> None:
    loss = subject.make()
    listening = Listening(loss)
    decided(subject.label, listening, batch)
    output = as_loss_output(subject.label, listening.heard["output"], batch.tokens)
    kept = {"its values": weakref.ref(output.token_loss)}
    kept |= {name: weakref.ref(tensor) for name, tensor in listening.heard["tokens"].needs.items()}
    del listening, output
    gc.collect()
    for name, reference in kept.items():
        if reference() is not None:
            raise Broken(
                f"keeps {name} after the call, and with it all that the model computed for the micro-batch",
                "Store numbers (tensor.item()), not tensors",
            )


FIRST_PROMISES: tuple[Promise[Any, Any], ...] = (
    process_settings,  # once set they are set
    replicas,  # what wears off after some calls is seen while it lasts
)
"""Those that must be tried before all others."""

CONDUCT_PROMISES: tuple[Promise[Any, Any], ...] = (global_random_numbers, inputs_unchanged, memory)
