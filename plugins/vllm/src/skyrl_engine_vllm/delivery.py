"""Weights for one server, in the form that it takes, and the proof that it samples from them.

An update counts when the server returns the checksums of all tensors that it was sent, as received and as loaded, and the log-probabilities of
a fixed prompt are those of the twin. Before, no token of it counts.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import GenerationRequest, Sampling
from skyrl_engine_vllm.client import ServerClient
from skyrl_engine_vllm.errors import Refusal, ServerFault
from skyrl_engine_vllm.options import SLEEP_FLAG, VllmOptions
from skyrl_engine_vllm.transfer import TransferGroup, free_port
from skyrl_engine_vllm.twin import Twin
from skyrl_engine_vllm.wire import answer_of, body_of

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean distance in nats between the log-probabilities of a server and those of the twin, by the dtype that the server computes in.

On a CPU, float32 differs by 1e-5 at most, bfloat16 by 0.03 on average; weights that are a step older may be nearer, which checksums tell."""

LOOPBACK = "127.0.0.1"

ADAPTER = "skyrl-engine-policy"
"""Name under which servers know the adapters that are trained."""

PROOF_TEMPERATURE, PROOF_SAMPLED = 0.5, 8


class Delivery:
    """Give a server the present weights; keeps the connection for tensors."""

    def __init__(self, client: ServerClient, options: VllmOptions) -> None:
        self._client, self._options = client, options
        self._group: TransferGroup | None = None
        self._adapters = False
        self._asleep = False

    @property
    def model(self) -> str:
        """The name that requests ask for."""
        return ADAPTER if self._adapters else self._options.model

    def deliver(self, twin: Twin, tag: str, checksums: dict[str, str]) -> None:
        """Give weights, under a tag; running requests are kept and go on with them. Raises ServerFault.

        The server is paused when this fails in the midst, so that nobody samples from half of the weights.
        """
        client = self._client
        if self._asleep:
            client.post("/wake_up", tags="weights")
        client.post("/pause", mode="keep")
        if twin.form == "tensors":
            self._send_tensors(twin, tag, checksums)
        else:
            if twin.form == "directory":
                self._load_directory(twin)
            else:
                self._load_adapter(twin)
            client.post("/update_weight_version", {"new_version": tag})
        if self._asleep:
            client.post("/wake_up", tags="kv_cache")
            self._asleep = False
        client.post("/reset_prefix_cache", reset_running_requests="true")
        client.post("/resume")

    def sleep(self) -> None:
        """Let the server free its devices, weights included; the next `deliver` wakes it. Raises UnsupportedError where it cannot."""
        try:
            self._client.post("/sleep", level="2")
        except ServerFault as fault:
            raise UnsupportedError(
                f"the vLLM server at {self._client.url} does not sleep, as generator.share_devices asks it to: {fault}",
                remedy=f"Start it with {SLEEP_FLAG}, on GPUs, or remove generator.share_devices",
            ) from fault
        self._asleep = True

    def forget_connection(self) -> None:
        """Forget the connection of a server that is another process now, and that it knows adapters."""
        self._group, self._adapters, self._asleep = None, False, False

    def _send_tensors(self, twin: Twin, tag: str, checksums: dict[str, str]) -> None:
        group = self._connect()
        self._open_session()
        named = list(twin.tensors())
        update = {
            "names": [name for name, _ in named],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
        }
        with ThreadPoolExecutor(1, thread_name_prefix="vllm-update") as pool:
            receiving = pool.submit(self._client.post, "/update_weights", {"update_info": update})
            try:
                for _, tensor in named:
                    group.send(tensor, receiving.done)
            except ServerFault as fault:
                self._group = None
                # what the server said tells more than that nobody took a tensor
                cause = receiving.exception(timeout=self._options.update_seconds)
                raise (cause if isinstance(cause, ServerFault) else fault) from None
            receiving.result()
        self._require_checksums("skyrl_engine_received", "received", checksums)
        self._client.post("/finish_weight_update", {"weight_version": tag})
        self._require_checksums("skyrl_engine_loaded", "loaded", checksums)

    def _connect(self) -> TransferGroup:
        if self._group is not None:
            return self._group
        options, client = self._options, self._client
        world = 1 + int(client.get("/get_world_size")["world_size"])
        host, seconds = options.transfer_host or LOOPBACK, options.update_seconds
        port = free_port(host)
        init = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world, "timeout_seconds": seconds}
        with ThreadPoolExecutor(1, thread_name_prefix="vllm-connect") as pool:
            group = pool.submit(TransferGroup, host, port, world, options.transfer, seconds)
            client.post("/init_weight_transfer_engine", {"init_info": init}, seconds=seconds)
            try:
                self._group = group.result()
            except RuntimeError as error:
                raise ServerFault(f"no connection for tensors came about: {str(error).splitlines()[0]:.200}") from error
        return self._group

    def _open_session(self) -> None:
        try:
            self._client.post("/start_weight_update")
        except Refusal:
            raise
        except ServerFault:
            # one that was left open; nobody has sampled since, as the server is paused
            self._client.post("/finish_weight_update")
            self._client.post("/start_weight_update")

    def _require_checksums(self, method: str, what: str, due: dict[str, str]) -> None:
        for worker, told in enumerate(self._client.ask_workers(method)):
            if not isinstance(told, dict):
                raise ServerFault(f"its worker {worker} tells no checksums")
            wrong = [name for name, checksum in due.items() if told.get(name) != checksum]
            if wrong:
                raise ServerFault(
                    f"its worker {worker} has {what} another {wrong[0]} than was sent ({len(wrong)} of {len(due)} tensors)"
                )

    def _load_directory(self, twin: Twin) -> None:
        self._client.ask_workers("skyrl_engine_reload", path=str(twin.source))

    def _load_adapter(self, twin: Twin) -> None:
        """Load adapters in the place of the last ones.

        Not by vLLM's own `load_inplace`: each request keeps the path that it came with, and loads that again in every step.
        """
        if not self._adapters:
            try:
                self._client.post("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(twin.source)})
            except Refusal as refusal:
                # by a run before this one
                if "already" not in refusal.cause:
                    raise
        self._client.ask_workers("skyrl_engine_reload_adapter", path=str(twin.source))
        self._adapters = True


class Proof:
    """A fixed prompt and its log-probabilities under the weights of a twin."""

    def __init__(self, twin: Twin, limit: int) -> None:
        self._twin = twin
        self._prompt = twin.proof_prompt(limit - PROOF_SAMPLED)
        self._due: npt.NDArray[np.float32] = twin.logprobs(self._prompt)

    def require(self, client: ServerClient, model: str, dtype: str, tag: str) -> None:
        """Raise ServerFault unless a server's log-probabilities of the prompt, and of tokens that it samples after it, are the twin's.

        It samples twice, so that what a prefix cache holds is compared too, and at a temperature other than 1.
        """
        tolerance = TOLERANCES[dtype]
        sampling = Sampling(max_tokens=PROOF_SAMPLED, ignore_eos=True)
        # with adapters, vLLM 0.32 ends when it is asked for log-probabilities of a prompt beside other requests
        scored = self._twin.form != "adapter"
        plain = GenerationRequest(0, self._prompt, sampling, seed=1, prompt_logprobs=scored)
        warm = GenerationRequest(1, self._prompt, evolve(sampling, temperature=PROOF_TEMPERATURE), seed=2)
        for request in (plain, warm, warm):
            name = f"skyrl-engine-proof-{tag}-{request.request_id}"
            body = body_of(request, name=name, model=model, eos_token_ids=())
            returned: Any = client.post("/inference/v1/generate", body)
            answer = answer_of(request, returned, name=name, eos_token_ids=(), decode=None, vocabulary=self._twin.vocabulary)
            if [claimed for _, claimed in answer.tags] != [tag]:
                raise ServerFault(f"it says that its tokens are of the weights {answer.tags!r:.100}, where {tag!r} were published")
            completion, temperature = answer.completion, request.sampling.temperature
            row = np.concatenate([self._prompt, completion.token_ids])
            due = self._twin.logprobs(row, temperature)[len(self._prompt) - 1 :]
            self._compare(completion.logprobs, due, tolerance, f"tokens at temperature {temperature:g}")
            if completion.prompt_logprobs is not None:
                self._compare(completion.prompt_logprobs[1:], self._due, tolerance, "a fixed prompt")

    @staticmethod
    def _compare(told: npt.NDArray[np.float32], due: npt.NDArray[np.float32], tolerance: float, what: str) -> None:
        gap = float(np.abs(told - due).mean())
        # so written, NaN is off too
        if not gap <= tolerance:
            raise ServerFault(
                f"its log-probabilities of {what} differ from those of the weights that it was given by {gap:.3g} nats on average, where "
                f"{tolerance:g} is allowed"
            )
