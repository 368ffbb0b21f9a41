"""The runner with the real renderer: what the sampler is given, turn by turn, and how turns that were cut short go on."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from attrs import define, evolve, field

from skyrl_engine.contracts.kinds.environment import Action, EnvironmentClaims, StepResult, Task
from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.contracts.values.rollout import SEGMENT_PROMPT, SEGMENT_SAMPLED, Trajectory, VersionSpans
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.attempt import RolloutLimits
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.rollout.env_pool import EpisodeReply
from skyrl_engine.rollout.runner import RolloutRunner
from skyrl_engine.spans import Phases, Spans
from skyrl_engine.testing.templates import TEMPLATES

QUESTION = {"role": "user", "content": "how much is 1 + 1?"}
GO_ON = StepResult(0.0, done=False, messages=({"role": "user", "content": "no."},))
LOOKUP: Mapping[str, Any] = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'


@define(eq=False)
class Model:
    """Says these texts in turn, each cut where the request's limit cuts it, and remembers what it was given."""

    renderer: ChatRenderer
    texts: Sequence[str]
    requests: list[GenerationRequest] = field(factory=list)
    prompts: list[str] = field(factory=list)
    waiting: list[GenerationRequest] = field(factory=list)
    ended: list[int] = field(factory=list)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.waiting += requests

    def poll(self, timeout: float) -> list[Completion]:
        assert timeout >= 0
        done = []
        for request in self.waiting:
            ids = self.renderer.tokenizer(self.texts[len(self.requests)], add_special_tokens=False)["input_ids"]
            cut = len(ids) > request.sampling.max_tokens
            ids = np.array(ids[: request.sampling.max_tokens], dtype=np.int32)
            self.requests.append(request)
            self.prompts.append(self.renderer.tokenizer.decode(request.prompt_ids.tolist()))
            spans, logprobs = VersionSpans.one(0, len(ids)), np.full(len(ids), -1, dtype=np.float32)
            done.append(
                Completion(request.request_id, ids, logprobs, spans, "length" if cut else "stop", None if cut else int(ids[-1]))
            )
        self.waiting = []
        return done

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        assert request_ids is None

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self.ended += sessions


@define(eq=False)
class Answers:
    """Gives these answers to the turns of an episode, and remembers the turns."""

    results: Sequence[StepResult]
    actions: list[Action] = field(factory=list)
    ready: list[EpisodeReply] = field(factory=list)
    pending: int = 0

    def open(self, episode: int, environment: int, task: Task, seed: int) -> None:
        assert (environment, bool(task.key), seed >= 0) == (0, True, True)
        self.ready.append(EpisodeReply(episode, messages=()))

    def step(self, episode: int, action: Action) -> None:
        self.ready.append(EpisodeReply(episode, result=self.results[len(self.actions)]))
        self.actions.append(action)

    def close(self, episode: int) -> None:
        assert episode > 0

    def poll(self, timeout: float) -> list[EpisodeReply]:
        assert timeout >= 0
        ready, self.ready = self.ready, []
        return ready


def attempt(
    texts: Sequence[str],
    results: Sequence[StepResult],
    *,
    template: str = "chatml",
    history: Any = "append",
    tools: Any = (),
    room: int = 400,
    prompts: int = 1000,
    phases: Phases | None = None,
    threshold: float | None = 1.0,
) -> tuple[Trajectory, Model, Answers]:
    tokenizer = TEMPLATES[template].tokenizer()
    if template == "chatml":
        # tokenizers may have a template of their own for tasks with tools
        tokenizer.chat_template = {
            "default": TEMPLATES["role_tokens"].text if tools else TEMPLATES["chatml"].text,
            "tool_use": tokenizer.chat_template,
        }
    renderer = ChatRenderer(tokenizer, history=history)
    model, answers = Model(renderer, texts), Answers(results)
    runner = RolloutRunner(
        sampler=model,
        episodes=answers,
        turns=renderer,
        names=["sums"],
        claims=[EnvironmentClaims(max_turns=5, pass_threshold=threshold)],
        sampling=Sampling(max_tokens=room),
        limits=RolloutLimits(group_size=1, max_prompt_tokens=prompts, max_tokens=room, keeps_history=history == "append"),
        seed=0,
        phases=phases or Phases(),
    )
    runner.start(0, 0, Task("t", messages=(QUESTION,), tools=tuple(tools)), 0)
    (group,) = runner.advance(5.0)
    return group.trajectories[0], model, answers


