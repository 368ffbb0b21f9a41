"""A small HTTP server with the routes of a vLLM server that skyrl-engine-vllm calls: the generator `hf` samples behind them.

It takes the flags of a vLLM server, so `command = [python, vllm_routes.py]` of the generator starts it. Tensors come by the same code as beside
vLLM (`skyrl_engine_vllm_server.groups`, `checksums`). `/misbehave` lets it fail as vLLM 0.32 was seen to fail.

What it imports takes seconds: `forked_servers` makes servers as forks of one process.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
from attrs import evolve
from forked_servers import FORKS_AT, fork_servers
from safetensors.torch import load_file

from skyrl_engine.contracts import Completion, GenerationRequest, GeneratorStart, ModelConfig, Sampling
from skyrl_engine.modeling.loading import load_causal_lm
from skyrl_engine_generators.generator import HfGenerator
from skyrl_engine_generators.options import HfOptions
from skyrl_engine_vllm_server.checksums import LoadedTensors
from skyrl_engine_vllm_server.groups import join_group, receive
from skyrl_engine_vllm_server.owner import end_with_owner

FOREVER, SLOW = 3600.0, 1.0
CHANGED = ("cut", "twice", "the last one's")
"""Misbehaviours of a right answer."""


class Held:
    """The weights of the server's model, as a `WeightSource` of the form "tensors"."""

    forms = frozenset({"tensors"})

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.values: dict[str, torch.Tensor] = {}
        self.read(folder)

    def read(self, folder: str) -> None:
        model = load_causal_lm(ModelConfig(folder))
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.values.items())


