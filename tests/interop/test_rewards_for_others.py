"""Rewards and environments of this engine called as TRL and verl call theirs. `nox -s peers` runs the same in their packages."""

import asyncio
from typing import Any, ClassVar

import pytest
from attrs import field, frozen

from skyrl_engine import group_reward, hookimpl, reward
from skyrl_engine.contracts import EnvironmentClaims, StepResult
from skyrl_engine.environments import TableOptions
from skyrl_engine.errors import ConfigError, ContractError, DataError, EngineError, PluginBrokenError, ResultError, UnsupportedError
from skyrl_engine.interop import trl_environment, trl_reward, verl_reward


@frozen
class LettersOptions(TableOptions):
    paid: str = field(default="aeiou", kw_only=True)


@reward(config=LettersOptions)
def letters(text: str, task: Any, config: LettersOptions) -> float:
    return sum(each in config.paid for each in text) / max(1, len(text))


@reward()
async def right(text: str, task: Any) -> StepResult:
    await asyncio.sleep(0)
    good = float(text == task.data["answer"])
    return StepResult(good, parts={"right": good}, metrics={"length": float(len(text))})


@group_reward()
def longest(texts: list[str], task: Any) -> list[float]:
    return [float(len(text) == max(map(len, texts))) for text in texts]


class Countdown:
    """The model says "down" until the number is 0; every turn that says something else costs 1."""

    claims = EnvironmentClaims(max_turns=9)
    opened: ClassVar[list[int]] = []
    closed: ClassVar[list[int]] = []

    class Episode:
        """One attempt."""

        def __init__(self, task: Any, seed: int) -> None:
            self.number, self.seed = int(task.data["start"]), seed
            Countdown.opened.append(seed)

        def begin(self) -> Any:
            return ({"role": "user", "content": f"It is {self.number}."},)

        async def step(self, action: Any) -> StepResult:
            if action.text != "down":
                return StepResult(-1.0, done=False, messages=({"role": "user", "content": "Say down."},))
            self.number -= 1
            if not self.number:
                return StepResult(5.0)
            return StepResult(0.0, done=False, messages=({"role": "user", "content": f"It is {self.number}."},))

        def close(self) -> None:
            Countdown.closed.append(self.seed)

    def tasks(self, split: str) -> Any:
        return ()

    def open(self, task: Any, seed: int) -> Any:
        return self.Episode(task, seed)


class CountdownPlugin:
    name = "countdown"

    @hookimpl
    def skyrl_engine_make_environment(self) -> Countdown:
        return Countdown()


def test_a_reward_gives_each_completion_what_it_gives_an_attempt() -> None:
    rewards = trl_reward(letters, options={"paid": "xy"})
    assert rewards.__name__ == "letters"
    assert rewards(prompts=["a", "a"], completions=["xa", "yyyx"], completion_ids=[[1], [2]], trainer_state=object()) == [0.5, 1.0]
    messages = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "xx"}, {"role": "assistant", "content": "xa"}]
    assert rewards(prompts=[[{"role": "user", "content": "a"}]], completions=[messages]) == [0.5]
    assert rewards(prompts=["a"], completions=[[{"role": "assistant", "content": None}]]) == [0.0]


def test_columns_are_the_tasks_data_and_parts_are_logged() -> None:
    logged: dict[str, float] = {}
    rewards = trl_reward(right)
    got = rewards(prompts=["2+2", "3"], completions=["4", "four"], answer=["4", "3"], log_metric=logged.__setitem__)
    assert got == [1.0, 0.0]
    assert logged == {"right/right": 0.5, "right/length": 2.5}

    async def inside_of_a_loop() -> list[float]:
        return rewards(prompts=["2+2"], completions=["4"], answer=["4"])

    assert asyncio.run(inside_of_a_loop()) == [1.0]