@pytest.mark.parametrize("history", ["append", "template"])
def test_later_turns_follow_what_was_sampled(history: Any) -> None:
    trajectory, model, _ = attempt(["three<|im_end|>", "two<|im_end|>"], [GO_ON, StepResult(1.0)], history=history)
    assert model.prompts[1] == model.prompts[0] + "three<|im_end|>\n<|im_start|>user\nno.<|im_end|>\n<|im_start|>assistant\n"
    assert trajectory.status == "finished"
    assert np.count_nonzero(trajectory.kinds == SEGMENT_PROMPT) == 1
    assert trajectory.reward == 1.0


def test_a_sampler_learns_that_an_attempt_has_ended() -> None:
    """Once per attempt of which something may be kept; the last turn that an environment allows says so itself."""
    _, model, _ = attempt(["three<|im_end|>", "two<|im_end|>"], [GO_ON, StepResult(1.0)])
    assert model.ended == [0]
    assert [request.last_turn for request in model.requests] == [False, False]
    assert {(request.session, request.prefix_group) for request in model.requests} == {(0, 0)}
    _, model, _ = attempt(["three<|im_end|>"] * 5, [GO_ON] * 5)
    assert [request.last_turn for request in model.requests] == [False] * 4 + [True]
    assert model.ended == [0]


def test_an_attempt_of_one_turn_leaves_nothing_to_end() -> None:
    renderer = ChatRenderer(TEMPLATES["chatml"].tokenizer())
    model = Model(renderer, ["two<|im_end|>"] * 2)
    runner = RolloutRunner(
        sampler=model,
        episodes=Answers([StepResult(1.0)] * 2),
        turns=renderer,
        names=["sums"],
        claims=[EnvironmentClaims()],
        sampling=Sampling(max_tokens=9),
        limits=RolloutLimits(group_size=2, max_prompt_tokens=99, max_tokens=9),
        seed=0,
        first_number=1000,
    )
    runner.start(3, 0, Task("t", messages=(QUESTION,)), 0)
    runner.advance(5.0)
    assert [(request.session, request.last_turn) for request in model.requests] == [(1006, True), (1007, True)]
    assert model.ended == []


class Slow(Model):
    """Answers nothing until it is told to stop."""

    def poll(self, timeout: float) -> list[Completion]:
        return []

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        self.poll = lambda timeout: Model.poll(self, timeout)  # type: ignore[method-assign] # from now on


def test_attempts_that_are_given_up_have_ended() -> None:
    renderer = ChatRenderer(TEMPLATES["chatml"].tokenizer())
    model = Slow(renderer, ["two<|im_end|>"] * 2)
    runner = RolloutRunner(
        sampler=model,
        episodes=Answers([]),
        turns=renderer,
        names=["sums"],
        claims=[EnvironmentClaims(max_turns=2)],
        sampling=Sampling(max_tokens=9),
        limits=RolloutLimits(group_size=2, max_prompt_tokens=99, max_tokens=9),
        seed=0,
    )
    runner.start(0, 0, Task("t", messages=(QUESTION,)), 0)
    runner.advance(0.0)
    runner.stop()
    assert model.ended == [0, 1]


@pytest.mark.parametrize(
    ("rewards", "success"),
    [((1.0,), True), ((0.9999999999999999,), False), ((0.9, 0.1), True), ((0.1, 0.2, 0.7), True), ((0.5, 0.4), False)],
)
def test_an_attempt_that_earned_enough_succeeded(rewards: Sequence[float], success: bool) -> None:
    """The exact sum of the rewards decides; as float32, the second reward is 1."""
    results = [*(evolve(GO_ON, reward=reward) for reward in rewards[:-1]), StepResult(rewards[-1])]
    trajectory, _, _ = attempt(["one<|im_end|>"] * len(rewards), results)
    assert trajectory.success is success


def test_where_nobody_judges_an_attempt_is_neither_success_nor_failure() -> None:
    trajectory = attempt(["two"], [StepResult(5.0)], threshold=None)[0]
    assert (trajectory.status, trajectory.success) == ("finished", None)


