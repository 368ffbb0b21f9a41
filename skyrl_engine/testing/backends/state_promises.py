"""Promises of a backend about its state: weights and gradients by Hugging Face names, checkpoints, exports."""

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_engine.errors import EngineError
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.testing.backends.held_backend import Arrays
from skyrl_engine.testing.backends.ranks import BackendRanks, RankFailed
from skyrl_engine.testing.backends.score_promises import SCORES
from skyrl_engine.testing.backends.step_promises import SPEC, require_nothing_left
from skyrl_engine.testing.backends.subject import NUMBERS, BackendCase, BackendSubject, backend_promise, is_right_loss
from skyrl_engine.testing.promise import Broken, Promise, Undecidable

REMEDY = "Give every tensor in full under the name that transformers' own model has for it, a tied one once"


@backend_promise(
    "weights() and gradients() give full tensors under their Hugging Face names, and the weights are the model's",
    models=("qwen3", "llama"),
)
def names(subject: BackendSubject, case: BackendCase) -> None:
    due = transformers_weights(subject.bench.model(case.model))
    with subject.open_ranks(case) as ranks:
        weights = ranks.weights()[0]
        ranks.forward_backward(case.whole())
        tensors_by_method = {"weights()": weights, "gradients()": ranks.gradients()[0]}
    for what, got in tensors_by_method.items():
        missing, unknown = sorted(due.keys() - got.keys()), sorted(got.keys() - due.keys())
        if missing or unknown:
            faults = [f"does not give {missing[0]}"] * bool(missing) + [f"gives {unknown[0]}, which transformers has not"] * bool(
                unknown
            )
            raise Broken(f"{what} {' and '.join(faults)} ({len(missing) + len(unknown)} such names)", REMEDY)
        for name, tensor in got.items():
            if tensor.shape != due[name].shape:
                raise Broken(f"{what} gives {name} as {list(tensor.shape)}, the whole is {list(due[name].shape)}", REMEDY)
    for name, weight in weights.items():
        if not np.array_equal(weight, due[name]):
            raise Broken(f"{name} is not what the model's files hold", "Load weights in float32 as they are")


def transformers_weights(directory: str) -> Arrays:
    """Return the parameters of the model in a directory by name, tied ones once, as transformers loads them."""
    from transformers import AutoModelForCausalLM

    with quiet_progress():
        model: Any = AutoModelForCausalLM.from_pretrained(directory)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@backend_promise(
    "Every rank gets the same weights and gradients in the same order, and reports the same step", layouts="several ranks"
)
def every_rank(subject: BackendSubject, case: BackendCase) -> None:
    with subject.open_ranks(case, optimizer=SPEC) as ranks:
        ranks.forward_backward(case.whole())
        gradients, steps, weights = ranks.gradients(), ranks.optim_step(), ranks.weights()
    for rank in range(1, len(steps)):
        for what, tensors_by_rank in (("gradients()", gradients), ("weights()", weights)):
            first, own = tensors_by_rank[0], tensors_by_rank[rank]
            if list(own) != list(first):
                raise Broken(
                    f"rank {rank} yields other names in {what} than rank 0, or in another order",
                    "Let every rank iterate over all parameters: each of them waits for the others",
                )
            for name, tensor in own.items():
                if not np.array_equal(tensor, first[name]):
                    raise Broken(f"rank {rank} holds another {name} in {what} than rank 0", "Gather over all ranks, on all ranks")
        if steps[rank] != steps[0]:
            raise Broken(f"rank {rank} reports {steps[rank]}, rank 0 {steps[0]}", "Reduce the norm over all ranks, on all ranks")


@backend_promise(
    "Weights that it gives in bfloat16, if it gives any, are those of weights() rounded, at the start and after a step"
)
def rounded_weights(subject: BackendSubject, case: BackendCase) -> None:
    with subject.open_ranks(case, optimizer=SPEC) as ranks:
        for when, steps in (("at the start", 0), ("after a step", 1)):
            train(ranks, case, steps)
            for rank, (rounded, weights) in enumerate(zip(ranks.weights_in_bfloat16(), ranks.weights(), strict=True)):
                if rounded is None:
                    continue
                if list(rounded) != list(weights):
                    raise Broken(f"rank {rank} gives other names in weights_in() than in weights(), or in another order", REMEDY)
                for name, weight in weights.items():
                    if not np.array_equal(rounded[name], round_to_bfloat16(weight)):
                        raise Broken(
                            f"weights_in(torch.bfloat16) of rank {rank} gives {name} {when} other than rounded",
                            "Round what weights() gives, or each rank's part of it, by torch's `to`",
                        )


