"""The generator `vllm` refuses servers, settings, requests and options that do not fit, each with its remedy."""

import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from vllm_clients import COMMAND, Opens, post, sample, serve, start_of

from skyrl_engine import ContractError, EngineError, ModelError, UnsupportedError
from skyrl_engine.contracts import Sampling
from skyrl_engine.testing.generators.bench import TinyWeights, requests_of
from skyrl_engine_vllm.generator import VllmGenerator
from skyrl_engine_vllm.options import VllmOptions
from skyrl_engine_vllm.transfer import free_port

pytestmark = pytest.mark.usefixtures("routes_forked")


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
        {"venv": "here", "arguments": ("--enable-sleep-mode",)},
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
