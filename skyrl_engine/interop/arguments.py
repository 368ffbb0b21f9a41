"""Match the arguments of another engine's loss function to our columns and scores."""

import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

MASK = "loss_mask"
CONFIG = "config"

_NAMES = {
    MASK: ("response_mask", "action_mask", "completion_mask", "mask"),
    CONFIG: ("cfg", "args"),
    "logprobs": ("log_probs", "log_prob", "logps", "action_log_probs", "per_token_logps"),
    "old_logprobs": ("old_log_probs", "old_log_prob", "old_logps", "old_action_log_probs", "old_per_token_logps"),
    "ref_logprobs": (
        "ref_log_probs",
        "ref_log_prob",
        "ref_logps",
        "reference_log_probs",
        "base_action_log_probs",
        "ref_per_token_logps",
    ),
    "rollout_logprobs": ("rollout_log_probs", "rollout_log_prob", "rollout_logps", "sampling_per_token_logps"),
    "advantages": ("advantage", "adv"),
    "entropy": ("entropies", "entropys"),
    "values": ("vpreds",),
    "old_values": ("old_vpreds",),
    "returns": (),
    "rewards": ("token_level_rewards",),
}
MEANINGS: Mapping[str, str] = MappingProxyType({name: need for need, others in _NAMES.items() for name in (need, *others)})
"""The meaning of an argument by its name: a need, `loss_mask` or `config`. Names are those of SkyRL, verl, TRL and OpenRLHF, and our own."""

_OF_THE_CALL = (MASK, CONFIG)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@frozen
class Arguments:
    """The function's arguments: `columns` maps some to needs, `mask` and `config` are names, and `options` take options of their name."""

    columns: Mapping[str, str]
    mask: str
    config: str | None
    options: tuple[str, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.columns.values()))


def match_arguments(
    function: Callable[..., Any],
    *,
    needs: tuple[str, ...] | None,
    meanings: Mapping[str, str],
    options: Collection[str],
) -> Arguments:
    """Match every argument of `function`: `meanings` and `options` first, then the names that MEANINGS knows, then the names of `needs`.

    With `needs` None, arguments that have a default keep it and all others are passed. Raises TypeError for an argument without a default whose
    meaning is unknown, for a function without a mask, and for needs that it does not take.
    """
    name = getattr(function, "__name__", type(function).__name__)
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in _VARIADIC
    }
    for unknown in meanings.keys() - parameters.keys():
        raise TypeError(f"{name} takes no argument {unknown!r}; it takes {', '.join(parameters)}")
    # a meaning may be given by any name that is known: "mask" is the mask
    meanings = {argument: MEANINGS.get(meaning, meaning) for argument, meaning in meanings.items()}
    by_meaning: dict[str, list[str]] = {}
    columns: dict[str, str] = {}
    filled: list[str] = []
    for argument, parameter in parameters.items():
        meaning = meanings.get(argument, MEANINGS.get(argument))
        optional = parameter.default is not inspect.Parameter.empty
        if argument in options and argument not in meanings:
            filled.append(argument)
        elif meaning in _OF_THE_CALL:
            by_meaning.setdefault(meaning, []).append(argument)
        elif meaning is None and argument in (needs or ()):
            columns[argument] = argument
        elif meaning is None and not optional:
            raise TypeError(
                f"{name} takes {argument!r}, which is no known name: write arguments={{{argument!r}: COLUMN}}, or give it as an option "
                f"in config; known names are {', '.join(MEANINGS)}"
            )
        elif meaning is not None and (not optional or argument in meanings or meaning in (needs or ())):
            columns[argument] = meaning
    _refuse_needs(name, needs, columns)
    return Arguments(columns, _mask(name, by_meaning.get(MASK, [])), next(iter(by_meaning.get(CONFIG, [])), None), tuple(filled))


def _refuse_needs(name: str, needs: tuple[str, ...] | None, columns: Mapping[str, str]) -> None:
    if needs is None:
        return
    for need in needs:
        if need not in columns.values():
            raise TypeError(f"{name} takes nothing that would be {need!r}, which is among its needs")
    for argument, need in columns.items():
        if need not in needs:
            raise TypeError(
                f"{name} takes {argument!r}, which has no default, and {need!r} is not among its needs: needs lists all that is passed, "
                f"write needs={(*columns.values(),)!r}"
            )


def _mask(name: str, arguments: list[str]) -> str:
    if len(arguments) == 1:
        return arguments[0]
    if arguments:
        raise TypeError(
            f"{name} takes {' and '.join(arguments)}, of which one must be the mask: name what the other is in arguments={{...}}"
        )
    masks = ", ".join(argument for argument, meaning in MEANINGS.items() if meaning == MASK)
    raise TypeError(f"{name} takes no mask ({masks}); without one its scalar says nothing about single tokens")


OPTION = "option:"
"""Begins the meaning of an argument that takes an option of its name."""


def match_meanings(
    called: str,
    function: Callable[..., Any],
    given: Mapping[str, str],
    options: Collection[str],
    names: Mapping[str, tuple[str, ...]],
) -> dict[str, str]:
    """Return the meaning of every argument of `function` that is passed, by its name: as `given`, or an option, or as `names` have it.

    `names` are the known names of each meaning. Raises TypeError for an argument without a default whose meaning is unknown.
    """
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in _VARIADIC
    }
    for argument, meaning in given.items():
        if argument not in parameters:
            raise TypeError(f"{called} takes no argument {argument!r}; it takes {', '.join(parameters)}")
        if meaning not in names:
            raise TypeError(f"arguments gives {argument!r} the meaning {meaning!r}, which is none of {', '.join(names)}")
    known = {name: meaning for meaning, own in names.items() for name in own}
    matched: dict[str, str] = {}
    for argument, parameter in parameters.items():
        if argument in given:
            matched[argument] = given[argument]
        elif argument in options:
            matched[argument] = f"{OPTION}{argument}"
        elif argument in known:
            matched[argument] = known[argument]
        elif parameter.default is inspect.Parameter.empty:
            raise TypeError(
                f"{called} takes {argument!r}, which is no known name: write arguments={{{argument!r}: MEANING}}, or give it as an option "
                f"in config; known names are {', '.join(known)}"
            )
    return matched
