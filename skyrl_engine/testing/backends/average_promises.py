"""Promises of a backend about averages of the weights that it trains."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import evolve
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from skyrl_engine.testing.backends.held_backend import Arrays
from skyrl_engine.testing.backends.state_promises import require_equal, train
from skyrl_engine.testing.backends.step_promises import SPEC
from skyrl_engine.testing.backends.subject import BackendCase, BackendSubject, backend_promise, exempt_without
from skyrl_engine.testing.promise import Broken, Promise

DECAY = 0.75
SETTINGS = evolve(SPEC, ema_decay=DECAY)


@backend_promise(
    "Averages of weights follow every step, go on bit for bit after a load, and are what load_averages reads",
    exempt=exempt_without("ema"),
)
def weight_averages(subject: BackendSubject, case: BackendCase) -> None:
    if "ema" not in subject.describe(case.sizes.options, case.sizes.ranks).capabilities:
        return
    with tempfile.TemporaryDirectory(prefix="skyrl-engine-averages-") as name:
        early, late, resumed = (Path(name, each) for each in ("early", "late", "resumed"))
        for directory in (early, late, resumed):
            directory.mkdir()
        with subject.open_ranks(case, optimizer=SETTINGS) as ranks:
            course = [weights for _, weights in train(ranks, case, 2)]
            ranks.save(early)
            course += [weights for _, weights in train(ranks, case, 2)]
            ranks.save(late)
        with subject.open_ranks(case, optimizer=SETTINGS) as ranks:
            # whose average loading must put away
            train(ranks, case, 1)
            ranks.load(early)
            train(ranks, case, 2)
            ranks.save(resumed)
        with subject.open_ranks(case, optimizer=None) as ranks:
            found = {}
            for directory in (early, late, resumed):
                ranks.load_averages(directory)
                found[directory] = ranks.weights()[0]
            ranks.load(late)
            require_equal(ranks.weights()[0], course[-1], "loaded without averages", "Load the weights themselves in `load`")
    for directory, steps in ((early, 2), (late, 4)):
        _require_average(found[directory], average_weights(course[:steps], DECAY), steps)
    require_equal(found[resumed], found[late], "as an average over a resumed run", "Save averages in full precision, and load them")


def average_weights(course: Sequence[Arrays], decay: float) -> Arrays:
    """Return the average that torch's own `AveragedModel` makes of the weights after each step."""
    model = nn.ParameterList([nn.Parameter(torch.tensor(weight)) for weight in course[0].values()])
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call] # torch has no types of it
    for weights in course:
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights.values(), strict=True):
                parameter.copy_(torch.tensor(weight))
        averaged.update_parameters(model)
    return {name: parameter.detach().numpy() for name, parameter in zip(course[0], averaged.module.parameters(), strict=True)}


def _require_average(got: Arrays, due: Arrays, steps: int) -> None:
    for name, average in due.items():
        if not np.allclose(got[name], average, rtol=1e-5, atol=1e-8):
            distance = float(np.abs(got[name] - average).max())
            raise Broken(
                f"the average of {name} after {steps} steps is off by {distance:.1e}",
                "Average after every optim_step, from the weight after the first one on: decay * average + (1 - decay) * weight",
            )


AVERAGE_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (weight_averages,)
