"""Sampling through the engine: log-probabilities are those of its own score pass, tokens carry versions, no request gets lost."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from attrs import evolve

from skyrl_engine import ContractError, Engine, UnsupportedError
from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.errors import ConfigError, EngineError, ModelError, PluginBrokenError, WorkerError
from skyrl_engine.modeling.tiny import make_parts_differ, write_model, write_tokenizer

TEMPERATURES = (0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embedding and head are tied."""
    return write_words_of_family(tmp_path_factory.mktemp("model"))


def write_words_of_family(directory: Path, family: str = "qwen3", **settings: Any) -> Path:
    write_model(directory, family, **settings)
    make_parts_differ(directory)
    write_tokenizer(directory, ["some words to learn from"])
    return directory


@pytest.fixture
def open_engine(model: Path) -> Iterator[Any]:
    """`open_engine(**tables)`: an engine with the generator hf, closed with the test; `model` keys in addition to the tiny model's path."""
    engines = []

    def make(path: Path = model, **tables: Any) -> Engine:
        own = {"path": str(path), **tables.pop("model", {})}
        base = {"generator": {"use": "hf", "slots": 5}, "optimizer": {"learning_rate": 1e-2}, "training": {"micro_batch_rows": 4}}
        engine = Engine.open({**base, "model": own, **tables})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def make_requests(count: int = 12, *, first: int = 0, **settings: Any) -> list[GenerationRequest]:
    draw = np.random.default_rng(first)
    return [
        GenerationRequest(
            first + number,
            draw.integers(3, 128, draw.integers(1, 12)).astype(np.int32),
            Sampling(**{"max_tokens": int(draw.integers(1, 20)), "ignore_eos": True, **settings}),
            seed=number,
            session=number,
        )
        for number in range(count)
    ]


def as_columns(requests: Sequence[GenerationRequest], done: Sequence[Completion]) -> SampleColumns:
    return SampleColumns.from_rollouts(
        prompts=[request.prompt_ids.tolist() for request in requests],
        responses=[completion.token_ids.tolist() for completion in done],
        logprobs=[completion.logprobs.tolist() for completion in done],
        columns={"advantages": [[1.0 - (place % 2) * 2.0] * len(completion.token_ids) for place, completion in enumerate(done)]},
    )


def gap(engine: Engine, requests: Sequence[GenerationRequest], done: Sequence[Completion], temperature: float = 1.0) -> float:
    """The largest distance in nats between the sampler's log-probabilities and those of a score pass."""
    assert [completion.request_id for completion in done] == [request.request_id for request in requests]
    scored = engine.score(engine.plan(as_columns(requests, done)), temperature=temperature).result().fields["logprobs"].values
    return float(np.abs(scored - np.concatenate([completion.logprobs for completion in done])).max())


VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"family": "llama"},
    "value head": {"value_head": True},
    "lora": {"lora": {"rank": 2}},
    "lora with a value head": {"value_head": True, "lora": {"rank": 2}},
    "float64": {"dtype": "float64"},
    "bfloat16": {"dtype": "bfloat16"},
    "sliding windows": {"family": "mistral", "settings": {"sliding_window": 6}},
    "packed": {"tables": {"collator": {"use": "packed"}, "training": {"micro_batch_tokens": 64}}},
}
QUICK = {"tied", "lora"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in VARIANTS])
def test_what_is_sampled_has_the_log_probabilities_of_a_score_pass(name: str, open_engine: Any, tmp_path: Path) -> None:
    """Before any step and after each of two; in float32 within 1e-4 nats: sums over other shapes are rounded in another order."""
    variant = dict(VARIANTS[name])
    path = write_words_of_family(
        tmp_path, variant.pop("family", "qwen3"), **variant.pop("settings", {}), value_head=variant.get("value_head", False)
    )
    engine = open_engine(path, **{"loss": {"use": "reinforce"}, **variant.pop("tables", {})}, model=variant)
    bound = 0.5 if name == "bfloat16" else 1e-4
    for step in range(3):
        for place, temperature in enumerate(TEMPERATURES):
            requests = make_requests(first=100 * step + 20 * place, temperature=temperature)
            done = engine.generate(requests).result()
            assert gap(engine, requests, done, temperature) < bound
            assert all(completion.versions.versions.tolist() == [step] for completion in done)
            assert all(
                len(completion.token_ids) == request.sampling.max_tokens for completion, request in zip(done, requests, strict=True)
            )
        engine.train(engine.plan(as_columns(requests, done)))


