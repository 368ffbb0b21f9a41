"""Checks of a server: its version, its routes, its settings and its model, each mismatch with the flag to set."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from skyrl_engine import EngineError, ModelError, UnsupportedError
from skyrl_engine.contracts import GeneratorStart
from skyrl_engine_vllm.client import ServerClient
from skyrl_engine_vllm.errors import Refusal, ServerFault
from skyrl_engine_vllm.options import VllmOptions
from skyrl_engine_vllm.twin import Twin

TESTED = ((0, 32), (0, 33))
"""Versions of vLLM, from and before, that this distribution is tested with."""

PROTOCOL = 1
EXTENSION = "skyrl_engine_vllm_server.worker.WorkerExtension"


@frozen
class ServerFacts:
    """Facts of a server that requests need to know."""

    dtype: str
    longest: int
    max_logprobs: int


def check_server(client: ServerClient, options: VllmOptions, start: GeneratorStart, twin: Twin) -> ServerFacts:
    """Return a server's facts. Raises ModelError or UnsupportedError for one that cannot serve this run, ServerFault for one that fails."""
    where = f"the vLLM server at {client.url}"
    _check_version(client, where)
    _check_routes(client, where, options)
    told = _facts(client, where)
    _check_settings(told, where, options, start, twin)
    _check_model(told, where, start, twin)
    return ServerFacts(str(told["dtype"]), int(told["max_model_len"]), int(told["max_logprobs"]))


