"""Promises of a backend about its description: its layouts, its ranks' coordinates, and its declared capabilities are true."""

import torch
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.backend import BackendDescription, Capability
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.errors import EngineError
from skyrl_engine.proof.layouts import OPTIONS
from skyrl_engine.testing.backends.ranks import RankFailed
from skyrl_engine.testing.backends.subject import BackendCase, BackendSubject, backend_promise, cases, require_words
from skyrl_engine.testing.promise import Broken, Promise, promise
from skyrl_engine.testing.random_state import global_random_state

PARALLEL: dict[str, Capability] = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel"}


def _layouts(subject: BackendSubject) -> "st.SearchStrategy[BackendCase]":
    return st.sampled_from(cases(subject))


@promise(
    "It sets up on every claimed layout, scores, learns, takes a step and closes, and then does so once more in the same processes",
    cases=_layouts,
)
def working(subject: BackendSubject, case: BackendCase) -> None:
    for turn in ("", " a second time in the same processes"):
        try:
            with subject.open_ranks(case) as ranks:
                ranks.forward(case.whole())
                ranks.forward_backward(case.whole())
                ranks.optim_step()
        except (EngineError, RankFailed) as error:
            remedy = error.remedy if isinstance(error, EngineError) else "Follow the traceback of that rank"
            raise Broken(f"does not work under {case.sizes}{turn}: {error.cause}", remedy) from error


@backend_promise("Every rank stands where the description lays it out: tp fastest, then cp, dp, pp")
def coordinates(subject: BackendSubject, case: BackendCase) -> None:
    with subject.open_ranks(case) as ranks:
        returned = ranks.coords()
    for rank, got in enumerate(returned):
        due = case.sizes.topology.coords(rank)
        if got != due:
            raise Broken(
                f"rank {rank} stands at {got} under {case.sizes}, not at {due}", "Set coords = topology.coords(rank) in setup"
            )


@promise("It declares what its layouts need, lays out what it declares, and refuses in words what it does not")
def description(subject: BackendSubject, _case: None) -> None:
    for case in cases(subject):
        sizes = case.sizes
        described = _describe(subject, sizes.options, sizes.ranks)
        if isinstance(described, EngineError):
            raise Broken(f"claims {sizes} and refuses it: {described.cause}", "Claim only layouts that it can make") from described
        if described.topology != sizes.topology:
            raise Broken(
                f"lays out {sizes} as {described.topology}",
                f"Take the options {', '.join(OPTIONS.values())}, and give dp what is left",
            )
        for name, capability in PARALLEL.items():
            if sizes.sizes.get(name, 1) > 1 and capability not in described.capabilities:
                raise Broken(f"lays out {sizes} and does not declare {capability!r}", "Declare it, or refuse the layout")
    for name, capability in PARALLEL.items():
        _require_honest(subject, name, capability)


@backend_promise("Its rehearsal refuses no model that it trains, and changes no global state")
def rehearsal(subject: BackendSubject, case: BackendCase) -> None:
    described = subject.describe(case.sizes.options, case.sizes.ranks)
    rows: RowKind = "packed" if "packed" in described.capabilities else "padded"
    model = ModelConfig(subject.bench.model(case.model))
    before, gradients = global_random_state(), torch.is_grad_enabled()
    try:
        described.rehearse(model, rows)
    except EngineError as error:
        with subject.open_ranks(case, rows=rows) as ranks:
            ranks.forward_backward(case.whole())
        raise Broken(
            f"refuses while planning a model that it trains: {error.cause}",
            "Let rehearse raise only what setup raises for the same model",
        ) from error
    if global_random_state() != before:
        raise Broken("draws from a global random state when it rehearses", "Rehearse inside torch.random.fork_rng(devices=())")
    if torch.is_grad_enabled() != gradients:
        torch.set_grad_enabled(gradients)
        raise Broken("leaves gradients switched off or on when it rehearses", "Use torch.no_grad() as a context manager")


def _require_honest(subject: BackendSubject, name: str, capability: Capability) -> None:
    """Require that a capability is declared exactly where its option can lay out two ranks, and that sizes that do not divide are refused."""
    option = OPTIONS[name]
    declared = subject.declares(capability)
    two = _describe(subject, {option: 2}, 2)
    if isinstance(two, EngineError):
        if declared:
            raise Broken(
                f"declares {capability!r}, and refuses {option} = 2 on two ranks: {two.cause}", "Do not declare it"
            ) from two
        require_words(two)
        return
    if getattr(two.topology, name) != 2:
        raise Broken(
            f"{'declares' if declared else 'takes'} {option}, and lays out two ranks with {option} = 2 as {two.topology}",
            "Do what the option says, or do without it",
        )
    if not declared:  # laid out all the same: the engine sees it, and refuses it while planning
        return
    for ranks in (1, 3):
        refused = _describe(subject, {option: 2}, ranks)
        if not isinstance(refused, EngineError):
            raise Broken(
                f"lays out {ranks} rank{'s' if ranks > 1 else ''} with {option} = 2, which does not divide them, as {refused.topology}",
                "Raise UnsupportedError in skyrl_engine_describe_backend",
            )
        require_words(refused)


def _describe(subject: BackendSubject, options: dict[str, int], ranks: int) -> BackendDescription | EngineError:
    try:
        return subject.describe(options, ranks)
    except EngineError as error:
        return error


DESCRIPTION_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (description, working, coordinates, rehearsal)
