"""replay gives what was sampled: a whole run again, any request in any order, and nothing that was not recorded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acme_replay_generator.generator import ReplayGenerator
from acme_replay_generator.recording import number_of, turns_of
from skyrl_engine import ContractError, DataError, RolloutError, UnsupportedError, read_rollouts
from skyrl_engine.config import load, resolve
from skyrl_engine.contracts import Completion, GenerationRequest, GeneratorStart, Group, ModelConfig, Sampling, Trajectory
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing import GeneratorConformance
from skyrl_engine.testing.templates import TEMPLATES
from skyrl_engine.training.rl.run import run_rl

ENVIRONMENT = '''
"""Two turns, of which the answer to the first depends on the attempt's seed. Rewards count tokens."""
from attrs import define, frozen

from skyrl_engine import hookimpl
from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task


@frozen
class Options:
    paid: int = 7
    word: str = "more"


@define
class Episode:
    options: Options
    seed: int

    def begin(self):
        return ()

    def step(self, action):
        worth = sum(token % self.options.paid == 0 for token in action.token_ids) / len(action.token_ids)
        if action.turn:
            return StepResult(worth)
        return StepResult(worth, done=False, messages=({"role": "user", "content": self.options.word * (1 + self.seed % 3)},))

    def close(self):
        pass


@frozen
class Counts:
    options: Options
    claims = EnvironmentClaims(max_turns=2)

    def tasks(self, split):
        return [Task(str(number), ({"role": "user", "content": "go " * number},)) for number in range(1, 4)]

    def open(self, task, seed):
        return Episode(self.options, seed)


class Plugin:
    @hookimpl
    def skyrl_engine_config_schema(self):
        return Options

    @hookimpl
    def skyrl_engine_make_environment(self, config):
        return Counts(config)