def round_to_bfloat16(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the values that a weight has after it was rounded to bfloat16, in float32."""
    return torch.tensor(weight).to(torch.bfloat16).float().numpy()


@backend_promise("What it shows as the memory of its weights, if it does, holds them, and still does after a step")
def shown_memory(subject: BackendSubject, case: BackendCase) -> None:
    remedy = "Show the tensors that the optimizer changes in place, or None where no such tensor is whole"
    with subject.open_ranks(case, optimizer=SPEC) as ranks:
        for when, steps in (("at the start", 0), ("after two steps", 2)):
            train(ranks, case, steps)
            for rank, (shown, weights) in enumerate(zip(ranks.storage(again=steps > 0), ranks.weights(), strict=True)):
                if shown is None:
                    continue
                for name, weight in weights.items():
                    if name not in shown or not np.array_equal(shown[name], weight):
                        raise Broken(f"rank {rank} shows another {name} {when} than weights() gives, or none", remedy)


@backend_promise(
    "Saved and loaded elsewhere, training goes on as if nothing had been: weights, norms and rates are equal bit for bit"
)
def save_and_load(subject: BackendSubject, case: BackendCase) -> None:
    with tempfile.TemporaryDirectory(prefix="skyrl-engine-state-") as name:
        directory = Path(name)
        with subject.open_ranks(case, "dropout" if _takes_dropout(subject, case) else None, optimizer=SPEC) as ranks:
            train(ranks, case, 2)
            require_nothing_left(ranks)
            ranks.save(directory)
            at_save = ranks.weights()[0]
            uninterrupted = train(ranks, case, 2)
        with subject.open_ranks(case, "dropout" if _takes_dropout(subject, case) else None, optimizer=SPEC) as ranks:
            # what loading must put away: a step, and a gradient under way
            train(ranks, case, 1)
            ranks.forward_backward(case.whole())
            ranks.load(directory)
            require_equal(ranks.weights()[0], at_save, "right after loading", "Save and load every weight in full precision")
            resumed = train(ranks, case, 2)
    for number, ((due_step, due), (got_step, got)) in enumerate(zip(uninterrupted, resumed, strict=True), start=1):
        if got_step.grad_norm != due_step.grad_norm:
            raise Broken(
                f"the gradient of step {number} after loading has the norm {got_step.grad_norm!r}, without a break {due_step.grad_norm!r}",
                "Save the random states of every rank (skyrl_engine.modeling) and every weight, and clear the gradient when loading",
            )
        require_equal(got, due, f"after step {number} since loading", "Save the optimizer's moments and step count, and load them")


def _takes_dropout(subject: BackendSubject, case: BackendCase) -> bool:
    """Return True where the backend trains a model with dropout; random states are then part of a checkpoint."""
    try:
        with subject.open_ranks(case, "dropout") as ranks:
            ranks.forward_backward(case.whole())
    except EngineError:
        return False
    return True


def train(ranks: BackendRanks, case: BackendCase, steps: int) -> list[Any]:
    """Take steps over all documents; return the report of each, and the weights after it."""
    results = []
    for _ in range(steps):
        ranks.forward_backward(case.whole())
        results.append((ranks.optim_step()[0], ranks.weights()[0]))
    return results


@backend_promise(
    "Offloaded and reloaded, at rest and in the midst of a gradient, training goes on bit for bit as if nothing had been",
    exempt=lambda subject: None if subject.declares("offload") else "the backend does not declare 'offload'",
)
def offloads(subject: BackendSubject, case: BackendCase) -> None:
    if "offload" not in subject.describe(case.sizes.options, case.sizes.ranks).capabilities:
        return
    remedy = "Move weights, gradients and all values of the optimizer, and keep every tensor that others refer to"
    courses = []
    for leaves in (False, True):
        with subject.open_ranks(case, optimizer=SPEC) as ranks:
            train(ranks, case, 1)
            if leaves:
                ranks.offload()
            ranks.forward_backward(case.whole())
            if leaves:
                ranks.offload()
            courses.append([(ranks.optim_step()[0], ranks.weights()[0]), *train(ranks, case, 1)])
    for number, ((step, weights), (due_step, due_weights)) in enumerate(zip(courses[1], courses[0], strict=True), 2):
        if step != due_step:
            raise Broken(f"reports {step} in step {number} after it was offloaded, and {due_step} without", remedy)
        require_equal(weights, due_weights, f"after step {number}, having been offloaded,", remedy)


def require_equal(got: Arrays, due: Arrays, when: str, remedy: str) -> None:
    """Raise Broken, naming the first, for weights that differ in any bit."""
    for name, weight in due.items():
        if not np.array_equal(got[name], weight):
            distance = float(np.abs(got[name] - weight).max())
            raise Broken(f"{name} is another {when} than without a break, by {distance:.1e}", remedy)


@backend_promise("Loading runs no code of a checkpoint: a file that is a pickle of code is refused in words", layouts="one rank")
def no_code_in_checkpoints(subject: BackendSubject, case: BackendCase) -> None:
    with tempfile.TemporaryDirectory(prefix="skyrl-engine-hostile-") as name, subject.open_ranks(case, optimizer=SPEC) as ranks:
        saved, hostile, trace = (Path(name, each) for each in ("saved", "hostile", "code-has-run"))
        train(ranks, case, 1)
        saved.mkdir()
        ranks.save(saved)
        for file in sorted(each.relative_to(saved) for each in saved.rglob("*") if each.is_file()):
            for content in _hostile_files(trace):
                shutil.rmtree(hostile, ignore_errors=True)
                shutil.copytree(saved, hostile)
                (hostile / file).write_bytes(content)
                remedy = "Read checkpoints as JSON, safetensors, or by torch.load with weights_only=True, and raise CheckpointError"
                untyped: RankFailed | None = None
                try:
                    ranks.load(hostile)
                except EngineError:
                    pass
                except RankFailed as error:
                    untyped = error
                if trace.exists():
                    raise Broken(f"load runs the code that {file} holds", remedy)
                if untyped is not None:
                    raise Broken(f"{file} as a pickle of code: {untyped.cause}", remedy) from untyped


class _Code:
    """Makes a directory when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._trace),)


