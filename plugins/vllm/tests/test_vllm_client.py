"""The client against a small server of ours with vLLM's routes, behind which `hf` samples: delivery, stops, faults and recoveries."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import evolve
from vllm_clients import COMMAND, FLAGS, ROUTES, Opens, collect, post, sample, serve, start_of

from skyrl_engine import ModelError, RolloutError
from skyrl_engine.contracts import Completion, GenerationRequest, ModelConfig, Sampling
from skyrl_engine.testing import GeneratorConformance
from skyrl_engine.testing.generators.bench import TinyWeights, due_logprobs, model_folder, requests_of
from skyrl_engine_vllm.generator import VllmGenerator
from skyrl_engine_vllm.options import VllmOptions
from skyrl_engine_vllm.transfer import free_port

pytestmark = pytest.mark.usefixtures("routes_forked")

TOLERANCE = 1e-4


def poll_on(generator: VllmGenerator) -> None:
    for _ in range(40):
        generator.poll(0.5)


def gap(weights: TinyWeights, request: GenerationRequest, done: Completion) -> float:
    due = due_logprobs(weights, request, done)
    return float(np.abs(due[np.arange(len(done.token_ids)), done.token_ids] - done.logprobs).max())


def test_samples_from_each_of_its_versions(opens: Opens) -> None:
    generator, weights = opens(start={"version": 4})
    for version in (4, 5, 9):
        if version > 4:
            weights.change(version)
            generator.update(weights, version)
        requests = requests_of(6, first=10 * version, temperature=0.7)
        for request, done in zip(requests, sample(generator, requests), strict=True):
            assert gap(weights, request, done) < TOLERANCE
            assert done.versions.versions.tolist() == [version]


def test_weights_come_as_a_folder(opens: Opens) -> None:
    generator, weights = opens(form="directory")
    weights.change(3)
    generator.update(weights, 1)
    (request,) = requests_of(1)
    (done,) = sample(generator, [request])
    assert gap(weights, request, done) < TOLERANCE
    assert done.versions.versions.tolist() == [1]


def test_ends_at_the_first_stop_from_min_tokens_on(opens: Opens) -> None:
    """Log-probabilities are of the whole distribution before, too: vLLM would have forbidden the stops."""
    generator, weights = opens()
    (free,) = requests_of(1, max_tokens=40)
    (whole,) = sample(generator, [free])
    tokens = whole.token_ids.tolist()
    stop = tokens[5]
    first, later = tokens.index(stop), next((n for n, token in enumerate(tokens) if token == stop and n >= 8), None)
    short = evolve(free, request_id=1, sampling=evolve(free.sampling, stop_token_ids=(stop,)))
    least = evolve(free, request_id=2, sampling=evolve(free.sampling, stop_token_ids=(stop,), min_tokens=9))
    one, two = sample(generator, [short, least])
    assert one.token_ids.tolist() == tokens[: first + 1]
    assert (one.finish, one.stop) == ("stop", stop)
    assert two.token_ids.tolist() == (tokens if later is None else tokens[: later + 1])
    assert gap(weights, least, two) < TOLERANCE


def test_a_stop_string_from_min_tokens_on_may_have_to_come_again(opens: Opens) -> None:
    from skyrl_engine.model_facts.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(str(model_folder())))
    generator, _ = opens()
    (free,) = requests_of(1, max_tokens=24)
    (whole,) = sample(generator, [free])
    tokens = whole.token_ids.tolist()
    letter = next(char for char in tokenizer.decode(tokens) if char.isalpha())
    count = next(n for n in range(1, 25) if letter in tokenizer.decode(tokens[:n]))
    plain = evolve(free, request_id=1, sampling=evolve(free.sampling, stop_strings=(letter,)))
    later = evolve(free, request_id=2, sampling=evolve(free.sampling, stop_strings=(letter,), min_tokens=count + 1))
    one, two = sample(generator, [plain, later])
    assert (one.token_ids.tolist(), one.finish, one.stop) == (tokens[:count], "stop", letter)
    assert len(two.token_ids) > count
    assert two.token_ids.tolist() == tokens[: len(two.token_ids)]


def test_the_end_tokens_of_the_run_count(url: str) -> None:
    generator = VllmGenerator(VllmOptions(urls=(url,)))
    weights = TinyWeights("tensors")
    generator.start(evolve(start_of(weights), eos_token_ids=tuple(range(40, 128))))
    try:
        requests = [evolve(each, sampling=Sampling(max_tokens=30)) for each in requests_of(8)]
        for done in sample(generator, requests):
            assert done.finish == "stop"
            assert done.stop == done.token_ids[-1] >= 40
            assert (done.token_ids[:-1] < 40).all()
    finally:
        generator.close()


def test_all_bits_of_a_seed_count_for_a_generator_of_32_bits() -> None:
    from skyrl_engine_vllm.wire import seed_on_server

    seeds = [base ^ changed for base in (5, 2**64 - 6, 0) for changed in (0, *(2**bit for bit in range(64)))]
    sent = [seed_on_server(seed) for seed in seeds]
    assert len(set(sent)) == len(set(seeds))
    assert len({each % (1 << 32) for each in sent}) == len(set(seeds))
    assert all(-(1 << 63) <= each < 1 << 63 and each != -1 for each in sent)


def test_checksums_are_those_of_the_other_side() -> None:
    import torch

    from skyrl_engine_vllm import checksums as ours
    from skyrl_engine_vllm_server import checksums as theirs

    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        tensor = torch.randn(37, 21, generator=draw).to(dtype)
        assert ours.checksum_of(tensor) == theirs.checksum_of(tensor.clone())
        exchanged = tensor.flip(0)
        changed = tensor.clone()
        changed[3, 4] += 1
        assert len({ours.checksum_of(each) for each in (tensor, exchanged, changed, tensor.T)}) == 4


# --- servers of its own ------------------------------------------------------------------------------------------------------------


def test_it_starts_servers_and_ends_them(opens: Opens, tmp_path: Path) -> None:
    generator, _ = opens(command=COMMAND, servers=2, start={"folder": tmp_path})
    servers = generator._servers.all  # type: ignore[union-attr]
    processes = [server.process._process for server in servers if server.process is not None]
    sample(generator, requests_of(8))
    generator.close()
    assert all(process is not None and process.poll() is not None for process in processes)
    assert sorted(log.name for log in tmp_path.iterdir()) == ["vllm-0.log", "vllm-1.log"]


def test_a_server_that_dies_at_start_is_told_with_its_last_lines(opens: Opens) -> None:
    with pytest.raises(ModelError, match="no kernel image is available"):
        opens(command=COMMAND, environment={"VLLM_ROUTES_DIES": "1"})


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from skyrl_engine.contracts import GeneratorStart, ModelConfig
from skyrl_engine.testing.generators.bench import TinyWeights, model_folder
from skyrl_engine_vllm.generator import VllmGenerator
from skyrl_engine_vllm.options import VllmOptions
generator = VllmGenerator(VllmOptions(command=(sys.executable, sys.argv[2])))
generator.start(GeneratorStart(ModelConfig(str(model_folder())), "cpu", (), TinyWeights("tensors")))
print(generator._servers.all[0].process._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_servers_end_with_a_run_that_is_killed() -> None:
    words = [sys.executable, "-c", KILLED, str(ROUTES.parent), str(ROUTES)]
    pid = int(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the server outlived the run that started it")


def test_a_port_in_use_and_a_command_that_is_not_there_are_named(opens: Opens, url: str) -> None:
    with pytest.raises(ModelError, match="is in use"):
        opens(command=COMMAND, port=int(url.rpartition(":")[2]))
    with pytest.raises(ModelError, match="cannot be started"):
        opens(command=("no-such-program",))
    with pytest.raises(ModelError, match="there is no Python at"):
        VllmGenerator(VllmOptions(venv="no-such-folder")).start(start_of(TinyWeights("tensors")))
    with pytest.raises(ModelError, match=r"generator\.urls"):
        VllmGenerator(VllmOptions()).start(start_of(TinyWeights("tensors")))


def test_a_server_that_never_answers_is_given_up(opens: Opens) -> None:
    with pytest.raises(ModelError, match="start_seconds"):
        opens(command=(sys.executable, "-c", "import time; time.sleep(60)"), start_seconds=1.0)


# --- faults ------------------------------------------------------------------------------------------------------------------------


def test_a_server_that_dies_is_started_again_with_the_present_weights(opens: Opens, tmp_path: Path) -> None:
    generator, weights = opens(command=COMMAND, start={"folder": tmp_path})
    weights.change(1)
    generator.update(weights, 1)
    requests = requests_of(6, max_tokens=60)
    due = sample(generator, [evolve(each, request_id=100 + each.request_id) for each in requests])
    generator.submit(requests)
    (server,) = generator._servers.all  # type: ignore[union-attr]
    assert server.process is not None
    assert server.process._process is not None
    os.kill(server.process._process.pid, signal.SIGKILL)
    for request, one, other in zip(requests, due, collect(generator, requests, 120), strict=True):
        assert other.token_ids.tolist() == one.token_ids.tolist()
        assert gap(weights, request, other) < TOLERANCE
        assert other.versions.versions.tolist() == [1]
    assert server.restarts == 1
    assert (tmp_path / "vllm-0-start-2.log").exists()


@pytest.mark.parametrize("wrong", ["500", "garbage", "html", "cut", "twice", "the last one's"])
def test_a_request_is_sent_again_where_an_answer_is_none(opens: Opens, url: str, wrong: str) -> None:
    generator, weights = opens()
    post(url, "/misbehave", {"/inference/v1/generate": f"once {wrong}"})
    requests = requests_of(4)
    for request, done in zip(requests, sample(generator, requests), strict=True):
        assert gap(weights, request, done) < TOLERANCE


def test_one_dead_server_of_three_does_not_end_the_run(opens: Opens, url: str) -> None:
    (second, first_process), (third, second_process) = serve(), serve()
    try:
        generator, weights = opens(urls=(url, second, third), restarts=0)
        generator.submit(requests := requests_of(9, max_tokens=60))
        first_process.kill()
        collect(generator, requests)
        weights.change(1)
        generator.update(weights, 1)
        again = requests_of(6, first=50)
        for request, done in zip(again, sample(generator, again), strict=True):
            assert gap(weights, request, done) < TOLERANCE
        servers = generator._servers.all  # type: ignore[union-attr]
        assert [server.is_up for server in servers] == [True, False, True]
    finally:
        for process in (first_process, second_process):
            process.kill()
            process.wait()


def test_no_server_left_ends_the_run(opens: Opens) -> None:
    address, process = serve()
    generator, weights = opens(urls=(address,), restarts=0)
    process.kill()
    process.wait()
    generator.submit(requests_of(2))
    with pytest.raises(RolloutError, match="no vLLM server is left"):
        poll_on(generator)
    with pytest.raises(RolloutError, match="no vLLM server is left"):
        generator.update(weights, 1)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"load": "skip"}, "has loaded another"),
        ({"update": "ignore"}, "differ from those of the weights"),
        ({"/update_weights": "500"}, "EngineCore"),
    ],
)
def test_an_update_that_did_not_arrive_does_not_count(opens: Opens, caplog: Any, what: dict[str, str], words: str) -> None:
    """A server that leaves out a tensor, keeps its old weights under the new version, or fails in the midst."""
    address, process = serve()
    try:
        generator, weights = opens(urls=(address,), restarts=0, update_seconds=10.0)
        post(address, "/misbehave", what)
        weights.change(1)
        with pytest.raises(RolloutError, match=words):
            generator.update(weights, 1)
    finally:
        process.kill()
        process.wait()


def test_tokens_of_another_runs_weights_are_refused(opens: Opens, url: str) -> None:
    generator, _ = opens()
    post(url, "/misbehave", {"/inference/v1/generate": "once foreign"})
    generator.submit([evolve(requests_of(1)[0], sampling=Sampling(max_tokens=1))])
    with pytest.raises(RolloutError, match="another run uses it too"):
        poll_on(generator)


def test_two_runs_on_one_server_are_told(opens: Opens) -> None:
    first, _ = opens()
    opens()
    first.submit(requests_of(1))
    with pytest.raises(RolloutError, match="another run uses it too"):
        poll_on(first)


def test_an_update_amid_requests_goes_on_with_the_new_weights(opens: Opens) -> None:
    generator, weights = opens()
    requests = requests_of(4, max_tokens=400)
    old = TinyWeights("tensors")
    generator.submit(requests)
    time.sleep(0.3)
    weights.change(1)
    generator.update(weights, 1)
    for request, done in zip(requests, collect(generator, requests), strict=True):
        versions = done.versions.per_token(len(done.token_ids))
        for version, held in ((0, old), (1, weights)):
            due = due_logprobs(held, request, done)[np.arange(len(versions)), done.token_ids]
            own = versions == version
            assert own.any()
            assert np.abs(due - done.logprobs)[own].max() < TOLERANCE


def test_aborted_requests_come_back_once_with_what_was_sampled(opens: Opens) -> None:
    generator, _ = opens(concurrency=3)
    requests = requests_of(6, max_tokens=500)
    generator.submit(requests)
    time.sleep(0.3)
    generator.abort()
    done = collect(generator, requests, 20)
    assert {each.finish for each in done} == {"abort"}
    assert sum(len(each.token_ids) > 0 for each in done) == 3


def test_turns_of_a_session_go_to_one_server(opens: Opens, url: str) -> None:
    other, process = serve()
    try:
        generator, _ = opens(urls=(url, other))
        for turn in range(4):
            sample(generator, [evolve(each, request_id=100 * turn + each.request_id) for each in requests_of(5)])
        homes = {session: server.url for session, server in generator._homes.items()}
        assert set(homes.values()) == {url, other}
        sample(generator, [evolve(each, request_id=1000 + each.request_id) for each in requests_of(5)])
        assert homes == {session: server.url for session, server in generator._homes.items()}
        generator.end_sessions(list(range(5)))
        time.sleep(0.1)
        assert not generator._homes
    finally:
        process.kill()
        process.wait()


def test_closing_ends_what_is_under_way(opens: Opens) -> None:
    generator, _ = opens()
    generator.submit(requests_of(20, max_tokens=500))
    since = time.monotonic()
    generator.close()
    assert time.monotonic() - since < 5
    assert not [thread for thread in threading.enumerate() if thread.name == "vllm-requests"]


PORT = free_port()
"""The port of the server of `TestVllmOverOurServer`, whose options name it before it is started."""


@pytest.fixture(scope="class")
def server_of_the_kit() -> Iterator[None]:
    """A server for a suite, which sleeps when it is asked to."""
    _, process = serve(*FLAGS, "--enable-sleep-mode", port=PORT)
    yield
    process.kill()
    process.wait()


@pytest.mark.nightly
@pytest.mark.usefixtures("server_of_the_kit")
class TestVllmOverOurServer(GeneratorConformance):
    """All promises that the client claims; `test_real_conformance.py` holds it to them over vLLM."""

    plugin = "vllm"
    options: ClassVar = {"urls": [f"http://127.0.0.1:{PORT}"], "enable_sleep_mode": True}
