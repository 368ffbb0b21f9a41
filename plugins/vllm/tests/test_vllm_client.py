"""The client against a small server of ours with vLLM's routes, behind which `hf` samples: delivery, stops, faults and recoveries."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import evolve

from skyrl_engine import ContractError, EngineError, ModelError, RolloutError, UnsupportedError
from skyrl_engine.contracts import Completion, GenerationRequest, GeneratorStart, ModelConfig, Sampling
from skyrl_engine.testing import GeneratorConformance
from skyrl_engine.testing.generators.bench import POSITIONS, TinyWeights, due_logprobs, model_folder, requests_of
from skyrl_engine_vllm.generator import VllmGenerator
from skyrl_engine_vllm.options import VllmOptions
from skyrl_engine_vllm.transfer import free_port

pytestmark = pytest.mark.usefixtures("routes_forked")

ROUTES = Path(__file__).parents[3] / "tests" / "running" / "forked_servers.py"
"""It stands for a server of vllm_routes.py."""
COMMAND = (sys.executable, str(ROUTES))
FLAGS = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--weight-transfer-config", '{"backend": "gloo"}')
TOLERANCE = 1e-4


def post(url: str, path: str, body: object) -> None:
    data = json.dumps(body).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"}), timeout=10).close()


def serve(*flags: str, port: int | None = None, **environment: str) -> tuple[str, "subprocess.Popen[bytes]"]:
    """Start a server, and return its address when it answers."""
    url = f"http://127.0.0.1:{(port := port or free_port())}"
    words = [*COMMAND, "--model", str(model_folder()), "--port", str(port), *(flags or FLAGS)]
    process = subprocess.Popen(words, env={**os.environ, **environment})
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            assert process.poll() is None, "it ended"
            time.sleep(0.02)
        else:
            return url, process


@pytest.fixture(scope="module")
def url(routes_forked: None) -> Iterator[str]:
    """A server for all tests that leave it well."""
    address, process = serve()
    yield address
    process.kill()
    process.wait()


def start_of(weights: TinyWeights, **more: Any) -> GeneratorStart:
    return GeneratorStart(ModelConfig(str(model_folder())), "cpu", (), weights, longest=POSITIONS, **more)


Running = tuple[VllmGenerator, TinyWeights]
Opens = Callable[..., Running]


@pytest.fixture
def opens(url: str) -> Iterator[Opens]:
    """`opens(urls=..., form=..., **options)`: a started generator and its weights, closed in the end."""
    opened: list[VllmGenerator] = []

    def open_one(*, form: str = "tensors", start: dict[str, Any] | None = None, **options: Any) -> Running:
        where = {} if {"urls", "command"} & options.keys() else {"urls": (url,)}
        generator = VllmGenerator(VllmOptions(**where, **options))
        opened.append(generator)
        weights = TinyWeights(form)  # type: ignore[arg-type]
        generator.start(start_of(weights, **(start or {})))
        return generator, weights

    yield open_one
    for generator in opened:
        generator.close()


def collect(generator: VllmGenerator, requests: Sequence[GenerationRequest], seconds: float = 60.0) -> list[Completion]:
    done: dict[int, Completion] = {}
    until = time.monotonic() + seconds
    while len(done) < len(requests):
        assert time.monotonic() < until, f"{len(requests) - len(done)} requests never came back"
        for completion in generator.poll(0.5):
            assert completion.request_id not in done
            done[completion.request_id] = completion
    return [done[request.request_id] for request in requests]


def poll_on(generator: VllmGenerator) -> None:
    for _ in range(40):
        generator.poll(0.5)


def sample(generator: VllmGenerator, requests: Sequence[GenerationRequest]) -> list[Completion]:
    generator.submit(requests)
    return collect(generator, requests)


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


# --- what is refused ---------------------------------------------------------------------------------------------------------------


def refused(**environment: str) -> EngineError:
    """Return what the generator says of a server that runs with these variables."""
    address, process = serve(**environment)
    try:
        with pytest.raises(EngineError) as caught:
            VllmGenerator(VllmOptions(urls=(address,))).start(start_of(TinyWeights("tensors")))
        return caught.value
    finally:
        process.kill()
        process.wait()


FACTS = {
    "--logprobs-mode processed_logprobs": {"logprobs_mode": "raw_logprobs"},
    "--generation-config vllm": {"sampling_defaults": {"top_k": 20}},
    "--max-model-len 640": {"max_model_len": 512},
    "--dtype float32": {"dtype": "bfloat16"},
    "--enable-prefix-caching": {"prefix_cache": False},
    "no --quantization": {"quantization": "fp8"},
    '--weight-transfer-config \'{"backend": "gloo"}\'': {"transfer": "nccl"},
    "--model": {"parameters": {"model.norm.weight": [64]}},
}


def test_every_setting_that_does_not_fit_is_refused_with_its_flag(url: str) -> None:
    from skyrl_engine_vllm.checks import check_server
    from skyrl_engine_vllm.client import ServerClient
    from skyrl_engine_vllm.twin import Twin

    class Told(ServerClient):
        """A client of a server that says something else of itself."""

        said: dict[str, Any]

        def ask_workers(self, method: str, **arguments: Any) -> list[Any]:
            return [super().ask_workers(method, **arguments)[0] | self.said]

    start = start_of(TinyWeights("tensors"))
    twin, client = Twin(start, "tensors"), Told(url, None, seconds=10.0)
    client.said = {}
    check_server(client, VllmOptions(urls=(url,)), start, twin)
    for flag, client.said in FACTS.items():
        with pytest.raises(EngineError) as caught:
            check_server(client, VllmOptions(urls=(url,)), start, twin)
        assert flag in caught.value.remedy
    client.said = {"vocabulary": 100}
    with pytest.raises(ModelError, match="knows 100 tokens, and the model 128"):
        check_server(client, VllmOptions(urls=(url,)), start, twin)
    client.close()


def test_a_server_of_another_version_or_without_routes_is_refused(url: str) -> None:
    assert "vLLM 0.19.1, and this distribution is tested with 0.32" in refused(VLLM_ROUTES_VERSION="0.19.1").cause
    for path, wrong, words in (
        ("/version", "html", "no vLLM server"),
        ("/version", "404", "tells no version"),
        ("/is_paused", "404", "VLLM_SERVER_DEV_MODE=1"),
        ("/inference/v1/abort_requests", "403", "--enable-scale-out"),
        ("/collective_rpc", "404", "skyrl-engine-vllm-server"),
    ):
        post(url, "/misbehave", {path: f"once {wrong}"})
        with pytest.raises(UnsupportedError) as caught:
            VllmGenerator(VllmOptions(urls=(url,))).start(start_of(TinyWeights("tensors")))
        assert words in str(caught.value)


def test_nothing_at_an_address_is_said(opens: Opens) -> None:
    with pytest.raises(ModelError, match="cannot be reached"):
        opens(urls=(f"http://127.0.0.1:{free_port()}",))


def test_requests_that_vllm_cannot_serve_are_refused_before_any_is_taken(opens: Opens) -> None:
    generator, _ = opens()
    good, bad = requests_of(2)
    for wrong, error in (
        (evolve(bad, prompt_logprobs=True, sampling=Sampling(2, temperature=0.5)), UnsupportedError),
        (evolve(bad, sampling=Sampling(2, temperature=0.001)), UnsupportedError),
        (evolve(bad, top_prompt_logprobs=2), UnsupportedError),
        (evolve(bad, top_logprobs=21), ContractError),
        (evolve(bad, target="reference"), ContractError),
    ):
        with pytest.raises(error):
            generator.submit([good, wrong])
    assert generator.poll(0.2) == []
    assert len(sample(generator, [good, bad])) == 2


def test_the_key_comes_from_the_environment_and_is_said_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    monkeypatch.setenv("MY_VLLM_KEY", "secret-3141")
    options = VllmOptions(command=COMMAND, api_key_env="MY_VLLM_KEY")
    generator = VllmGenerator(options)
    generator.start(start_of(TinyWeights("tensors"), folder=tmp_path))
    try:
        assert len(sample(generator, requests_of(2))) == 2
        (server,) = generator._servers.all  # type: ignore[union-attr]
        assert server.process is not None
        assert server.process._process is not None
        words = Path(f"/proc/{server.process._process.pid}/cmdline").read_text() if sys.platform == "linux" else ""
        logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
        assert (
            "secret-3141"
            not in f"{options!r}{generator!r}{server.client!r}{vars(server.process)}{words}{logs}{caplog.text}".replace(
                f"'{server.process._key}'", ""
            )
        )
        without = VllmGenerator(VllmOptions(urls=(server.url,)))
        with pytest.raises(UnsupportedError, match="api_key_env"):
            without.start(start_of(TinyWeights("tensors")))
    finally:
        generator.close()
    monkeypatch.delenv("MY_VLLM_KEY")
    with pytest.raises(UnsupportedError, match="MY_VLLM_KEY"):
        VllmGenerator(options).start(start_of(TinyWeights("tensors")))


def test_options_that_contradict_each_other_are_refused() -> None:
    for wrong in (
        {"urls": ("http://127.0.0.1:1",), "venv": "here"},
        {"urls": ("http://127.0.0.1:1",), "servers": 2},
        {"urls": ("ftp://here",)},
        {"urls": ("http://user:password@here",)},
        {"transfer": "mpi"},
    ):
        with pytest.raises(ValueError):
            VllmOptions(**wrong)  # type: ignore[arg-type]


def test_what_names_programs_or_servers_names_code() -> None:
    """So that such keys out of a run directory that is not the caller's own run nothing and send nothing anywhere."""
    from skyrl_engine.config.trust.marks import code_in

    options = VllmOptions(venv="/env", arguments=("--x",), environment={"LD_PRELOAD": "x"})
    assert {path[0] for path, _ in code_in(options)} == {"venv", "arguments", "environment"}
    assert {path[0] for path, _ in code_in(VllmOptions(urls=("http://h:1",)))} == {"urls"}
    assert {path[0] for path, _ in code_in(VllmOptions(command=("sh",)))} == {"command"}
    assert {path[0] for path, _ in code_in(VllmOptions(python="/p", api_key_env="AWS_KEY", transfer_host="0.0.0.0"))} == {
        *("python", "api_key_env", "transfer_host")
    }


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
    """A server for a suite."""
    _, process = serve(port=PORT)
    yield
    process.kill()
    process.wait()


@pytest.mark.nightly
@pytest.mark.usefixtures("server_of_the_kit")
class TestVllmOverOurServer(GeneratorConformance):
    """All promises that the client claims; `test_real_conformance.py` holds it to them over vLLM."""

    plugin = "vllm"
    options: ClassVar = {"urls": [f"http://127.0.0.1:{PORT}"]}