def _hostile_files(trace: Path) -> Iterator[bytes]:
    """Yield a plain pickle that runs code, and one as torch writes it, among values that belong into a checkpoint."""
    import torch

    yield pickle.dumps(_Code(trace))
    file = io.BytesIO()
    torch.save({"weight": torch.zeros(2), "code": _Code(trace)}, file)
    yield file.getvalue()


@backend_promise("What is exported loads in transformers and scores as the backend does, after steps too")
def export(subject: BackendSubject, case: BackendCase) -> None:
    with tempfile.TemporaryDirectory(prefix="skyrl-engine-export-") as name:
        directory = Path(name)
        with subject.open_ranks(case, optimizer=SPEC) as ranks:
            if not is_right_loss(subject, case, ranks.loss(ranks.forward(case.whole()))):
                raise Undecidable("the loss is not the right one already")
            train(ranks, case, 2)
            returned = ranks.forward(case.whole())
            ranks.export(directory)
        due = _score_export(directory)
    for rank, output in enumerate(returned):
        if not ranks.topology.coords(rank).collects:
            continue
        for place, number in enumerate(output.sample_ids.tolist()):
            got = output.fields["logprobs"][place]
            expected = due.get(number, np.zeros(0))
            if got.shape == expected.shape and np.allclose(got, expected, rtol=0, atol=SCORES):
                continue
            before = subject.bench.definition(case.model, NUMBERS).logprobs.get(number, np.zeros(0))
            is_stale = expected.shape == before.shape and np.allclose(expected, before, rtol=0, atol=SCORES)
            raise Broken(
                f"the exported model scores sample {number} otherwise than the backend: "
                + (
                    "it is the model from before training"
                    if is_stale
                    else f"by {float(np.abs(got - expected).max(initial=0)):.1e} nats"
                ),
                "Export the weights as they are now, gathered from all ranks",
            )


def _score_export(directory: Path) -> Any:
    import torch

    from skyrl_engine.modeling.tiny import VOCABULARY
    from skyrl_engine.testing.backends.batches import definition, documents

    try:
        return definition(str(directory), documents(VOCABULARY), dtype=torch.float32).logprobs
    except Exception as error:
        raise Broken(
            f"transformers does not load what was exported: {str(error).splitlines()[0]}",
            "Write config.json and the weights under transformers' names, as save_pretrained does",
        ) from error


STATE_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (
    names,
    every_rank,
    shown_memory,
    rounded_weights,
    save_and_load,
    offloads,
    no_code_in_checkpoints,
    export,
)