class Engine:
    """One `hf` generator, stepped by a thread while nobody paused it."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.held = Held(flags.model)
        self.generator = HfGenerator(HfOptions(slots=16))
        self.generator.start(GeneratorStart(ModelConfig(flags.model), "cpu", (), self.held))
        self.lock = threading.RLock()
        self.tags = {0: "default"}
        self.is_paused = False
        self.is_open = False
        self.loaded, self.taken = LoadedTensors(), {}
        self.group: Any = None
        self.numbers: dict[str, int] = {}
        self.waiting: dict[int, SimpleQueue[Completion]] = {}
        self.count = 0
        self.misbehaviour: dict[str, str] = {}
        self.last: Any = None
        # once in all lives of the server: the file of a fault that came is there
        self.faults = json.loads(os.environ.get("VLLM_ROUTES_FAULTS", "[]"))
        self.asleep: list[str] = []
        threading.Thread(target=self._step, daemon=True).start()

    def _step(self) -> None:
        while True:
            with self.lock:
                if not self.is_paused:
                    for completion in self.generator.poll(0.0):
                        self.waiting.pop(completion.request_id).put(completion)
            time.sleep(0.001 if self.waiting else 0.01)

    def find_fault(self, path: str) -> str | None:
        """Return the fault whose turn it is: one of `{"path", "count", "what", "file"}`, at the so-manieth call of the path."""
        with self.lock:
            for fault in self.faults:
                if fault["path"] == path and not Path(fault["file"]).exists():
                    fault["count"] -= 1
                    if not fault["count"]:
                        Path(fault["file"]).touch()
                        return str(fault["what"])
        return None

    def sleep(self, level: str) -> None:
        """Free the weights, as level 2 does."""
        assert self.flags.enable_sleep_mode, "Sleep mode is not enabled"
        assert level == "2", level
        with self.lock:
            self.generator.sleep()
            self.asleep = ["weights", "kv_cache"]

    def wake(self, tag: str) -> None:
        """Take memory again, first for weights and then for caches."""
        assert self.asleep[0] == tag, f"{tag} where {self.asleep} sleep"
        self.asleep.pop(0)

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        assert not self.asleep, f"{self.asleep} sleep"
        wanted = body["sampling_params"]
        prompt = np.array(body["token_ids"], dtype=np.int32)
        longest = self.flags.max_model_len
        sampling = Sampling(
            max_tokens=min(wanted["max_tokens"], longest - len(prompt)),
            temperature=wanted["temperature"],
            top_p=wanted["top_p"],
            top_k=max(wanted["top_k"], 0),
            min_p=wanted["min_p"],
            stop_token_ids=tuple(wanted["stop_token_ids"]),
            stop_strings=tuple(wanted["stop"]),
            ignore_eos=wanted["ignore_eos"],
        )
        top = wanted["logprobs"]
        with self.lock:
            self.count += 1
            number = self.numbers[name := f"generate-tokens-{body['request_id']}"] = self.count
            answer = self.waiting[number] = SimpleQueue()
            request = GenerationRequest(number, prompt, sampling, wanted["seed"] % (1 << 64), session=number, top_logprobs=top)
            self.generator.submit([evolve(request, prompt_logprobs=wanted["prompt_logprobs"] is not None)])
        return {"request_id": name, **self._say(prompt, answer.get(), top)}

    def _say(self, prompt: Any, done: Completion, top: int) -> dict[str, Any]:
        content = []
        for place, (token, logprob) in enumerate(zip(done.token_ids.tolist(), done.logprobs.tolist(), strict=True)):
            others = []
            if top and done.top_logprobs is not None:
                ids, scores = done.top_logprobs.token_ids[place].tolist(), done.top_logprobs.logprobs[place].tolist()
                others = [{"token_id": other, "logprob": score} for other, score in zip(ids, scores, strict=True) if other != token]
            first = {"token_id": token, "logprob": logprob}
            content.append({**first, "top_logprobs": [first, *others]})
        starts = [*done.versions.starts.tolist(), len(done.token_ids)]
        spans = [
            {"start": start, "end": end, "version": self.tags[version]}
            for start, end, version in zip(starts, starts[1:], done.versions.versions.tolist(), strict=False)
        ]
        choice = {
            "index": 0,
            "token_ids": done.token_ids.tolist(),
            "logprobs": {"content": content},
            "finish_reason": done.finish,
            "stop_reason": done.stop,
            "weight_versions": spans,
        }
        scores = None
        if done.prompt_logprobs is not None:
            told = zip(prompt.tolist(), done.prompt_logprobs.tolist(), strict=True)
            scores = [{str(token): {"logprob": score}} for token, score in told]
            scores[0] = None
        return {"choices": [choice], "prompt_logprobs": scores}

    def abort(self, names: Any) -> None:
        with self.lock:
            self.generator.abort([self.numbers[name] for name in names if name in self.numbers])

    def receive(self, update: Mapping[str, Any]) -> None:
        def make_buffer(shape: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(tuple(shape), dtype=dtype)

        for name, tensor in receive(self.group, update["names"], update["dtype_names"], update["shapes"], make_buffer):
            self.loaded.receive(name, tensor)
            if self.misbehaviour.get("load") == "skip" and name.endswith("norm.weight"):
                continue
            parameter = self.held.values[name]
            self.loaded.record(lambda place, given: place.copy_(given))(parameter, tensor)

    def commit(self, tag: str | None) -> None:
        """Sample from the present values from now on."""
        with self.lock:
            version = max(self.tags) + 1
            self.tags[version] = tag or self.tags[version - 1]
            if self.misbehaviour.get("update") != "ignore":
                self.generator.update(self.held, version)
            else:
                self.tags[version - 1] = self.tags[version]

    def facts(self) -> dict[str, Any]:
        model = load_causal_lm(ModelConfig(self.flags.model))
        told = {
            "protocol": 1,
            "dtype": self.flags.dtype,
            "device": "cpu",
            "vocabulary": int(model.get_input_embeddings().weight.shape[0]),
            "max_model_len": self.flags.max_model_len,
            "logprobs_mode": self.flags.logprobs_mode,
            "max_logprobs": 20,
            "sampling_defaults": {} if self.flags.generation_config == "vllm" else {"temperature": 0.6},
            "prefix_cache": True,
            "quantization": None,
            "speculative": False,
            "transfer": json.loads(self.flags.weight_transfer_config)["backend"],
            "lora": None,
            "tensor_parallel": 1,
            "parameters": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
            "packed": {},
        }
        return told | json.loads(os.environ.get("VLLM_ROUTES_FACTS", "{}"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(json.loads(body) if body else {})

    def _answer(self, body: Any) -> None:
        engine, path = self.engine, urlsplit(self.path).path
        key = os.environ.get("VLLM_API_KEY")
        if key and path.startswith(("/v1", "/inference")) and self.headers.get("Authorization") != f"Bearer {key}":
            return self._send(401, {"error": "Unauthorized"})
        wrong = engine.misbehaviour.get(path) or engine.find_fault(path)
        if wrong is not None and path != "/misbehave":
            if wrong.startswith("once "):
                engine.misbehaviour.pop(path)
                wrong = wrong.removeprefix("once ")
            if wrong == "slow":
                time.sleep(SLOW)
            elif wrong == "killed behind it":
                threading.Timer(0.02, os._exit, [9]).start()
            elif wrong not in CHANGED:
                return self._misbehave(wrong, body)
        try:
            query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
            status, answer = self._route(path, body, query)
        except Exception as error:  # noqa: BLE001 as a server does
            status, answer = 500, {"error": {"message": repr(error)}}
        if wrong == "the last one's" and engine.last is not None:
            answer = engine.last
        if path == "/inference/v1/generate":
            engine.last = answer
        if wrong == "cut":
            return self._send(status, answer, share=0.5)
        if wrong == "twice":
            self._send(status, answer)
        return self._send(status, answer)

    def _misbehave(self, wrong: str, body: Any) -> None:
        if wrong == "500":
            self._send(500, {"error": {"message": "EngineCore encountered an issue"}})
        elif wrong == "404":
            self._send(404, {"detail": "Not Found"})
        elif wrong == "403":
            self._send(403, {"detail": "Forbidden"})
        elif wrong == "html":
            self._send(200, "<html>Sign in</html>", kind="text/html")
        elif wrong == "garbage":
            self._send(200, {"choices": [{"token_ids": "none"}]})
        elif wrong == "foreign":
            self._send(200, {"request_id": f"generate-tokens-{body['request_id']}", **FOREIGN})
        elif wrong == "hang":
            time.sleep(FOREVER)
        elif wrong == "exit":
            os._exit(9)
        else:
            raise ValueError(wrong)

    def _route(self, path: str, body: Any, query: Mapping[str, str]) -> tuple[int, Any]:
        engine = self.engine
        match path:
            case "/health":
                return 200, ""
            case "/version":
                return 200, {"version": os.environ.get("VLLM_ROUTES_VERSION", "0.32.0")}
            case "/v1/models":
                return 200, {"data": [{"id": engine.flags.served_model_name, "max_model_len": engine.flags.max_model_len}]}
            case "/is_paused":
                return 200, {"is_paused": engine.is_paused}
            case "/get_world_size":
                return 200, {"world_size": 1}
            case "/inference/v1/generate":
                return 200, engine.generate(body)
            case "/inference/v1/abort_requests":
                engine.abort(body["request_ids"])
            case "/pause":
                with engine.lock:
                    engine.is_paused = True
            case "/resume":
                with engine.lock:
                    engine.is_paused = False
            case "/sleep":
                engine.sleep(query["level"])
            case "/wake_up":
                engine.wake(query["tags"])
            case "/init_weight_transfer_engine":
                init = body["init_info"]
                where = init["master_address"], init["master_port"]
                engine.group = join_group(*where, init["rank_offset"], init["world_size"], init["timeout_seconds"])
            case "/start_weight_update":
                if engine.is_open:
                    raise RuntimeError("already active")
                engine.is_open, engine.loaded, engine.taken = True, LoadedTensors(), {}
            case "/update_weights":
                engine.receive(body["update_info"])
            case "/finish_weight_update":
                engine.taken, engine.is_open = dict(engine.loaded.finish()), False
                engine.commit(body.get("weight_version"))
            case "/update_weight_version":
                engine.commit(body["new_version"])
            case "/collective_rpc":
                return 200, {"results": [self._of_worker(body["method"], body.get("kwargs", {}))]}
            case "/reset_prefix_cache":
                pass
            case "/misbehave":
                engine.misbehaviour.update(body)
            case _:
                return 404, {"detail": "Not Found"}
        return 200, {"query": dict(query)}

    def _of_worker(self, method: str, arguments: Mapping[str, str]) -> Any:
        engine = self.engine
        match method:
            case "skyrl_engine_facts":
                return engine.facts()
            case "skyrl_engine_received":
                return engine.loaded.received
            case "skyrl_engine_loaded":
                return engine.taken
            case "skyrl_engine_reload":
                for file in Path(arguments["path"]).glob("*.safetensors"):
                    known = load_file(file)
                    engine.held.values.update({name: known[name] for name in engine.held.values if name in known})
                return {}
        raise NotImplementedError(method)

    def _send(self, status: int, answer: Any, kind: str = "application/json", share: float = 1.0) -> None:
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: round(share * len(data))])
        self.close_connection = share < 1.0


FOREIGN = {
    "choices": [
        {
            "index": 0,
            "token_ids": [1],
            "logprobs": {"content": [{"token_id": 1, "logprob": -1.0, "top_logprobs": []}]},
            "finish_reason": "length",
            "stop_reason": None,
            "weight_versions": [{"start": 0, "end": 1, "version": "another-run:7"}],
        }
    ]
}


def main(words: list[str] | None = None) -> None:
    if os.environ.get("VLLM_ROUTES_DIES"):
        # as vLLM does: the cause in a process of its own, and after many lines that it failed
        cause = "(Worker pid=1) ERROR ValueError: no kernel image is available"
        failure = "RuntimeError: Engine core initialization failed. See root cause above."
        print(cause, *["  File x, line 1"] * 30, failure, sep="\n", flush=True)
        sys.exit(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", default="skyrl-engine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=640)
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--generation-config", default="auto")
    parser.add_argument("--weight-transfer-config", default='{"backend": "nccl"}')
    flags, _ = parser.parse_known_args(words)
    end_with_owner()
    torch.set_num_threads(1)
    handler = type("OneHandler", (Handler,), {"engine": Engine(flags)})
    # a suite of the kit sends a hundred requests at once
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer((flags.host, flags.port), handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == FORKS_AT:
        fork_servers(int(sys.argv[2]), main)
    else:
        main()