def test_a_step_changes_what_is_sampled_and_loading_takes_it_back(open_engine: Any, tmp_path: Path) -> None:
    engine = open_engine(loss={"use": "reinforce"})
    requests = make_requests()
    before = engine.generate(requests).result()
    engine.save(tmp_path)
    engine.train(engine.plan(as_columns(requests, before)))
    after = engine.generate(requests).result()
    assert [completion.logprobs.tolist() for completion in after] != [completion.logprobs.tolist() for completion in before]
    engine.load(tmp_path)
    again = engine.generate(requests).result()
    assert [completion.token_ids.tolist() for completion in again] == [completion.token_ids.tolist() for completion in before]
    assert [completion.logprobs.tolist() for completion in again] == [completion.logprobs.tolist() for completion in before]


@pytest.mark.parametrize("adapters", [False, True], ids=["full weights", "adapters"])
def test_weights_in_files_are_sampled_from_beside_those_that_are_trained(
    open_engine: Any, model: Path, tmp_path: Path, adapters: bool
) -> None:
    """The model's own files give what it sampled before a step, an export what it sampled after it, whatever was trained since."""
    engine = open_engine(loss={"use": "reinforce"}, model={"lora": {"rank": 2}} if adapters else {})
    requests = make_requests(6)
    before = engine.generate(requests).result()
    engine.train(engine.plan(as_columns(requests, before)))
    engine.export(tmp_path / "export")
    after = engine.generate(requests).result()
    engine.train(engine.plan(as_columns(requests, after)))
    engine.add_weights("base", model)
    if adapters:
        engine.add_weights("exported", model, tmp_path / "export")
    else:
        engine.add_weights("exported", tmp_path / "export")
    for target, expected in (("base", before), ("exported", after)):
        completions = engine.generate([evolve(completion, target=target) for completion in requests]).result()
        assert [completion.token_ids.tolist() for completion in completions] == [
            completion.token_ids.tolist() for completion in expected
        ]
        # merged in another order of operations
        assert all(
            np.allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5) for one, other in zip(completions, expected, strict=True)
        )
    present = engine.generate(requests).result()
    assert [completion.logprobs.tolist() for completion in present] != [completion.logprobs.tolist() for completion in after]
    engine.sampler.release("base")


def test_weights_of_another_model_are_refused(open_engine: Any, tmp_path: Path) -> None:
    engine = open_engine()
    engine.generate(make_requests(1)).result()
    with pytest.raises(ModelError, match="no place, or one of another shape"):
        engine.add_weights("other", write_words_of_family(tmp_path, hidden_size=16))


def test_completions_stream_and_lists_are_waited_for(open_engine: Any) -> None:
    """Two users of one sampler: each gets its own requests."""
    engine = open_engine()
    listed = engine.generate(make_requests(6))
    sampler = engine.sampler
    sampler.submit(make_requests(6, first=50))
    assert [completion.request_id for completion in listed.result()] == list(range(6))
    streamed: list[int] = []
    while len(streamed) < 6:
        came = sampler.poll(5.0)
        assert came
        streamed += [completion.request_id for completion in came]
    assert sorted(streamed) == list(range(50, 56))
    assert sampler.poll(5.0) == []
    sampler.submit(make_requests(3, first=70, max_tokens=100))
    sampler.poll(0.0)
    sampler.abort([70, 72])
    rest = {completion.request_id: completion for _ in range(3) for completion in sampler.poll(5.0)}
    assert {number: completion.finish for number, completion in rest.items()} == {70: "abort", 71: "length", 72: "abort"}