def test_a_group_is_rewarded_together_and_a_part_of_one_is_refused() -> None:
    rewards = trl_reward(longest, num_generations=2)
    prompts, completions = ["a", "a", "b", "b"], ["x", "yy", "zz", "z"]
    assert rewards(prompts=prompts, completions=completions) == [0.0, 1.0, 1.0, 0.0]
    for cut in (slice(1, 3), slice(0, 3)):
        with pytest.raises(DataError, match=r"longest.* compares 2 completions of a prompt, and those from number"):
            rewards(prompts=prompts[cut], completions=completions[cut])
    with pytest.raises(UnsupportedError, match="num_generations is None"):
        trl_reward(longest)
    with pytest.raises(UnsupportedError, match="verl scores each alone"):
        verl_reward(longest)


def test_verl_gets_a_score_and_parts_beside_it() -> None:
    assert verl_reward(letters)(data_source="mine", solution_str="ab", ground_truth=None) == 0.5
    score = verl_reward(right)
    assert score("mine", "4", "no", {"answer": "4"}) == {"right": 1.0, "length": 1.0, "score": 1.0}
    assert score("mine", "5", "no", {"answer": "4"}, reward_model=None)["score"] == 0.0

    @reward()
    def by_truth(text: str, task: Any) -> float:
        assert task.data["data_source"] == "mine"
        return float(text == task.data["ground_truth"])

    assert verl_reward(by_truth)("mine", "7", "7", None) == 1.0


def test_an_environment_of_turns_is_spoken_to_by_a_tool() -> None:
    factory = trl_environment(CountdownPlugin())
    one, other = factory(), factory()
    assert type(one).__name__ == "countdown_environment"
    Countdown.opened.clear(), Countdown.closed.clear()
    assert one.reset(prompt=[{"role": "user", "content": "Go."}], start=2) == "It is 2."
    assert other.reset(prompt="Go.", start=1) == "It is 1."
    assert [one.answer("up"), one.answer("down"), one.answer("down")] == ["Say down.", "It is 1.", "The attempt is over."]
    assert (one.get_reward(), other.get_reward()) == (4.0, 0.0)
    assert one.answer("down") == "The attempt is over."
    assert one.get_reward() == 4.0
    assert len(set(Countdown.opened)) == 2
    # one that goes on is closed when the next attempt begins, and each is closed once
    assert other.reset(prompt="Go.", start=3) == "It is 3."
    assert sorted(Countdown.closed) == sorted(Countdown.opened[:2])
    with pytest.raises(UnsupportedError, match=r"countdown.* has attempts of up to 9 turns.*environment_factory"):
        trl_reward(CountdownPlugin())
    with pytest.raises(UnsupportedError, match="TRL's environments are alone"):
        trl_environment(longest)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: trl_reward(letters, options={"payed": "x"}), ConfigError, "payed"),
        (lambda: trl_reward("nothing-of-this-name"), EngineError, "nothing-of-this-name"),
        (lambda: trl_reward(letters.function), ContractError, "letters is a plain function"),
        (lambda: trl_reward(letters)(prompts=["a"], completions=[]), DataError, "0 completions for 1 prompts"),
        (lambda: trl_reward(right)(prompts=["a"], completions=["b"], answer=[]), DataError, "0 answer for 1 prompts"),
        (lambda: trl_reward(right)(prompts=["a"], completions=["b"]), PluginBrokenError, "right.*KeyError"),
    ],
)
def test_mistakes_are_named(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make()


def test_a_reward_that_is_no_number_is_named_and_not_taken_for_none() -> None:
    """TRL leaves a completion whose reward is NaN out of its mean; ours says so."""

    @reward()
    def broken(text: str, task: Any) -> Any:
        return StepResult(float("nan"))

    with pytest.raises(ResultError, match=r"broken.* answered a turn with .*nan"):
        trl_reward(broken)(prompts=["a"], completions=["b"])

    @reward()
    def wordy(text: str, task: Any) -> Any:
        return "1"

    with pytest.raises(ContractError, match="wordy returned '1'"):
        verl_reward(wordy)("mine", "b", None)