counts = Plugin()
'''

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, for which many tokens end a turn, and an environment."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = TEMPLATES["chatml"].tokenizer()
    write_model(folder / "model", tokenizer=tokenizer)
    tokenizer.save_pretrained(folder / "model")
    ends = [tokenizer.eos_token_id, *range(60)]
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "counts.py").write_text(ENVIRONMENT)
    return folder


@pytest.fixture(scope="module")
def run(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run("key=value", ...)`: the directory of a run of three steps, which goes through three tasks twice."""

    def started(*overrides: str, **environment: Any) -> Path:
        tables: dict[str, Any] = {
            "trainer": "rl",
            "model": {"path": str(world / "model")},
            "rl": {"steps": 3, "groups": 2, "group_size": 3, "max_tokens": 28, "max_prompt_tokens": 64},
            "environments": [{"use": f"{world / 'counts.py'}:counts", **environment}],
            "rollouts": {"workers": 1},
            "evaluation": {"at_end": False},
            "optimizer": {"learning_rate": 1e-2},
            "run": {"directory": str(tmp_path_factory.mktemp("runs") / "run"), "device": "cpu"},
        }
        return run_rl(resolve(load(tables, overrides))).directory

    return started


@pytest.fixture(scope="module")
def recorded(run: Run) -> Path:
    """The directory of the run that is replayed."""
    return run()


def of(recorded: Path) -> tuple[str, str]:
    return "generator.use=acme-replay-generator:replay", f"generator.rollouts={recorded}"


def weights_of(directory: Path) -> bytes:
    return (directory / "model" / "model.safetensors").read_bytes()


def tokens_of(directory: Path) -> list[list[int]]:
    return [attempt.token_ids.tolist() for group in read_rollouts(directory) for attempt in group.trajectories]


def test_a_run_again_is_the_same_run(run: Run, recorded: Path) -> None:
    """Tasks come twice, so that requests of several groups have one prompt: each gets what its own attempt sampled."""
    again = run(*of(recorded))
    assert tokens_of(again) == tokens_of(recorded)
    assert weights_of(again) == weights_of(recorded)
    for one, other in zip(read_rollouts(again), read_rollouts(recorded), strict=True):
        for left, right in zip(one.trajectories, other.trajectories, strict=True):
            assert left.logprobs.tobytes() == right.logprobs.tobytes()
            assert left.versions.per_token(len(left.logprobs)).tolist() == right.versions.per_token(len(left.logprobs)).tolist()
            assert left.stops == right.stops


def test_another_reward_pays_for_the_same_tokens(run: Run, recorded: Path) -> None:
    again = run(*of(recorded), "rl.on_gap=warn", paid=3)
    assert tokens_of(again) == tokens_of(recorded)
    assert weights_of(again) != weights_of(recorded)
    with pytest.raises(RolloutError, match="the sampler does not hold the weights it was given"):
        run(*of(recorded), "rl.max_gap=1e-6", "rl.steps=3", paid=3)


def test_an_environment_that_answers_otherwise_is_found_out(run: Run, recorded: Path) -> None:
    with pytest.raises(RolloutError, match=r"of the last .* attempts failed") as caught:
        run(*of(recorded), "rollouts.max_failure_share=0.01", word="less")
    assert "what the environment answers are others than when it was recorded" in "\n".join(caught.value.details)


def test_another_number_of_attempts_takes_what_is_there(run: Run, recorded: Path) -> None:
    """Environments draw from the seeds of their attempts, so a second turn may have a prompt that was not recorded; a first one has not."""
    again = run(*of(recorded), "rl.group_size=4", "rl.steps=1", "rollouts.max_failure_share=1.0", "rollouts.min_group_size=1")
    due = {first_turn(attempt) for group in groups_of(recorded) for attempt in group.trajectories}
    for group in groups_of(again):
        assert len(group.trajectories) == 4
        assert {first_turn(attempt) for attempt in group.trajectories} <= due


def first_turn(attempt: Trajectory) -> tuple[int, ...]:
    return tuple(attempt.token_ids[: attempt.segment_offsets[2]].tolist())


# --- one request at a time -----------------------------------------------------------------------------------------------------------


def groups_of(directory: Path) -> list[Group]:
    return list(read_rollouts(directory))


class NoWeights:
    """The `WeightSource` that a recorded generator is given."""

    forms: frozenset[Any] = frozenset()

    def storage(self) -> Any:
        raise AssertionError("nobody asks")

    tensors = storage


def started(place: Path, version: int = 10) -> ReplayGenerator:
    generator = ReplayGenerator(str(place))
    generator.start(GeneratorStart(ModelConfig("unread"), "cpu", (), NoWeights(), version))
    return generator


def requests_of(groups: list[Group], **sampling: Any) -> list[tuple[GenerationRequest, list[int]]]:
    """Every turn of a recording as the request that it answered, and its tokens."""
    asked = Sampling(**{"max_tokens": 64, **sampling})
    made = []
    for group in groups:
        for attempt in group.trajectories:
            for prompt, turn in turns_of(attempt):
                request = GenerationRequest(len(made), prompt, asked, seed=0, session=number_of(group, attempt))
                made.append((request, turn.token_ids.tolist()))
    return made


def test_every_request_gets_its_own_turn_in_any_order(recorded: Path) -> None:
    """A prompt's continuation depends on the prompt and the session, so a run that went on gets what it would have got."""
    due = requests_of(groups_of(recorded))
    assert len(due) > len(groups_of(recorded)) * 3, "some attempts have two turns"
    assert len({request.prompt_ids.tobytes() for request, _ in due}) < len(due), "prompts are shared"
    generator = started(recorded)
    for part in (due[::-1], due[1::2]):
        generator.submit([request for request, _ in part])
        answers = generator.poll(0.0)
        assert [each.token_ids.tolist() for each in answers] == [tokens for _, tokens in part]
    assert generator.poll(0.0) == []


def answer(generator: ReplayGenerator, request: GenerationRequest) -> Completion:
    generator.submit([request])
    (done,) = generator.poll(0.0)
    return done


def test_a_turn_is_cut_where_fewer_tokens_are_wanted(recorded: Path) -> None:
    generator = started(recorded)
    for request, tokens in requests_of(groups_of(recorded), max_tokens=3):
        done = answer(generator, request)
        assert done.token_ids.tolist() == tokens[:3]
        assert len(done.logprobs) == min(3, len(tokens))
        assert (done.finish == "length") == (len(tokens) > 3 or done.stop is None)


def test_no_token_is_of_weights_to_come(recorded: Path) -> None:
    late = requests_of(groups_of(recorded)[-1:])[0][0]
    generator = started(recorded, version=0)
    assert answer(generator, late).versions.versions.tolist() == [0]
    generator.update(NoWeights(), 1)
    assert answer(generator, late).versions.versions.tolist() == [1]
    generator.update(NoWeights(), 9)
    assert answer(generator, late).versions.versions.tolist() == [2]


def test_an_aborted_answer_comes_back_once(recorded: Path) -> None:
    generator = started(recorded)
    (one, tokens), (two, _) = requests_of(groups_of(recorded))[:2]
    generator.submit([one, two])
    generator.abort([one.request_id, 999])
    first, second = generator.poll(0.0)
    assert (first.finish, first.token_ids.tolist(), second.finish != "abort") == ("abort", tokens, True)
    generator.submit([one])
    generator.close()
    assert generator.poll(0.0) == []


def test_what_it_cannot_answer(recorded: Path, tmp_path: Path) -> None:
    generator = started(recorded)
    strange = GenerationRequest(0, np.array([1, 1, 1], dtype=np.int32), Sampling(max_tokens=4), 0)
    done = answer(generator, strange)
    assert (done.finish, len(done.token_ids)) == ("error", 0)
    assert done.error is not None
    assert "holds nothing that was sampled after this prompt" in done.error
    with pytest.raises(ContractError, match="has no prompt"):
        generator.submit([strange, GenerationRequest(1, np.zeros(0, dtype=np.int32), Sampling(max_tokens=4), 0)])
    with pytest.raises(UnsupportedError, match="asks for the weights 'reference'"):
        generator.submit([GenerationRequest(1, strange.prompt_ids, Sampling(max_tokens=4), 0, target="reference")])
    assert generator.poll(0.0) == []
    with pytest.raises(RolloutError, match="there is no file or run directory"):
        started(tmp_path / "nowhere")


def test_a_file_of_another_program(tmp_path: Path) -> None:
    row = '{"task_key": "a", "prompt_ids": [5, 6], "response_ids": [7, 8], "reward": 1.0%s}\n'
    (tmp_path / "a.jsonl").write_text(row % ', "logprobs": [-0.1, -0.2]' + row % ', "logprobs": [-0.3, -0.4], "truncated": true')
    generator = started(tmp_path / "a.jsonl")
    asked = [GenerationRequest(n, np.array([5, 6], dtype=np.int32), Sampling(max_tokens=4), 0, session=n) for n in range(4)]
    generator.submit(asked)
    assert [(each.finish, each.stop) for each in generator.poll(0.0)] == [("stop", 8), ("length", None)] * 2
    (tmp_path / "b.jsonl").write_text(row % "")
    with pytest.raises(DataError, match="has no log-probabilities of attempt 0 at task 'a'"):
        started(tmp_path / "b.jsonl")


class TestReplay(GeneratorConformance):
    plugin = "acme-replay-generator:replay"
    options = {"rollouts": "recorded"}  # noqa: RUF012 the suite reads it, nothing changes it