def test_one_mistake_at_many_tasks_is_one_cause(caplog: pytest.LogCaptureFixture) -> None:
    renderer = ChatRenderer(TEMPLATES["chatml"].tokenizer())

    class Failing(Answers):
        def open(self, episode: int, environment: int, task: Task, seed: int) -> None:
            failure = "the reward score returned None" if task.key != "3" else "timed out after 1 s"
            self.ready.append(EpisodeReply(episode, failure=f"environment sums, task {task.key!r}, step 1: {failure}"))

    runner = RolloutRunner(
        sampler=Model(renderer, []),
        episodes=Failing([]),
        turns=renderer,
        names=["sums"],
        claims=[EnvironmentClaims()],
        sampling=Sampling(max_tokens=9),
        limits=RolloutLimits(group_size=2, max_prompt_tokens=99, max_tokens=9, max_failure_share=7 / 200),
        seed=0,
    )
    for ticket in range(4):
        runner.start(ticket, 0, Task(str(ticket), messages=(QUESTION,)), 0)
    with caplog.at_level("INFO"), pytest.raises(RolloutError, match="all of the first 8 attempts failed") as caught:
        runner.advance(1.0)
    assert caught.value.remedy.endswith("or raise rollouts.max_failure_share to 1")
    assert caught.value.details == (
        "6 x environment sums, task '0' and others, step 1: the reward score returned None",
        "2 x environment sums, task '3', step 1: timed out after 1 s",
    )
    assert [record.levelname for record in caplog.records] == ["WARNING", *["INFO"] * 5, "WARNING", "INFO"], (
        "the first of a kind is a warning"
    )


@pytest.mark.parametrize(("slow", "stops"), [("1", False), ("8", True)])
def test_attempts_that_fail_before_others_answer_are_not_all_of_the_first(slow: str, stops: bool) -> None:
    renderer = ChatRenderer(TEMPLATES["chatml"].tokenizer())

    class Failing(Answers):
        def open(self, episode: int, environment: int, task: Task, seed: int) -> None:
            if task.key != slow:
                self.ready.append(EpisodeReply(episode, failure="no such row"))

    runner = RolloutRunner(
        sampler=Model(renderer, []),
        episodes=Failing([]),
        turns=renderer,
        names=["sums"],
        claims=[EnvironmentClaims()],
        sampling=Sampling(max_tokens=9),
        limits=RolloutLimits(group_size=1, max_prompt_tokens=99, max_tokens=9),
        seed=0,
        first_number=2**40,
    )
    for ticket in range(9):
        runner.start(ticket, 0, Task(str(ticket), messages=(QUESTION,)), 0)
    with pytest.raises(RolloutError, match="all of the first 8 attempts failed") if stops else nullcontext():
        runner.advance(0.05)


def test_seconds_are_those_of_whom_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = [0.0], Phases()
    spent.wall = Spans(lambda: now[0])
    for kind, seconds in ((Model, 5.0), (Answers, 3.0)):

        def slow(self: Any, timeout: float, poll: Any = kind.poll, seconds: float = seconds) -> list[Any]:
            found = list(poll(self, timeout))
            now[0] += seconds * bool(found)
            return found

        monkeypatch.setattr(kind, "poll", slow)
    trajectory, _, _ = attempt(["1", "2"], [GO_ON, StepResult(1.0)], phases=spent)
    assert trajectory.turns == 2
    assert spent.wall.drain() == {"generate": 10.0, "environment": 9.0}, "two turns, and a beginning and two answers"


def test_a_removed_thought_begins_a_new_stretch_where_histories_are_rendered() -> None:
    texts = ["<think>\nhm\n</think>\n\nthree<|im_end|>", "two<|im_end|>"]
    trajectory, model, _ = attempt(texts, [GO_ON, StepResult(1.0)], template="thinking", history="template")
    assert "hm" not in model.prompts[1]
    assert np.count_nonzero(trajectory.kinds == SEGMENT_PROMPT) == 2
    trajectory, model, _ = attempt(texts, [GO_ON, StepResult(1.0)], template="thinking")
    assert "hm" in model.prompts[1]
    assert np.count_nonzero(trajectory.kinds == SEGMENT_PROMPT) == 1