def _unsupported(cause: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(cause, remedy=remedy)


def _check_version(client: ServerClient, where: str) -> None:
    try:
        told = client.get("/version")
        version = str(told["version"])
    except (Refusal, KeyError, TypeError) as error:
        raise _unsupported(
            f"{where} tells no version, as vLLM servers do", "Set generator.urls to the address of `vllm serve` itself"
        ) from error
    except ServerFault as fault:
        if "web page" in fault.cause or "no JSON" in fault.cause:
            raise _unsupported(
                f"what answers at {client.url} is no vLLM server: {fault.cause}",
                "Set generator.urls to the address of `vllm serve` itself",
            ) from fault
        raise
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    low, high = TESTED
    if not low <= numbers < high:
        bounds = f"{'.'.join(map(str, low))} up to, but not {'.'.join(map(str, high))}"
        raise _unsupported(
            f"{where} is vLLM {version}, and this distribution is tested with {bounds}", f"Install vllm=={low[0]}.{low[1]}.*"
        )


def _check_routes(client: ServerClient, where: str, options: VllmOptions) -> None:
    try:
        models = client.get("/v1/models")["data"]
        names = [str(model["id"]) for model in models]
    except Refusal as refusal:
        if "401" in refusal.cause:
            raise _unsupported(
                f"{where} wants an API key, or another one", "Name the variable that holds it by generator.api_key_env"
            ) from refusal
        raise _unsupported(f"{where} has no /v1/models", "Set generator.urls to the address of `vllm serve` itself") from refusal
    except (KeyError, TypeError) as error:
        raise ServerFault("its answer to /v1/models is none of a vLLM server") from error
    if options.model not in names:
        raise _unsupported(
            f"{where} serves {', '.join(names)} and not {options.model}",
            f"Start it with --served-model-name {options.model}, or set generator.model",
        )
    try:
        client.get("/is_paused")
    except Refusal as refusal:
        raise _unsupported(
            f"{where} has no routes for new weights", "Start it with the environment variable VLLM_SERVER_DEV_MODE=1"
        ) from refusal
    try:
        # of the routes that the flag adds, the one that does nothing
        client.post("/inference/v1/abort_requests", {"request_ids": []})
    except Refusal as refusal:
        if re.search(r"\((403|404|405)\)", refusal.cause):
            raise _unsupported(f"{where} does not take token ids", "Start it with --enable-scale-out") from refusal


def _facts(client: ServerClient, where: str) -> Mapping[str, Any]:
    remedy = f"Install skyrl-engine-vllm-server beside vLLM, and start the server with --worker-extension-cls {EXTENSION}"
    try:
        facts = client.ask_workers("skyrl_engine_facts")
    except ServerFault as fault:
        raise _unsupported(f"{where} has no worker extension of skyrl-engine: {fault.cause}", remedy) from fault
    first = facts[0] if facts else None
    if not isinstance(first, dict) or first.get("protocol") != PROTOCOL:
        raise _unsupported(f"{where} has a worker extension of another version", remedy)
    return first


def _check_settings(told: Mapping[str, Any], where: str, options: VllmOptions, start: GeneratorStart, twin: Twin) -> None:
    wanted_dtype = start.model.dtype
    problems: list[tuple[bool, str, str]] = [
        (told["dtype"] != wanted_dtype, f"computes in {told['dtype']}, and the run in {wanted_dtype}", f"--dtype {wanted_dtype}"),
        (
            told["logprobs_mode"] != "processed_logprobs",
            f"tells log-probabilities as {told['logprobs_mode']}, which are not of the distribution that it samples from",
            "--logprobs-mode processed_logprobs",
        ),
        (
            bool(told["sampling_defaults"]),
            f"takes sampling parameters from the model's generation config: {told['sampling_defaults']}",
            "--generation-config vllm",
        ),
        (not told["prefix_cache"], "has no prefix cache, so every turn would be read as a whole", "--enable-prefix-caching"),
        (bool(told["quantization"]), f"quantizes weights by {told['quantization']}", "no --quantization"),
        (
            bool(told["speculative"]),
            "samples speculatively, where log-probabilities are of another distribution",
            "no --speculative-config",
        ),
    ]
    if start.longest is not None:
        problems.append(
            (
                told["max_model_len"] < start.longest,
                f"takes {told['max_model_len']} tokens, and attempts have up to {start.longest}",
                f"--max-model-len {start.longest}",
            )
        )
    if twin.form == "tensors":
        backend = "gloo" if options.transfer == "gloo" else "torch_nccl"
        problems.append(
            (
                told["transfer"] != backend,
                f"takes tensors by {told['transfer']}, and generator.transfer is {options.transfer}",
                f'--weight-transfer-config \'{{"backend": "{backend}"}}\'',
            )
        )
    if twin.form == "adapter":
        problems.append(
            (told["lora"] is None, "takes no adapters", "--enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment")
        )
    found = [(cause, flag) for wrong, cause, flag in problems if wrong]
    if found:
        raise UnsupportedError(
            f"{where} {found[0][0]}",
            remedy=f"Start it with {found[0][1]}",
            details=[f"{where} {cause}: start it with {flag}" for cause, flag in found[1:]],
        )


def _check_model(told: Mapping[str, Any], where: str, start: GeneratorStart, twin: Twin) -> None:
    vocabulary = start.vocabulary or twin.vocabulary
    if told["vocabulary"] < vocabulary:
        raise _other_model(f"{where} knows {told['vocabulary']} tokens, and the model {vocabulary}", start)
    shapes = {name: list(tensor.shape) for name, tensor in twin.tensors()}
    if told["tensor_parallel"] == 1 and (wrong := differing_shapes(shapes, told["parameters"], told["packed"])):
        raise _other_model(f"{where} serves another model: {wrong}", start)


def _other_model(cause: str, start: GeneratorStart) -> EngineError:
    return ModelError(cause, remedy=f"Start it with --model {start.model.path}")


def differing_shapes(
    ours: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]], packed: Mapping[str, Sequence[str]]
) -> str | None:
    """Compare shapes of Hugging Face names with those of vLLM's, which lays some parts end to end; None where no difference is known.

    Names that vLLM maps in a way of its own are left out: its loader refuses what it does not know. Vocabularies may be filled up.
    """
    whole_of = {part: whole for whole, parts in packed.items() for part in parts}
    rows: dict[str, int] = {}
    tails: dict[str, Sequence[int]] = {}
    for name, shape in ours.items():
        words = name.split(".")
        place = next((place for place, word in enumerate(words) if word in whole_of), None)
        joined = name if place is None else ".".join((*words[:place], whole_of[words[place]], *words[place + 1 :]))
        rows[joined] = rows.get(joined, 0) + shape[0]
        tails[joined] = shape[1:]
    for name, count in rows.items():
        if name not in theirs:
            continue
        shape = theirs[name]
        is_filled_up = name.endswith(("embed_tokens.weight", "lm_head.weight")) and shape[0] >= count
        if list(shape[1:]) != list(tails[name]) or (shape[0] != count and not is_filled_up):
            return f"{name} has the shape {list(shape)}, and ours {[count, *tails[name]]}"
    layers = {name for name in theirs if ".layers." in name} - rows.keys()
    if layers and any(name in theirs for name in rows if ".layers." in name):
        return f"it has {min(layers)}, and ours has not"
    return None
