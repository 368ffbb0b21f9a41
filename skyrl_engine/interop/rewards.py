"""Reward functions of other engines, and of lists, called as ours: distinguished by the names of their parameters."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import frozen

from skyrl_engine.contracts.kinds.environment import Action, Task
from skyrl_engine.errors import ContractError

Form = Literal["auto", "skyrl_engine", "batch", "trl", "verl"]
"""`skyrl_engine`: (text, task); `batch`: (texts, tasks); `trl`: (prompts, completions, **columns); `verl`: (data_source, solution_str,
ground_truth, extra_info)."""


def as_reward(function: Callable[..., Any], form: Form = "auto") -> Callable[[Action, Task], Any]:
    """Return the function as one of (action, task), whose result may be awaitable.

    A function of lists is given lists of one: attempts end one by one, each in the process of its episode. So is one of TRL (1.16,
    `reward_funcs`): as there, prompts and completions are texts where the row's prompt is a text, and lists of messages where it is one. Of
    verl (0.6, `compute_score`) what is needed is read from the task's data: `data_source`, `ground_truth` (or `reward_model.ground_truth`),
    `extra_info`. Raises ContractError for a function whose parameters are none of these.
    """
    signature = inspect.signature(function)
    chosen_form = _form(signature.parameters) if form == "auto" else form
    if chosen_form is None or (chosen_form in ("skyrl_engine", "batch") and not _takes_two(signature)):
        raise ContractError(
            f"the reward {getattr(function, '__name__', function)!r} takes ({', '.join(signature.parameters)})",
            remedy="Let it take (text, task), or lists (texts, tasks), or TRL's (completions, **columns), or verl's (data_source, "
            "solution_str, ground_truth)",
        )
    return _Called(function, chosen_form)


@frozen(eq=False)
class _Called:
    """A function of one of the forms, as ours."""

    function: Callable[..., Any]
    form: str

    def __call__(self, action: Action, task: Task) -> Any:
        match self.form:
            case "batch":
                return only_of(self.function, self.function([action.text], [task]))
            case "trl":
                return only_of(self.function, self.function(**_select_accepted_arguments(self.function, _of_trl(action, task))))
            case "verl":
                return _score_of(self.function(**_select_accepted_arguments(self.function, _of_verl(action, task))))
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
    if {"texts", "tasks"} <= set(names):
        return "batch"
    return "skyrl_engine" if len(names) >= 2 and not {"batch", "samples"} & set(names) else None


def _of_trl(action: Action, task: Task) -> dict[str, Any]:
    columns = {name: [value] for name, value in task.data.items() if name not in ("prompts", "completions")}
    is_text = task.prompt_text is not None
    return {
        "prompts": [task.prompt_text if is_text else [dict(message) for message in task.messages]],
        "completions": [action.text if is_text else [{"role": "assistant", "content": action.text}]],
        "completion_ids": [list(action.token_ids)],
        **columns,
    }


def _select_accepted_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def only_of(function: Callable[..., Any], result: Any) -> Any:
    """Return the one reward of a list of one, which may be awaitable. Raises ContractError for another list, and for what is none."""
    if not inspect.isawaitable(result):
        return _only(function, result)

    async def wait_for_result() -> Any:
        return _only(function, await result)

    return wait_for_result()


def _only(function: Callable[..., Any], rewards: Any) -> Any:
    # lists, tuples, arrays and tensors
    listed = hasattr(rewards, "__getitem__") and not isinstance(rewards, str | bytes | Mapping)
    if not listed or getattr(rewards, "ndim", 1) != 1 or len(rewards) != 1:
        raise ContractError(
            f"the reward {getattr(function, '__name__', function)!r} returned {rewards!r:.80} for one completion",
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


def _score_of(result: Any) -> Any:
    """Return the score of what a function of verl returned, which may be awaitable: a number, or a mapping that holds it."""
    if not inspect.isawaitable(result):
        return result["score"] if isinstance(result, Mapping) and "score" in result else result

    async def wait_for_result() -> Any:
        return _score_of(await result)

    return wait_for_result()