def test_a_turn_that_the_environment_cuts_short_is_followed_by_another() -> None:
    """Its end was not sampled, so the template's own token follows; only `max_tokens` truncates an attempt."""
    short = evolve(GO_ON, sampling={"max_tokens": 3})
    trajectory, model, answers = attempt(["three<|im_end|>", "twofold<|im_end|>", "two<|im_end|>"], [short, GO_ON, StepResult(1.0)])
    assert [action.finish for action in answers.actions] == ["stop", "length", "stop"]
    assert answers.actions[1].text == "two"
    assert model.prompts[2].endswith("two<|im_end|>\n<|im_start|>user\nno.<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.status == "finished"
    done = evolve(GO_ON, done=True, messages=())
    trajectory, _, _ = attempt(["three<|im_end|>", "twofold<|im_end|>"], [short, done])
    assert trajectory.status == "finished"
    trajectory, _, _ = attempt(["three<|im_end|>"], [GO_ON], room=3)
    assert trajectory.status == "truncated"
    trajectory, _, _ = attempt(["three<|im_end|>"], [done], room=3)
    assert trajectory.status == "truncated"
    trajectory, _, _ = attempt(["three<|im_end|>"], [done], room=len("three") + 1)
    assert trajectory.status == "finished", "it said all that it wanted"


@pytest.mark.parametrize("history", ["append", "template"])
def test_an_answer_that_leaves_no_room_ends_the_attempt_without_it(history: Any) -> None:
    """No row is longer than what planning allowed for, whatever an environment says."""
    turn, (user,) = "three<|im_end|>", GO_ON.messages
    answer = evolve(GO_ON, messages=({**user, "content": "a" * 400},))
    trajectory, model, _ = attempt([turn], [answer], history=history)
    assert trajectory.status == "truncated"
    assert len(model.requests) == 1
    assert (int(trajectory.kinds[-1]), trajectory.reward) == (SEGMENT_SAMPLED, 0.0)
    _, model, _ = attempt([turn, "two<|im_end|>"], [GO_ON, StepResult(1.0)], history=history)
    answered = len(model.requests[1].prompt_ids) - len(model.requests[0].prompt_ids)
    for room, turns in ((answered, 1), (answered + 1, 2)):
        trajectory, model, _ = attempt([turn, "two<|im_end|>"], [GO_ON, StepResult(1.0)], history=history, room=room)
        assert (trajectory.status, len(model.requests)) == ("truncated", turns)
        assert len(trajectory.token_ids) <= len(model.requests[0].prompt_ids) + room


def test_a_rewritten_history_is_no_longer_than_prompt_and_answer_may_be() -> None:
    """Without the thought the second prompt is another one; what it is longer than the first one comes off the room of its turn."""
    texts = ["<think>\nhm\n</think>\n\nthree<|im_end|>", "two<|im_end|>"]
    answers = [evolve(GO_ON, messages=({"role": "user", "content": "no. " * 20},)), StepResult(1.0)]
    settings: dict[str, Any] = {"template": "thinking", "history": "template"}
    _, model, _ = attempt(texts, answers, **settings)
    first, second = (len(request.prompt_ids) for request in model.requests)
    for left in (0, 1, 2):
        trajectory, model, _ = attempt(texts, answers, room=second - first + left, prompts=first, **settings)
        assert trajectory.status == ("finished" if left else "truncated")
        assert [request.sampling.max_tokens for request in model.requests[1:]] == ([left] if left else [])


def test_answers_that_the_template_refuses_fail_the_attempt_alone() -> None:
    twice = evolve(GO_ON, messages=GO_ON.messages * 2)
    trajectory, _, _ = attempt(["three<end_of_turn>"], [twice], template="model_role")
    assert trajectory.status == "failed"
    assert "refuses the environment's answer" in str(trajectory.cause)


@pytest.mark.parametrize("history", ["append", "template"])
def test_calls_and_answers_of_tools(history: Any) -> None:
    """In a history that is rendered again a call occurs once, as the template writes it."""
    found = StepResult(0.0, done=False, messages=({"role": "tool", "content": "a plant"},))
    trajectory, model, answers = attempt(
        [f"\n{CALL}<|im_end|>", "two<|im_end|>"], [found, StepResult(1.0)], history=history, tools=[LOOKUP]
    )
    assert [call.name for call in answers.actions[0].tool_calls] == ["lookup"]
    after = model.prompts[1].removeprefix(model.prompts[0])
    assert (
        after
        == f"\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\na plant\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert trajectory.tool_problems == 0
