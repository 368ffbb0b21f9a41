"""A vLLM server as a process of this run: started, watched, ended with all that it started."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from skyrl_engine import ModelError
from skyrl_engine.contracts import GeneratorStart, WeightForm
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine_vllm.client import ServerClient
from skyrl_engine_vllm.errors import ServerFault
from skyrl_engine_vllm.options import SLEEP_FLAG, VllmOptions
from skyrl_engine_vllm.transfer import free_port

HOST = "127.0.0.1"
ENTRY = ("-m", "vllm.entrypoints.launchers.api_server.entry")
"""Starts vLLM 0.32 whatever its distribution is called: `vllm serve` looks for one that is called vllm."""

OWNER = "SKYRL_ENGINE_OWNER"
"""Environment variable by which skyrl-engine-vllm-server knows the process that it ends with."""

LAST_LINES = 12
END_SECONDS = 20.0
_NAP = 0.25


def words_of_flags(options: VllmOptions, start: GeneratorStart, form: WeightForm, port: int) -> list[str]:
    """Return the flags that a server needs, then those of the user."""
    model = start.model
    transfer = "gloo" if options.transfer == "gloo" else "torch_nccl"
    flags = [
        "--model",
        model.path,
        "--served-model-name",
        options.model,
        "--host",
        HOST,
        "--port",
        str(port),
        "--dtype",
        model.dtype,
    ]
    flags += [
        "--enable-scale-out",
        "--generation-config",
        "vllm",
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-prefix-caching",
    ]
    flags += ["--weight-transfer-config", json.dumps({"backend": transfer})]
    flags += ["--worker-extension-cls", "skyrl_engine_vllm_server.worker.WorkerExtension"]
    if start.longest is not None:
        flags += ["--max-model-len", str(start.longest)]
    if model.revision is not None:
        flags += ["--revision", model.revision]
    if model.tokenizer is not None:
        flags += ["--tokenizer", model.tokenizer]
    if model.trust_remote_code:
        flags += ["--trust-remote-code"]
    if form == "adapter":
        rank = ModelFacts(model).adapter_rank
        flags += ["--enable-lora", *([] if rank is None else ["--max-lora-rank", str(_lora_rank(rank))])]
    if options.enable_sleep_mode:
        flags += [SLEEP_FLAG]
    return [*flags, *options.arguments]


def _lora_rank(rank: int) -> int:
    """Return the least rank of those that vLLM knows that is no smaller."""
    return next((known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)


def command_of(options: VllmOptions) -> list[str]:
    """Return the words that start a server. Raises ModelError where no way is given, or the interpreter is not there."""
    if options.command:
        return list(options.command)
    if options.venv is not None:
        folder = Path(options.venv).expanduser()
        python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    elif options.python is not None:
        python = Path(options.python).expanduser()
    else:
        raise ModelError(
            "the generator vllm knows no server",
            remedy="Give generator.urls of running servers, or generator.venv, the environment that holds vLLM and skyrl-engine-vllm-server",
        )
    if not python.exists():
        raise ModelError(
            f"there is no Python at {python}", remedy="Set generator.venv or generator.python to the environment that holds vLLM"
        )
    return [str(python), *ENTRY]


class ServerProcess:
    """A server that this run starts, with its output in a file of `folder`."""

    def __init__(
        self, number: int, options: VllmOptions, start: GeneratorStart, form: WeightForm, folder: Path, key: str | None
    ) -> None:
        self.number = number
        self._options, self._key = options, key
        self.port = free_port(HOST) if options.port is None else options.port + number
        self.url = f"http://{HOST}:{self.port}"
        self._words = [*command_of(options), *words_of_flags(options, start, form, self.port)]
        self._log_folder, self._starts = folder, 0
        self.log = folder / f"vllm-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._adapters = form == "adapter"

    def launch(self) -> None:
        """Start it. Raises ModelError where its port is in use or the command is not there."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, self.port))
            except OSError as error:
                raise ModelError(
                    f"port {self.port} for a vLLM server is in use", remedy="Set generator.port to a free one, or leave it out"
                ) from error
        self._starts += 1
        self.log = self._log_folder / (
            f"vllm-{self.number}.log" if self._starts == 1 else f"vllm-{self.number}-start-{self._starts}.log"
        )
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            OWNER: str(os.getpid()),
            **self._options.environment,
        }
        # what this process was started with is for its own ranks
        for name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "PYTHONPATH",
            "PYTHONHOME",
        ):
            if name not in self._options.environment:
                environment.pop(name, None)
        if self._adapters:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        environment.pop(self._options.api_key_env or "", None)
        if self._key is not None:
            # not on the command line, which everybody on the machine reads
            environment["VLLM_API_KEY"] = self._key
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 the user's own command
                    self._words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise ModelError(
                f"{self._words[0]} cannot be started: {error.strerror}",
                remedy="Set generator.venv, python or command to what starts vLLM",
            ) from error

    def wait_until_healthy(self, client: ServerClient) -> None:
        """Wait until it answers. Raises ServerFault, with its last lines, where it ends before or takes longer than `start_seconds`."""
        until = time.monotonic() + self._options.start_seconds
        while True:
            process = self._process
            if process is None:
                raise ServerFault("it was ended while it started")
            if process.poll() is not None:
                raise ServerFault(f"it ended with status {process.returncode} while it started: {self.last_words()}")
            with contextlib.suppress(ServerFault):
                client.get("/health", seconds=2.0)
                return
            if time.monotonic() > until:
                raise ServerFault(
                    f"it had not started after {self._options.start_seconds:g} seconds (generator.start_seconds): {self.last_words()}"
                )
            time.sleep(_NAP)

    def is_running(self) -> bool:
        """Say whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def last_words(self) -> str:
        """Return the cause that its log gives, an error's line where there is one, and the log's path."""
        lines = self._read_lines()
        errors = [line for line in lines if re.search(r"(Error|Exception)\b.*: |error: ", line) and "WARNING" not in line]
        # vLLM raises where a process of its own failed, after it, and says no more than that
        causes = [line for line in errors if "See root cause above" not in line]
        said = (causes or errors or lines or ["it said nothing"])[-1]
        return f"{said.strip():.300} (log: {self.log})"

    def last_lines(self) -> Sequence[str]:
        """Return the last lines of its log, without the key."""
        return self._read_lines()[-LAST_LINES:]

    def _read_lines(self) -> list[str]:
        """Return the lines of the end of its log, without the key and those that are empty."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")[-20_000:]
        except OSError:
            return []
        if self._key:
            text = text.replace(self._key, "[key]")
        return [line for line in text.splitlines() if line.strip()]

    def end(self) -> None:
        """End it and all that it started: kindly, then, after some seconds, by force."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.poll() is None:
                process.terminate()
                # one that is stopped does not hear it
                process.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS / 2)
        # its group outlives it where a worker hangs
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