def test_a_generator_by_hand_and_its_versions(open_engine: Any) -> None:
    engine = open_engine(generator={"use": "hf", "slots": 2})
    assert not engine.has_sampler
    sampler = engine.start_sampler(engine.assembly.plugins["generator"])
    assert engine.has_sampler
    assert sampler is engine.sampler
    assert sampler.description.concurrency == 2
    sampler.update(5)
    sampler.submit(make_requests(1))
    (done,) = sampler.poll(5.0)
    assert done.versions.versions.tolist() == [5]
    sampler.update(9, "frozen")
    assert sampler.version == 5
    (request,) = make_requests(1, first=1)
    sampler.submit([GenerationRequest(1, request.prompt_ids, request.sampling, 0, target="frozen")])
    assert sampler.poll(5.0)[0].versions.versions.tolist() == [9]
    sampler.release("frozen")
    sampler.close()


def test_an_engine_without_a_generator_says_so(open_engine: Any, model: Path) -> None:
    with Engine.open({"model": {"path": str(model)}}) as engine:
        assert "generator" not in engine.assembly.plugins
        with pytest.raises(UnsupportedError, match="was opened without a generator"):
            engine.generate(make_requests(1))
    with pytest.raises(ConfigError, match="slotz"):
        open_engine(generator={"use": "hf", "slotz": 2})


def test_requests_of_one_id_are_refused(open_engine: Any) -> None:
    engine = open_engine()
    engine.generate(make_requests(2))
    with pytest.raises(ContractError, match="the request_id 1 is given twice"):
        engine.generate(make_requests(1, first=1))
    with pytest.raises(ContractError, match="the request_id 7 is given twice"):
        engine.generate([*make_requests(1, first=7), *make_requests(1, first=7)])


