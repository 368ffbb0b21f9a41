"""`gymnasium`: environments whose observations are text and whose actions are text, or numbered choices."""

import importlib.metadata
from contextlib import suppress
from typing import Any

from attrs import define, field, frozen

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Action, EnvironmentClaims, Message, Split, StepResult, Task, Tasks
from skyrl_engine.environments import content_of, function_of
from skyrl_engine_environments.options import GymnasiumOptions
from skyrl_engine_environments.requirements import require_package


@define(eq=False)
class GymnasiumEnvironment:
    """Plays a gymnasium environment: an observation is a user message, a turn of the model an action.

    Raises DataError where `options.id` names a file that cannot be imported or has no such class.
    """

    options: GymnasiumOptions
    claims: EnvironmentClaims = field(init=False)

    def __attrs_post_init__(self) -> None:
        require_package("gymnasium", "gymnasium")
        version = f"gymnasium {importlib.metadata.version('gymnasium')}"
        if _is_of_file(self.options.id):
            # imported here, so that a run without it ends while it is planned
            function_of(self.options.id, "class")
            version = f"{version}, {content_of(self.options.id)}"
        self.claims = EnvironmentClaims(
            max_turns=self.options.max_turns, pass_threshold=self.options.pass_threshold, version=version
        )

    def tasks(self, split: Split) -> Tasks:
        """Return starts of episodes. Raises UnsupportedError for spaces that are not text."""
        environment = self.make()
        refuse_other_spaces(self.options.id, environment)
        environment.close()
        first = 0 if split == "train" else self.options.size
        return GymnasiumTasks(self, split, first, self.options.size if split == "train" else self.options.eval_size)

    def open(self, task: Task, seed: int) -> "GymnasiumEpisode":  # noqa: ARG002 -- a start has its own seed
        return GymnasiumEpisode(self, task)

    def make(self) -> Any:
        """Make the environment itself. Raises UnsupportedError where gymnasium, or the file's class, does not make it."""
        import gymnasium

        if _is_of_file(self.options.id):
            return self._make_of_file()
        try:
            return gymnasium.make(self.options.id, **self.options.kwargs)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise UnsupportedError(
                f"gymnasium does not make {self.options.id!r}: {error}",
                remedy="Correct `id` or `kwargs`; `package.module:Id` imports first, and ./file.py:Class is a class of a file",
            ) from error

    def _make_of_file(self) -> Any:
        import gymnasium

        made_of = function_of(self.options.id, "class")
        try:
            environment = made_of(**self.options.kwargs)
        except TypeError as error:
            raise UnsupportedError(
                f"{self.options.id} cannot be made: {error}", remedy="Correct `kwargs`, the arguments of the class"
            ) from error
        if not isinstance(environment, gymnasium.Env):
            raise UnsupportedError(
                f"{self.options.id} makes a {type(environment).__name__} and no gymnasium.Env",
                remedy="Name a subclass of gymnasium.Env, or a function that returns an environment",
            )
        return environment


@frozen(eq=False)
class GymnasiumTasks:
    """Starts of episodes: task i is the start of seed `first` + i."""

    environment: GymnasiumEnvironment
    split: Split
    first: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        options, seed = self.environment.options, self.first + index
        if options.system_prompt is None:
            messages = self._first_observation(seed)
        else:
            # the first observation follows when the episode begins
            system = options.system_prompt.replace("{id}", _name_of(options.id))
            messages = ({"role": "system", "content": system},)
        return Task(f"{self.split}/{index}", messages, data={"seed": seed})

    def _first_observation(self, seed: int) -> tuple[Message, ...]:
        environment = self.environment.make()
        try:
            observation, _ = environment.reset(seed=seed)
        except BaseException:
            # what was never reset may fail to close
            with suppress(Exception):
                environment.close()
            raise
        environment.close()
        return self.environment.options.messages(str(observation))


@define(eq=False)
class GymnasiumEpisode:
    """One episode."""

    environment: GymnasiumEnvironment
    task: Task
    _made: Any = None

    def begin(self) -> tuple[Message, ...]:
        """Reset the environment with the start's seed; its observation is the first message, where it is not the task already."""
        self._made = self.environment.make()
        observation, _ = self._made.reset(seed=self.task.data["seed"])
        options = self.environment.options
        return () if options.system_prompt is None else options.messages(str(observation))[-1:]

    def step(self, action: Action) -> StepResult:
        """Do what the model says; what is no action of the space ends nothing and is answered with what is one."""
        last = action.turn + 1 >= self.environment.options.max_turns
        choice = action_of(self._made.action_space, action.text)
        if choice is None:
            message = f"{action.text.strip()!r:.80} is no action. {choices(self._made.action_space)}"
            return _answer(0.0, message, done=last, metrics={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, _ = self._made.step(choice)
        return _answer(float(reward), str(observation), done=last or bool(terminated or truncated))

    def close(self) -> None:
        """Close the environment."""
        environment, self._made = self._made, None
        if environment is not None:
            environment.close()


def _is_of_file(name: str) -> bool:
    return name.rpartition(":")[0].endswith(".py")


def _name_of(name: str) -> str:
    """Return the name that prompts contain: for a class in a file the class name alone, without the path on this machine."""
    return name.rpartition(":")[2] if _is_of_file(name) else name


def _answer(reward: float, said: str, *, done: bool, **more: Any) -> StepResult:
    return StepResult(reward, done=done, messages=() if done else ({"role": "user", "content": said},), **more)


def refuse_other_spaces(name: str, environment: Any) -> None:
    """Raises UnsupportedError for observations that are not text, or actions that are neither text nor numbered."""
    from gymnasium.spaces import Discrete, Text

    if not isinstance(environment.observation_space, Text):
        raise UnsupportedError(
            f"{name} has observations of the space {environment.observation_space}, and a language model reads text",
            remedy="Wrap it (gymnasium.ObservationWrapper) so that its observation space is gymnasium.spaces.Text",
        )
    if not isinstance(environment.action_space, Text | Discrete):
        raise UnsupportedError(
            f"{name} has actions of the space {environment.action_space}, and a language model writes text",
            remedy="Wrap it (gymnasium.ActionWrapper) so that its action space is Text or Discrete",
        )


def action_of(space: Any, text: str) -> Any:
    """Return the action that a text names; None where it names none."""
    from gymnasium.spaces import Text

    said = text.strip()
    if isinstance(space, Text):
        return said if said in space else None
    try:
        number = int(said)
    except ValueError:
        return None
    return number if number in space else None


def choices(space: Any) -> str:
    """Say what an action is."""
    from gymnasium.spaces import Text

    if isinstance(space, Text):
        return f"An action is a text of {space.min_length} to {space.max_length} characters."
    return f"An action is a number from {int(space.start)} to {int(space.start) + int(space.n) - 1}."
