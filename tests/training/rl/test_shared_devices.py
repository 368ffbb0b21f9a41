"""Ranks and generators that take turns on the same devices: the bits of a run in which each has its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_day import rarely
from rl_runs import Rl, kill_run, numbers_of, weights_of

from skyrl_engine.contracts.kinds.generator import GenerationRequest, Sampling
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.engine.engine import Engine
from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.model_facts.memory import find_reason_against_turns
from skyrl_engine.training.rl.dry_run import facts, plan_rl
from skyrl_engine.training.rl.prepare import prepare
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.workers.launch import InlineTransport
from skyrl_engine.workers.messages import LeaveDevice, ReturnToDevice
from skyrl_engine.workers.replicas import ReplicaHost

SHARED = ("generator.placement=process", "generator.share_devices=true")
WITH_ALL = ("rl.kl={coef=0.1}", "evaluation.every=1", "evaluation.tasks=2", "evaluation.samples=1")
"""A frozen model beside the trained one, and evaluations between steps."""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Verbs of the messages that the ranks got, and calls of the generators, in their order."""
    verbs: list[str] = []
    send = InlineTransport.send

    def note(self: InlineTransport, messages: Any) -> Any:
        verbs.append(messages[0].verb)
        return send(self, messages)

    call = ReplicaHost._call

    def note_call(self: ReplicaHost, method: str, *arguments: Any) -> None:
        verbs.append(f"generators {method}")
        call(self, method, *arguments)

    monkeypatch.setattr(InlineTransport, "send", note)
    monkeypatch.setattr(ReplicaHost, "_call", note_call)
    return verbs


@pytest.mark.parametrize("more", [(), rarely(WITH_ALL)], ids=["plain", "with all"])
def test_a_run_in_turns_has_the_bits_of_one_whose_generator_has_a_place_of_its_own(
    rl: Rl, turns: list[str], more: tuple[str, ...]
) -> None:
    apart = run_rl(rl("apart", *more)).directory
    assert not {LeaveDevice.verb, ReturnToDevice.verb} & {*turns}
    turns.clear()
    shared = run_rl(rl("shared", *SHARED, *more)).directory
    assert weights_of(shared) == weights_of(apart)
    assert numbers_of(shared) == numbers_of(apart)
    moves = [verb for verb in turns if verb in (LeaveDevice.verb, ReturnToDevice.verb)]
    assert moves == [LeaveDevice.verb, ReturnToDevice.verb] * (len(moves) // 2)
    assert len(moves) >= 4, "every step has a turn of each"
    if not more:
        steps = len(numbers_of(shared))
        assert turns.count("generators update") == steps, "whoever wakes for new weights is not given the old ones before"
    is_away = False
    for verb in turns:
        if verb.startswith("generators"):
            continue
        if verb in (LeaveDevice.verb, ReturnToDevice.verb):
            is_away = verb == LeaveDevice.verb
        else:
            assert not is_away, f"{verb} reached ranks that had left their devices"


@pytest.mark.nightly
def test_a_run_in_turns_that_is_killed_has_the_same_bits(rl: Rl, tables_of: Callable[..., dict[str, Any]]) -> None:
    keys = (*SHARED, "rl.steps=3", "checkpoint.every=1")
    whole = run_rl(rl("whole", *keys)).directory
    for moment, count in (("a group recorded", 3), ("learned", 2)):
        kill_run(tables_of("parts"), keys, moment, count)
    parts = run_rl(rl("parts", *keys), resume=True).directory
    assert weights_of(parts) == weights_of(whole)


def test_a_pass_amid_requests_is_refused(rl: Rl) -> None:
    resolved = rl("run", *SHARED)
    prepared = prepare(resolved)
    with Engine.launch(prepared.resolved, prepared.assembly, prepared.files, None, prepared.layout) as engine:
        sampler = engine.start_sampler(resolved.plugins["generator"], longest=prepared.longest)
        request = GenerationRequest(1, np.arange(3, 9, dtype=np.int32), Sampling(max_tokens=8, ignore_eos=True), seed=0)
        sampler.submit([request])
        with pytest.raises(UnsupportedError, match="the ranks were asked for weights while 1 requests are under way"):
            engine.weights()
        while not (done := sampler.poll(1.0)):
            pass
        assert engine.weights()
        # awake again, with the weights that it had
        again = GenerationRequest(2, request.prompt_ids, request.sampling, seed=0)
        (first,), (second,) = done, sampler.generate([again]).result()
        assert first.token_ids.tobytes() == second.token_ids.tobytes()
        assert first.logprobs.tobytes() == second.logprobs.tobytes()


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["generator.share_devices=true"], "samples on the ranks"),
        ([*SHARED, "rl.staleness=1"], "work at once"),
        ([*SHARED, "backend.use=deepspeed"], "the backend deepspeed does not declare the capability 'offload'"),
        ([*SHARED, 'rl.reward_models=[{{path="{model}"}}]'], "a reward model on the ranks values each group"),
    ],
)
def test_those_that_cannot_take_turns_are_refused_by_name(rl: Rl, world: Path, keys: list[str], names: str) -> None:
    with pytest.raises(EngineError, match=names):
        plan_rl(rl("run", *(key.format(model=world / "model") for key in keys)))


def test_a_dry_run_names_the_turns(rl: Rl) -> None:
    said = facts(plan_rl(rl("run", *SHARED)))["sampling"]
    assert said == "in a process of its own, in turns with training, on the same devices"


@pytest.mark.parametrize(
    ("host", "device", "names"),
    [
        (11 << 30, 80 << 30, "take 12.0 GiB of host memory while generators work, and 11.0 GiB are free"),
        (64 << 30, 1 << 30, "sampled from take 2.0 GiB, and 1 devices have 1.0 GiB each"),
        (64 << 30, 80 << 30, None),
        (None, None, None),
    ],
)
def test_turns_are_refused_by_arithmetic_of_memory(host: int | None, device: int | None, names: str | None) -> None:
    reason = find_reason_against_turns(ModelConfig("m", dtype="bfloat16"), 1 << 30, host_bytes=host, device_bytes=device, devices=1)
    assert (reason is None) == (names is None)
    assert names is None or names in str(reason)
