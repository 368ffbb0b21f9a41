"""Rewards and tools as people write them, in the forms of three engines."""

import asyncio

import numpy as np

from skyrl_engine import reward
from skyrl_engine.contracts import StepResult


def exact(text, task):
    """1 for the answer."""
    return float(text.strip() == task.data["answer"])


def short(text, task):
    """1 for the empty text, falling with its length."""
    return 1 / (1 + len(text))


async def later(text, task):
    """As `exact`, from a judge that takes its time."""
    await asyncio.sleep(0)
    return exact(text, task)


def of_lists(texts, tasks):
    """As `exact`, of many at once."""
    assert isinstance(texts, list)
    assert isinstance(tasks, list)
    return [exact(text, task) for text, task in zip(texts, tasks, strict=True)]


async def of_lists_later(texts, tasks):
    """As `of_lists`, from a judge that takes its time; NumPy's numbers."""
    await asyncio.sleep(0)
    return np.array(of_lists(texts, tasks))


def of_lists_explained(texts, tasks):
    return [explained(text, task) for text, task in zip(texts, tasks, strict=True)]


def of_lists_too_many(texts, tasks):
    return [0.0, 1.0]


def of_lists_text(texts, tasks):
    return "1"


def explained(text, task):
    """As `exact`, with more to say."""
    return StepResult(exact(text, task), metrics={"length": len(text)}, success=True, info={"due": task.data["answer"]})


def of_trl(completions, answer, **kwargs):
    """A function of TRL, whose columns are lists, for rows of both kinds."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [float(text.strip() == due) for text, due in zip(texts, answer, strict=True)]


async def of_trl_later(prompts, completions, answer):
    """One that names what it takes, and is a coroutine."""
    assert isinstance(prompts[0], str) or prompts[0][-1]["role"] == "user"
    return of_trl(completions, answer)


def of_trl_shown(prompts, completions, **kwargs):
    """Show what it is given."""
    return [StepResult(0.0, info={"prompt": prompts[0], "completion": completions[0]})]


def of_trl_sometimes(completions, answer, **kwargs):
    """None is TRL's word for a reward that does not apply."""
    return [None if due == "4" else 1.0 for due in answer]


def of_trl_wrong(completions, **kwargs):
    return 1.0


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    """A function of verl."""
    return {"score": float(solution_str == ground_truth), "acc": 1, "source": data_source, "extra": extra_info}


def of_verl_briefly(solution_str, ground_truth):
    """A function of verl that names what it takes."""
    return float(solution_str == ground_truth)


async def of_verl_later(data_source, solution_str, ground_truth, extra_info=None):
    """As `of_verl`, from a judge that takes its time."""
    await asyncio.sleep(0)
    return of_verl(data_source, solution_str, ground_truth, extra_info)


def tensor(text, task):
    """As `exact`, as the tensor that a model of rewards gives."""
    import torch

    return torch.tensor(exact(text, task))


def of_trl_tensor(completions, answer, **kwargs):
    """As `of_trl`, as a tensor of all."""
    import torch

    return torch.tensor(of_trl(completions, answer))


def tensor_of_two(text, task):
    import torch

    return torch.ones(2)


def of_nobody(samples):
    return 0.0


def of_three(text, task, judge):
    return 0.0


def text_reward(text, task):
    return "1.0"


def nan_reward(text, task):
    return float("nan")


@reward(pass_threshold=0.5)
def decorated(text, task):
    """As `exact`, and a plugin of its own."""
    return exact(text, task)


@reward(batch=True)
def decorated_lists(texts, tasks, config):
    """As `of_lists`, with the options at hand."""
    assert config.prompt_template is None
    return of_lists(texts, tasks)


def add(left: int, right: int = 1) -> int:
    """Add two numbers.

    left: The first number.
    right (int): The second one.
    """
    return left + right


async def look_up(word: str, kinds: list[str] | None = None) -> dict[str, str]:
    """Look a word up."""
    return {"word": word, "kinds": ",".join(kinds or ())}


def undocumented(word: str) -> str:
    return word


def untyped(word) -> str:
    """Has a parameter without a type."""
    return word


def of_bytes(word: bytes) -> str:
    """Has a type that JSON has not."""
    return str(word)


number = 4
