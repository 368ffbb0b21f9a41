"""Promises of a backend about parameters that training leaves as they are (`ModelConfig.freeze`)."""

import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from skyrl_engine.errors import EngineError
from skyrl_engine.testing.backends.gradient_comparison import norm_of, require_same_gradients
from skyrl_engine.testing.backends.held_backend import Arrays, PassOrder
from skyrl_engine.testing.backends.state_promises import require_equal, train
from skyrl_engine.testing.backends.step_promises import SPEC
from skyrl_engine.testing.backends.subject import (
    NUMBERS,
    BackendCase,
    BackendSubject,
    backend_promise,
    exempt_with,
    exempt_without,
    require_words,
)
from skyrl_engine.testing.promise import Broken, Promise

FREEZE = ("*.embed_tokens.*", "model.layers.0.*", "*.layers.1.mlp.up_proj.*")
"""Patterns of what comes before all that learns, and of a matrix among others that learn. The embedding of the first model is its head too."""


@backend_promise(
    "Parameters that model.freeze names have no gradient and no part in its norm, and no step changes them; checkpoints hold them, and a "
    "pattern that names none is refused",
    models=("qwen3", "llama"),
    exempt=exempt_without("freeze"),
)
def frozen_parameters(subject: BackendSubject, case: BackendCase) -> None:
    if "freeze" not in subject.describe(case.sizes.options, case.sizes.ranks).capabilities:
        return
    _require_refused_pattern(subject, case)
    due = {
        name: gradient for name, gradient in subject.bench.definition(case.model, NUMBERS).gradients.items() if not _is_frozen(name)
    }
    with tempfile.TemporaryDirectory(prefix="skyrl-engine-frozen-") as name:
        checkpoint, other_files = Path(name, "checkpoint"), Path(name, "files")
        checkpoint.mkdir()
        with subject.open_ranks(case, optimizer=SPEC, freeze=FREEZE) as ranks:
            before = ranks.weights()[0]
            ranks.forward_backward(PassOrder(case.cut(micro_batches=2)))
            got = ranks.gradients()[0]
            if extra := sorted(got.keys() - due.keys()):
                raise Broken(
                    f"gives a gradient of {extra[0]}, which model.freeze names", "Set requires_grad to False before sharding"
                )
            require_same_gradients(
                got,
                due,
                "of transformers' own model, for what model.freeze leaves",
                "Let gradients flow through frozen layers",
                facts={},
            )
            reported = ranks.optim_step()[0].grad_norm
            if abs(reported - norm_of(due)) > 1e-4 * norm_of(due):
                raise Broken(
                    f"reports the norm {reported:.6g}, where that of the trained parameters is {norm_of(due):.6g}",
                    "Take the norm over trained parameters",
                )
            train(ranks, case, 1)
            after = ranks.weights()[0]
            _require_equal_weights(after, before)
            ranks.save(checkpoint)
        with subject.open_ranks(case, optimizer=SPEC) as ranks:
            train(ranks, case, 1)
            ranks.export(other_files)
        with subject.open_ranks(case, optimizer=SPEC, files=other_files, freeze=FREEZE) as ranks:
            ranks.load(checkpoint)
            require_equal(ranks.weights()[0], after, "loaded over other weights", "Let checkpoints hold frozen parameters too")


def _is_frozen(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in FREEZE)


def _require_equal_weights(after: Arrays, before: Arrays) -> None:
    for name, weight in before.items():
        is_same = np.array_equal(after[name], weight)
        if _is_frozen(name) and not is_same:
            raise Broken(f"a step changes {name}, which model.freeze names", "Leave frozen parameters out of the optimizer")
        if not _is_frozen(name) and is_same:
            raise Broken(
                f"no step changes {name}, which model.freeze does not name", "Freeze what the patterns match, and nothing else"
            )


def _require_refused_pattern(subject: BackendSubject, case: BackendCase) -> None:
    pattern = "model.no_such_layer.*"
    try:
        with subject.open_ranks(case, freeze=(*FREEZE, pattern)):
            pass
    except EngineError as error:
        require_words(error)
        return
    raise Broken(f"takes model.freeze with {pattern!r}, which matches nothing", "Refuse a pattern that matches no parameter")


@backend_promise("model.freeze, which it does not declare, is refused in words", exempt=exempt_with("freeze"))
def undeclared_freeze(subject: BackendSubject, case: BackendCase) -> None:
    try:
        with subject.open_ranks(case, freeze=FREEZE):
            pass
    except EngineError as error:
        require_words(error)
        return
    raise Broken(
        "ignores model.freeze, which it does not declare",
        "Leave these parameters as they are and declare 'freeze', or raise UnsupportedError in setup",
    )


FREEZE_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (frozen_parameters, undeclared_freeze)
