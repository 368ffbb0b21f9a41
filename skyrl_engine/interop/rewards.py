"""Reward functions of other engines, called as ours: told apart by the names of their parameters."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import frozen

from skyrl_engine.contracts.kinds.environment import Action, Task
from skyrl_engine.errors import ContractError

Form = Literal["auto", "skyrl_engine", "trl", "verl"]
"""`skyrl_engine`: (text, task); `trl`: (prompts, completions, **columns); `verl`: (data_source, solution_str, ground_truth, extra_info)."""


def as_reward(function: Callable[..., Any], form: Form = "auto") -> Callable[[Action, Task], Any]:
    """Return the function as one of (action, task), whose result may be awaitable.

    Of TRL (1.16, `reward_funcs`) a batch is one attempt: lists of one, completions as messages, since tasks are conversations. Of verl (0.6,
    `compute_score`) what is needed is read from the task's data: `data_source`, `ground_truth` (or `reward_model.ground_truth`),
    `extra_info`. Raises ContractError for a function whose parameters are none of these.
    """
    signature = inspect.signature(function)
    found = _form(signature.parameters) if form == "auto" else form
    if found is None or (found == "skyrl_engine" and not _takes_two(signature)):
        raise ContractError(
            f"the reward {getattr(function, '__name__', function)!r} takes ({', '.join(signature.parameters)})",
            remedy="Let it take (text, task), or TRL's (completions, **columns), or verl's (data_source, solution_str, ground_truth)",
        )
    return _Called(function, found)


@frozen(eq=False)
class _Called:
    """A function of one of the forms, as ours."""

    function: Callable[..., Any]
    form: str

    def __call__(self, action: Action, task: Task) -> Any:
        match self.form:
            case "trl":
                return _first(self.function, _of_trl(action, task))
            case "verl":
                return _score(self.function(**_of_verl(action, task)))
            case _:
                return self.function(action.text, task)


def _takes_two(signature: inspect.Signature) -> bool:
    try:
        signature.bind("", None)
    except TypeError:
        return False
    return True


def _form(names: Mapping[str, inspect.Parameter]) -> str | None:
    if "completions" in names:
        return "trl"
    if "solution_str" in names:
        return "verl"
    return "skyrl_engine" if len(names) >= 2 and not {"batch", "samples"} & set(names) else None


def _of_trl(action: Action, task: Task) -> dict[str, Any]:
    columns = {name: [value] for name, value in task.data.items() if name not in ("prompts", "completions")}
    return {
        "prompts": [[dict(message) for message in task.messages]],
        "completions": [[{"role": "assistant", "content": action.text}]],
        "completion_ids": [list(action.token_ids)],
        **columns,
    }


def _first(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    parameters = inspect.signature(function).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    made = function(**arguments)
    if inspect.isawaitable(made):

        async def waited() -> Any:
            return _only(await made)

        return waited()
    return _only(made)


def _only(rewards: Any) -> Any:
    if not isinstance(rewards, list | tuple) or len(rewards) != 1:
        raise ContractError(
            f"a reward of TRL's form returned {rewards!r:.80} for one completion",
            remedy="Return a list with one reward per completion",
        )
    return rewards[0]


def _of_verl(action: Action, task: Task) -> dict[str, Any]:
    data = task.data
    model = data.get("reward_model")
    truth = data.get("ground_truth", model.get("ground_truth") if isinstance(model, Mapping) else None)
    return {
        "data_source": data.get("data_source"),
        "solution_str": action.text,
        "ground_truth": truth,
        "extra_info": data.get("extra_info"),
    }


def _score(made: Any) -> Any:
    return made["score"] if isinstance(made, Mapping) and "score" in made else made
