"""The front of `skyrl-engine serve`: its CPU time per sample, and during a forward_backward of 100,000 tokens of a tiny model.

The front is the event loop, the threads that decompress and parse for it, and what the model's lane reads and writes of messages. Requests come
from another process, over connections that are kept. Run with `nox -s bench`.
"""

import functools
import json
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine

from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine_tinker import model, samplers
from skyrl_engine_tinker.app import application
from skyrl_engine_tinker.settings import Settings
from skyrl_engine_tinker.wire import CLASSES, FLOAT32, INT64

MILLISECONDS_PER_SAMPLE = 3.0
SHARE_OF_A_PASS = 0.05
SAMPLES, PROMPT, SAMPLED = 200, 500, 32
DATUMS, ROW = 100, 1_000
ROUNDS = 3

CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection(sys.argv[1], timeout=600)

def post(call, body):
    connection.request("POST", f"/api/v1/{call}", body if isinstance(body, bytes) else json.dumps(body))
    found = connection.getresponse()
    kind, answer = found.headers["Content-Type"], found.read()
    return answer if "protobuf" in kind else json.loads(answer)

def done(asked):
    while isinstance(answer := post("retrieve_future", asked), dict) and answer.get("type") == "try_again":
        pass
    assert isinstance(answer, bytes) or "error" not in answer, answer
    return answer

session = post("create_session", {})["session_id"]
done(post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}))
model, number, seed = f"{session}:train:0", 1, 0
sampler = done(post("save_weights_for_sampler", {"model_id": model, "seq_id": number}))["sampling_session_id"]
for line in sys.stdin:
    what = json.loads(line)
    if what["do"] == "sample":
        asked = []
        for _ in range(what["count"]):
            params = {"max_tokens": what["sampled"], "seed": seed, "stop": []}
            body = {"sampling_session_id": sampler, "seq_id": seed, "prompt": {"chunks": [{"tokens": what["prompt"]}]}}
            asked.append(post("asample", {**body, "num_samples": 1, "sampling_params": params}))
            seed += 1
        for each in asked:
            done(each)
    else:
        number += 1
        # seq_id is the second field, and this file of a message is without it
        done(post("forward_backward", open(what["file"], "rb").read() + b"\\x0a\\x28" + model.encode() + b"\\x10" + bytes([number])))
    print("done", flush=True)
"""


class Front:
    """CPU time of the front: threads by their clocks, and the functions that the model's lane calls of it."""

    def __init__(self, loop: threading.Thread) -> None:
        self.loop, self.codecs = loop, 0.0
        for where, name in ((model, "columns_of"), (model, "encode_outputs"), (samplers, "encode_samples")):
            setattr(where, name, self.counted(getattr(where, name)))

    def counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def call_counted(*arguments: Any, **named: Any) -> Any:
            begin = time.thread_time()
            try:
                return work(*arguments, **named)
            finally:
                self.codecs += time.thread_time() - begin

        return call_counted

    def seconds(self) -> float:
        own = [self.loop, *(thread for thread in threading.enumerate() if thread.name.startswith("asyncio_"))]
        return self.codecs + sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in own)


def message() -> bytes:
    """A forward_backward of cross_entropy over DATUMS rows of ROW tokens, without the model's id and the request's number."""
    request = CLASSES["ForwardBackwardRequest"](loss_fn="cross_entropy")
    draw = np.random.default_rng(0)
    for _ in range(DATUMS):
        row, datum = draw.integers(5, 100, ROW + 1), request.data.add()
        datum.model_input.add().encoded_text.tokens = row[:-1].astype("<i4").tobytes()
        targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
        targets.dense, targets.dtype = row[1:].astype("<i8").tobytes(), INT64
        weights.dense, weights.dtype = np.ones(ROW, "<f4").tobytes(), FLOAT32
    return bytes(request.SerializeToString())


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder / "model", max_position_embeddings=2 * ROW)
        write_tokenizer(folder / "model", [string.printable], size=128)
        (folder / "serve.toml").write_text('[serve.models]\ntiny = "model"\n')
        (folder / "message").write_bytes(message())
        config = uvicorn.Config(application(Settings.read(folder / "serve.toml")), port=0, log_level="warning")
        server, listening = uvicorn.Server(config), config.bind_socket()
        loop = threading.Thread(target=server.run, args=([listening],), daemon=True)
        loop.start()
        while not server.started:
            time.sleep(0.01)
        command = [sys.executable, "-c", CLIENT, f"127.0.0.1:{listening.getsockname()[1]}"]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert client.stdin is not None
        assert client.stdout is not None
        front = Front(loop)

        def measure_spent(**what: Any) -> tuple[float, float]:
            """CPU seconds of the front and of the whole process, for one line to the client."""
            before = front.seconds(), time.process_time()
            print(json.dumps(what), file=client.stdin, flush=True)
            assert client.stdout is not None
            assert client.stdout.readline() == "done\n"
            return front.seconds() - before[0], time.process_time() - before[1]

        request = {"do": "sample", "count": SAMPLES, "prompt": list(range(5, 105)) * (PROMPT // 100), "sampled": SAMPLED}
        measure_spent(**{**request, "count": 5})
        seconds_per_sample = min(measure_spent(**request)[0] for _ in range(ROUNDS)) / SAMPLES
        passes = [measure_spent(do="forward_backward", file=str(folder / "message")) for _ in range(ROUNDS)]
        client.stdin.close()
        client.wait()
        server.should_exit = True
        loop.join(30)
    own, whole = min(passes)
    bar = compare_with_bar(1e3 * seconds_per_sample, at_most=MILLISECONDS_PER_SAMPLE)
    print(f"front, a sample of {SAMPLED} behind {PROMPT} tokens and its retrieval: {1e3 * seconds_per_sample:.2f} ms {bar}")
    share = compare_with_bar(own / (whole - own), at_most=SHARE_OF_A_PASS)
    print(
        f"front, {DATUMS * ROW:,} tokens: {1e3 * own:.0f} ms beside {whole - own:.1f} s of the pass, {own / (whole - own):.4f} {share}"
    )


if __name__ == "__main__":
    main()