OTHER = """
import os
import pathlib
import time

from skyrl_engine import hookimpl
from skyrl_engine.contracts import Completion, GeneratorDescription, VersionSpans
import numpy as np


class Other:
    def __init__(self, times, token=0):
        self.taken, self.times, self.token = [], times, token

    def start(self, start): ...
    def submit(self, requests): self.taken += requests
    def poll(self, timeout):
        requests, self.taken = self.taken, []
        return [
            Completion(each.request_id, np.full(1, self.token, np.int32), np.zeros(1, np.float32), VersionSpans.one(0, 1), "length")
            for each in requests * self.times
        ]
    def abort(self, request_ids=None): ...
    def update(self, weights, version, target="policy"): ...
    def release(self, target): ...
    def close(self): ...


class Plugin:
    def __init__(self, accepts=("tensors",), placement="rank", times=2, token=0):
        self.times, self.token = times, token
        self.described = GeneratorDescription(frozenset({"logprobs"}), accepts, placement, 1)

    @hookimpl
    def skyrl_engine_describe_generator(self, config):
        return self.described

    @hookimpl
    def skyrl_engine_make_generator(self, config):
        return Other(self.times, self.token)


twice = Plugin()
never = Plugin(times=0)
nothing = Plugin(accepts=())
far = Plugin(times=1, placement="remote")
folders = Plugin(accepts=("directory",))
larger = Plugin(times=1, token=128)


class Failing(Other):
    # of two ranks, the second refuses requests or dies, and none can abort any

    def __init__(self, dies):
        super().__init__(1)
        self.dies = dies

    def submit(self, requests):
        if any(each.session % 2 for each in requests):
            if self.dies:
                os._exit(9)
            raise ValueError("requests of rank 1 are nothing for me")
        super().submit(requests)

    def abort(self, request_ids=None):
        raise ValueError("nothing was ever aborted here")


class Waiting(Other):
    # the rank of session 1 says nothing, whatever it is asked, until a file is there, and then fails if the file says so

    def __init__(self, place):
        super().__init__(1)
        self.place = place

    def poll(self, timeout):
        if any(each.session == 1 for each in self.taken):
            until = time.monotonic() + 60
            while not self.place.exists() and time.monotonic() < until:
                time.sleep(0.01)
            if self.place.read_text() == "fail":
                raise ValueError("it came too late")
        return super().poll(timeout)


class WaitingPlugin(Plugin):
    @hookimpl
    def skyrl_engine_make_generator(self, config):
        return Waiting(pathlib.Path(__file__).with_name("go"))


waiting = WaitingPlugin()


class FailingPlugin(Plugin):
    def __init__(self, dies):
        super().__init__()
        self.dies = dies

    @hookimpl
    def skyrl_engine_make_generator(self, config):
        return Failing(self.dies)


dies, refuses = FailingPlugin(True), FailingPlugin(False)
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    file = tmp_path / "other.py"
    file.write_text(OTHER)
    return file


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "takes weights as nothing, and the backend gives module or tensors"),
        ("folders", "takes weights as directory"),
    ],
)
def test_generators_that_cannot_sample_here_are_refused(open_engine: Any, other: Path, name: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        open_engine(generator={"use": f"{other}:{name}"}).generate(make_requests(1))


def test_a_generator_that_drives_servers_lives_in_the_controllers_process(open_engine: Any, other: Path) -> None:
    engine = open_engine(generator={"use": f"{other}:far"})
    (completion,) = engine.generate(make_requests(1)).result()
    assert completion.request_id == 0
    assert engine.sampler.concurrent
    with pytest.raises(UnsupportedError, match=r"generator.replicas is set, and .* drives servers of its own"):
        open_engine(generator={"use": f"{other}:far", "replicas": 2}).generate(make_requests(1))


def test_an_answer_that_nobody_waits_for_names_the_generator(open_engine: Any, other: Path) -> None:
    engine = open_engine(generator={"use": f"{other}:twice"})
    with pytest.raises(ContractError, match=r"generator 'twice' of .* answered request 0, which is not under way"):
        engine.generate(make_requests(1)).result()


def test_a_token_that_the_model_does_not_have_names_the_generator(open_engine: Any, other: Path) -> None:
    with pytest.raises(ContractError, match=r"generator 'larger' of .* sampled the token 128 for request 0, .* vocabulary has 128"):
        open_engine(generator={"use": f"{other}:larger"}).generate(make_requests(1)).result()


def test_a_lost_request_is_not_waited_for(open_engine: Any, other: Path) -> None:
    engine = open_engine(generator={"use": f"{other}:never"})
    with pytest.raises(ContractError, match=r"generator 'never' of .* answers nothing, .* while 2 requests are under way"):
        engine.generate(make_requests(2)).result()


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"top_p": 0.5}, "'filters'"), ({"stop_strings": ("a",)}, "'stop_strings'")],
)
def test_what_a_generator_does_not_claim_is_refused_before_it_is_sent(
    open_engine: Any, other: Path, settings: dict[str, Any], words: str
) -> None:
    engine = open_engine(generator={"use": f"{other}:twice"})
    with pytest.raises(UnsupportedError, match=f"does not declare the capability {words}"):
        engine.generate(make_requests(1, **settings))


def test_two_ranks_sample_their_sessions(open_engine: Any, model: Path, without_ray: None) -> None:
    """Every rank fills a copy with the gathered weights and samples its sessions; tokens are those of one rank."""
    ranks = {"run": {"launch": "ray", "ranks": 2}}
    alone, together = open_engine(loss={"use": "reinforce"}), open_engine(loss={"use": "reinforce"}, **ranks)
    requests = make_requests(9)
    for step in range(2):
        here, there = (engine.generate(requests).result() for engine in (alone, together))
        assert gap(together, requests, there) < 1e-4
        if step == 0:
            assert [completion.token_ids.tolist() for completion in here] == [completion.token_ids.tolist() for completion in there]
        assert all(completion.versions.versions.tolist() == [step] for completion in there)
        for engine, done in ((alone, here), (together, there)):
            engine.train(engine.plan(as_columns(requests, done)))
    wrong = GenerationRequest(100, np.array([500], dtype=np.int32), Sampling(max_tokens=2), seed=0, session=1)
    with pytest.raises(ContractError, match="outside of the vocabulary"):
        together.sampler.submit([*make_requests(1, first=200), wrong])
    assert [completion.request_id for completion in together.generate(make_requests(3, first=200)).result()] == [200, 201, 202]
    together.sampler.submit(make_requests(4, first=300, max_tokens=120))
    together.sampler.abort()
    done = [completion for _ in range(4) for completion in together.sampler.poll(1.0)]
    assert {completion.request_id: completion.finish for completion in done} == dict.fromkeys(range(300, 304), "abort")


@pytest.mark.parametrize("transport", ["processes", pytest.param("ray", marks=pytest.mark.proof)])
def test_a_slow_rank_does_not_delay_the_tokens_of_another(
    open_engine: Any, other: Path, request: pytest.FixtureRequest, transport: str
) -> None:
    """The second rank samples until a file is there: what the first one finishes comes before that, turn after turn."""
    if transport == "processes":
        request.getfixturevalue("without_ray")
    engine = open_engine(generator={"use": f"{other}:waiting"}, run={"launch": "ray", "ranks": 2})
    sampler = engine.start_sampler(engine.assembly.plugins["generator"])
    first, slow, *later = make_requests(8)
    sampler.submit([first, slow])
    for turn in (first, *(attrs.evolve(each, session=first.session) for each in later)):
        if turn is not first:
            sampler.submit([turn])
        assert [completion.request_id for completion in sampler.poll(30.0)] == [turn.request_id]
    (other.parent / "go").write_text("on")
    assert [completion.request_id for completion in sampler.poll(30.0)] == [slow.request_id]
    assert sampler.poll(30.0) == []


def test_a_rank_that_fails_in_a_poll_is_told_of_by_the_next_call(open_engine: Any, other: Path, without_ray: None) -> None:
    """It failed while nobody waited for it."""
    engine = open_engine(generator={"use": f"{other}:waiting"}, run={"launch": "ray", "ranks": 2})
    sampler = engine.start_sampler(engine.assembly.plugins["generator"])
    first, slow = make_requests(2)
    sampler.submit([first, slow])
    assert [completion.request_id for completion in sampler.poll(30.0)] == [first.request_id]
    (other.parent / "go").write_text("fail")
    with pytest.raises(PluginBrokenError, match="it came too late"):
        sampler.end_sessions([first.session])


@pytest.mark.parametrize(
    ("name", "kind", "words", "ended"),
    [
        ("dies", WorkerError, "^rank 1 died", "all its ranks were ended after a failure .rank 1 died"),
        ("refuses", PluginBrokenError, "failed in submit: ValueError: requests of rank 1 are nothing for me", None),
    ],
)
def test_cleaning_up_after_a_failed_submit_does_not_hide_the_failure(
    open_engine: Any, other: Path, without_ray: None, caplog: Any, name: str, kind: type[EngineError], words: str, ended: str | None
) -> None:
    """Requests that other ranks took are aborted, which fails here, and is not even tried where the ranks ended."""
    engine = open_engine(generator={"use": f"{other}:{name}"}, run={"launch": "ray", "ranks": 2})
    with pytest.raises(kind) as caught:
        engine.generate(make_requests(2))
    assert re.search(words, caught.value.cause)
    assert (engine.ended is None) if ended is None else re.search(ended, engine.ended)
    assert ("nothing was ever aborted here" in caplog.text) == (ended is None)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_tensor_parallel_ranks_sample_together_what_one_rank_samples(
    open_engine: Any, model: Path, without_ray: None, backend: str
) -> None:
    engine = open_engine(
        run={"launch": "ray", "ranks": 2}, backend={"use": backend, "tensor_parallel": 2}, loss={"use": "reinforce"}
    )
    due = open_engine().generate(make_requests(6)).result()
    for first in (0, 20):
        requests = make_requests(6, first=first)
        done = engine.generate(requests).result()
        assert gap(engine, requests, done) < 1e-4
        if not first:
            assert [each.token_ids.tolist() for each in done] == [each.token_ids.tolist() for each in due]
        engine.train(engine.plan(as_columns(requests, done)))
