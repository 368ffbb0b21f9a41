"""`gymnasium`: environments whose observations are text and whose actions are text, or numbered choices."""

import importlib.metadata
from typing import Any

from attrs import define, field, frozen

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Action, EnvironmentClaims, Message, Split, StepResult, Task, Tasks
from skyrl_engine_environments.options import GymnasiumOptions
from skyrl_engine_environments.requirements import needed


@define(eq=False)
class GymnasiumEnvironment:
    """Plays a gymnasium environment: an observation is a user message, a turn of the model an action."""

    options: GymnasiumOptions
    claims: EnvironmentClaims = field(init=False)

    def __attrs_post_init__(self) -> None:
        needed("gymnasium", "gymnasium")
        version = f"gymnasium {importlib.metadata.version('gymnasium')}"
        self.claims = EnvironmentClaims(
            max_turns=self.options.max_turns, pass_threshold=self.options.pass_threshold, version=version
        )

    def tasks(self, split: Split) -> Tasks:
        """Return starts of episodes. Raises UnsupportedError for spaces that are not text."""
        made = self.make()
        refuse_other_spaces(self.options.id, made)
        made.close()
        first = 0 if split == "train" else self.options.size
        return GymnasiumTasks(self.options, split, first, self.options.size if split == "train" else self.options.eval_size)

    def open(self, task: Task, seed: int) -> "GymnasiumEpisode":  # noqa: ARG002 -- a start has its own seed
        return GymnasiumEpisode(self, task)

    def make(self) -> Any:
        """Make the environment itself."""
        import gymnasium

        try:
            return gymnasium.make(self.options.id, **self.options.kwargs)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise UnsupportedError(
                f"gymnasium does not make {self.options.id!r}: {error}",
                remedy="Correct `id` or `kwargs`; `package.module:Id` imports first",
            ) from error


@frozen(eq=False)
class GymnasiumTasks:
    """Starts of episodes: task i is the start of seed `first` + i."""

    options: GymnasiumOptions
    split: Split
    first: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        # the first observation follows when the episode begins; without a system prompt the task has a line of its own
        system = self.options.system_prompt or f"You play {self.options.id}. Answer with your next action alone."
        return Task(f"{self.split}/{index}", ({"role": "system", "content": system},), data={"seed": self.first + index})


@define(eq=False)
class GymnasiumEpisode:
    """One episode."""

    environment: GymnasiumEnvironment
    task: Task
    _made: Any = None

    def begin(self) -> tuple[Message, ...]:
        """Reset the environment with the start's seed; its observation is the first message."""
        self._made = self.environment.make()
        observation, _ = self._made.reset(seed=self.task.data["seed"])
        return self.environment.options.messages(str(observation))[-1:]

    def step(self, action: Action) -> StepResult:
        """Do what the model says; what is no action of the space ends nothing and is answered with what is one."""
        last = action.turn + 1 >= self.environment.options.max_turns
        choice = action_of(self._made.action_space, action.text)
        if choice is None:
            told = f"{action.text.strip()!r:.80} is no action. {choices(self._made.action_space)}"
            return _answer(0.0, told, done=last, metrics={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, _ = self._made.step(choice)
        return _answer(float(reward), str(observation), done=last or bool(terminated or truncated))

    def close(self) -> None:
        """Close the environment."""
        made, self._made = self._made, None
        if made is not None:
            made.close()


def _answer(reward: float, said: str, *, done: bool, **more: Any) -> StepResult:
    return StepResult(reward, done=done, messages=() if done else ({"role": "user", "content": said},), **more)


def refuse_other_spaces(name: str, made: Any) -> None:
    """Raises UnsupportedError for observations that are not text, or actions that are neither text nor numbered."""
    from gymnasium.spaces import Discrete, Text

    if not isinstance(made.observation_space, Text):
        raise UnsupportedError(
            f"{name} has observations of the space {made.observation_space}, and a language model reads text",
            remedy="Wrap it (gymnasium.ObservationWrapper) so that its observation space is gymnasium.spaces.Text",
        )
    if not isinstance(made.action_space, Text | Discrete):
        raise UnsupportedError(
            f"{name} has actions of the space {made.action_space}, and a language model writes text",
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
