"""Options of the environments."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import Factory, field, frozen
from attrs.validators import ge, gt, min_len, optional

from skyrl_engine.contracts import CODE, DESCRIBES, PLACE
from skyrl_engine.environments import PromptOptions, TableOptions


def _names_sets(_instance: object, attribute: Any, value: str | tuple[str, ...]) -> None:
    names = (value,) if isinstance(value, str) else value
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"'{attribute.name}' must name data sets, each once, is {value!r}")


_MOST_WEIGHT = 1000
"""A round of a mixture has as many tasks as its weights add up to."""


def _weighs_sets(instance: "ReasoningGymOptions", attribute: Any, value: Mapping[str, int]) -> None:
    names = (instance.task,) if isinstance(instance.task, str) else instance.task
    whole = all(
        isinstance(weight, int) and not isinstance(weight, bool) and 1 <= weight <= _MOST_WEIGHT for weight in value.values()
    )
    if not whole or not set(value) <= set(names):
        raise ValueError(
            f"'{attribute.name}' must give whole numbers from 1 to {_MOST_WEIGHT} to data sets of 'task', is {value!r}"
        )


@frozen
class RewardTable:
    """A reward function, and its share of the sum."""

    use: str = field(validator=min_len(1), metadata={PLACE: "reference"})
    """The function: `./file.py:name`, or `package.module:name`."""

    weight: float = 1.0
    """Factor of its number in the reward."""


@frozen
class FunctionOptions(TableOptions):
    """Options of `function`."""

    reward: str | tuple[str, ...] | None = field(default=None, kw_only=True, metadata={PLACE: "reference"})
    """The reward: `./file.py:name`, a function of (text, task); or a list of them, which are added up."""

    rewards: tuple[RewardTable, ...] = field(default=(), kw_only=True)
    """Rewards with weights: `[[environments.rewards]]` with `use` and `weight`."""

    form: Literal["auto", "skyrl_engine", "batch", "trl", "verl"] = field(
        default="auto", kw_only=True, metadata={DESCRIBES: "reward"}
    )
    """Arguments of rewards: ours (text, task), lists of them (texts, tasks), TRL's (prompts, completions, **columns) or verl's (data_source,
    solution_str, ...); `auto` tells by the names of their parameters."""

    tools: tuple[str, ...] = field(default=(), kw_only=True, metadata={PLACE: "reference"})
    """Functions that the model may call: `./file.py:name`, with types and a docstring."""

    max_turns: int = field(default=8, kw_only=True, validator=ge(1))
    """Turns after which an attempt is scored, where there are tools."""

    pass_threshold: float = field(default=1.0, kw_only=True)
    """Reward from which on an attempt counts as a success."""

    random: bool = field(default=False, kw_only=True)
    """Say that a reward or a tool may answer the same turn differently, as a judge without a cache does: resumes are not exact then."""


@frozen
class PromptsOptions(TableOptions):
    """Options of `prompts`."""


@frozen
class ReasoningGymOptions(PromptOptions):
    """Options of `reasoning_gym`. A task's own options are under `config`."""

    task: str | tuple[str, ...] = field(kw_only=True, validator=_names_sets)
    """Data sets by name, such as `spell_backward`; several are mixed, evenly or by `weights`."""

    weights: Mapping[str, int] = field(default=Factory(dict), kw_only=True, validator=_weighs_sets)
    """Tasks of a data set in every round of a mixture, by its name; those that are not named have 1."""

    config: Mapping[str, Any] = field(default=Factory(dict), kw_only=True)
    """Options of the data set, such as `config.max_word_len = 5`; with several data sets, a table per name."""

    size: int | None = field(default=None, kw_only=True, validator=optional(ge(1)))
    """Tasks to train on; none: a million, made when they are asked for, or 1,000 where a data set makes all at once."""

    eval_size: int = field(default=1000, kw_only=True, validator=ge(1))
    """Held-out tasks, of another seed."""

    seed: int = field(default=0, kw_only=True, validator=ge(0))
    """Seed of the tasks."""

    answer_pattern: str | None = field(default=None, kw_only=True)
    """Regular expression whose last match, its first group, is the answer; none: the whole text. Scorers pay for an answer that stands
    anywhere."""

    exact: bool = field(default=False, kw_only=True)
    """Pay 1 for the answer itself and 0 for all else, whatever the data set's own scorer says."""

    pass_threshold: float = field(default=1.0, kw_only=True, validator=gt(0.0))
    """Score from which on an attempt counts as a success."""


@frozen
class GymnasiumOptions(PromptOptions):
    """Options of `gymnasium`."""

    id: str = field(kw_only=True, validator=min_len(1), metadata={PLACE: "reference"})
    """The environment: a registered id, as `gymnasium.make` takes it; `package.module:Id` imports a module first; or a class of a file,
    `./file.py:Class`."""

    system_prompt: str | None = field(default="You play {id}. Answer with your next action alone.", kw_only=True)
    """Text of a system message before every episode, with the environment's name for `{id}`; none: no message, and the first observation is
    the task."""

    kwargs: Mapping[str, Any] = field(default=Factory(dict), kw_only=True, metadata={CODE: True})
    """Arguments of `gymnasium.make`."""

    max_turns: int = field(default=16, kw_only=True, validator=ge(1))
    """Turns after which an attempt ends with the rewards it has."""

    size: int = field(default=10_000, kw_only=True, validator=ge(1))
    """Starts to train on: an episode's seed is its number."""

    eval_size: int = field(default=256, kw_only=True, validator=ge(1))
    """Number of held-out starts, after those."""

    pass_threshold: float = field(default=1.0, kw_only=True)
    """Sum of rewards from which on an attempt counts as a success."""
