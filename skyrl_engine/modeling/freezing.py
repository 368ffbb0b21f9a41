"""Parameters that training leaves as they are, by patterns of their names."""

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from skyrl_engine.errors import ConfigError, Problem

logger = logging.getLogger(__name__)


def freeze_parameters(model: nn.Module, scorer: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters of `model` that a pattern matches, as `fnmatch.fnmatchcase` takes it, under any of their names.

    Raises ConfigError as `choose_frozen` does, and where nothing is left to train of what the `scorer` computes with.
    """
    if not patterns:
        return
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, is_frozen in zip(names, choose_frozen(list(names.values()), patterns), strict=True):
        if is_frozen:
            parameter.requires_grad_(False)
    trained, counted = (
        sum(parameter.numel() for parameter in scorer.parameters() if parameter.requires_grad or not only_trained)
        for only_trained in (True, False)
    )
    report_frozen(trained, counted)


def choose_frozen(names: Sequence[Sequence[str]], patterns: Sequence[str]) -> list[bool]:
    """Say of each parameter, given by all of its names, whether a pattern matches one of them.

    Tied names are one parameter, so that a pattern which matches one of them freezes all, with a warning. Raises ConfigError for a pattern
    that matches no name.
    """
    every = [name for aliases in names for name in aliases]
    problems = [
        Problem(f"model.freeze[{number}]", f"{pattern!r} matches no parameter", f"Match names such as {every[0]}")
        for number, pattern in enumerate(patterns)
        if not any(fnmatchcase(name, pattern) for name in every)
    ]
    if problems:
        raise ConfigError(problems)
    chosen = []
    for aliases in names:
        matched = [name for name in aliases if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if matched and len(matched) < len(aliases):
            others = ", ".join(name for name in aliases if name not in matched)
            logger.warning("model.freeze names %s, which is tied to %s: both are frozen", matched[0], others)
        chosen.append(bool(matched))
    return chosen


def report_frozen(trained: int, counted: int) -> None:
    """Log how many of a model's `counted` numbers are trained. Raises ConfigError if there are none."""
    if not trained:
        raise ConfigError([Problem("model.freeze", "it freezes every parameter", "Leave some to train")])
    logger.info("model.freeze: %d of %d numbers are trained", trained, counted)
