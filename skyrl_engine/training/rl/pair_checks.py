"""Checks of a run that trains on pairs of attempts (`rl.pairs`), and of one that does not and has a loss of pairs."""

from collections.abc import Iterator

from skyrl_engine.config.schema import RlConfig
from skyrl_engine.contracts.kinds.needs import ROLE_NEED, model_score
from skyrl_engine.errors import Problem, UnsupportedError
from skyrl_engine.rollout.offline_source import Recording
from skyrl_engine.training.rl.prepared import RlDraft

_OF_ADVANTAGES = ("advantages", "returns", "old_values")
"""Columns that come of estimating advantages."""


def list_pair_problems(settings: RlConfig) -> Iterator[Problem]:
    """Yield the problems of keys that contradict `rl.pairs`, where it is set."""
    if settings.pairs is None:
        return
    if settings.rollouts is None and settings.group_size < 2 * settings.pairs:
        yield Problem(
            "rl.pairs",
            f"is {settings.pairs}, and an attempt is in one pair: a group of {settings.group_size} makes {settings.group_size // 2}",
            "Lower rl.pairs, or raise rl.group_size",
        )
    if settings.kl is not None:
        yield Problem(
            "rl.kl",
            "takes a penalty off the rewards of attempts that were scored, and rl.pairs chooses attempts before that",
            "Remove it: losses such as dpo hold the model to the reference themselves, by their beta",
        )
    if settings.history == "template":
        yield Problem(
            "rl.history",
            'is "template", so that an attempt may be several samples, and half of a pair is one',
            'Set rl.history = "append", or remove rl.pairs',
        )


def refuse_losses_of_other_samples(draft: RlDraft) -> None:
    """Refuse parts of the objective that read pairs where there are none, or advantages where there are pairs. Raises UnsupportedError."""
    if draft.assembly is None or not draft.trains:
        return
    objective, needs_of = draft.assembly.objective, draft.assembly.needs
    if not draft.has_pairs:
        readers = [label for label, needs in needs_of.items() if ROLE_NEED in needs]
        readers += [f'{part.place}.on = "{part.on}"' for part in objective.losses if part.on is not None]
        if readers:
            raise UnsupportedError(
                f"{readers[0]} tells chosen from rejected answers, and this run trains on attempts by their advantages",
                remedy="Set rl.pairs = 1, which makes pairs of attempts, or choose a loss that reads advantages, such as ppo",
            )
        return
    for label, needs in needs_of.items():
        if read := [name for name in _OF_ADVANTAGES if name in needs]:
            raise UnsupportedError(
                f"{label} reads {read[0]}, and rl.pairs trains on pairs of attempts, of which no advantages are estimated",
                remedy="Choose a loss of preferences, such as dpo, or remove rl.pairs",
            )
    if not any(ROLE_NEED in part.product.needs or part.on is not None for part in objective.losses):
        raise UnsupportedError(
            f"{objective.main.label} does not tell chosen from rejected attempts, so it would learn both alike",
            remedy='Set loss.use = "dpo", or another loss of preferences, or remove rl.pairs',
        )
    for part in objective.losses:
        if ROLE_NEED in part.product.needs and any(model_score(need) == "values" for need in part.product.needs):
            raise UnsupportedError(
                f"{part.label} trains a reward model's values, and this run trains a model that writes",
                remedy='Set loss.use = "dpo", or another loss of preferences',
            )


def refuse_recording_without_pairs(draft: RlDraft) -> None:
    """Refuse recorded rollouts of which no pair can be made. Raises UnsupportedError."""
    recording = draft.rollouts
    if not draft.has_pairs or not isinstance(recording, Recording):
        return
    if recording.largest == 1:
        raise UnsupportedError(
            f"rl.pairs compares attempts at one task, and no task of {recording.place} has two",
            remedy="Record groups of several attempts, or remove rl.pairs",
        )
    if recording.rewritten:
        raise UnsupportedError(
            f"an attempt of {recording.place} is several samples, because its history was rewritten, and half of a pair is one",
            remedy='Record attempts with rl.history = "append", or remove rl.pairs',
        )
