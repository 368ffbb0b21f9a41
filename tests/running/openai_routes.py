"""A small HTTP server with the routes of an OpenAI-compatible endpoint, of a plain one or of vLLM's: the generator `hf` samples behind them.

It is `vllm_routes.py` with other routes, in this process. A plain endpoint refuses parameters that only vLLM has, as many do.
"""

import argparse
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm_routes import Engine, Handler

from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.testing.generators.bench import ODD_SIZES
from skyrl_engine.testing.templates import TEMPLATES

PLAIN = {"model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "stop"}
OF_VLLM = {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "return_token_ids"}


def write_letters_model(folder: Path) -> None:
    """Write a model whose tokens are printable letters and the marks of ChatML, so that a text is encoded to the tokens that it was."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["\u0120", "\u010a", *map(chr, range(33, 127))]  # space and line break, as byte-level tokenizers write them
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in TEMPLATES["chatml"].tokens])
    end = "<|im_end|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, pad_token=end, additional_special_tokens=[*TEMPLATES["chatml"].tokens]
    )
    tokenizer.chat_template = TEMPLATES["chatml"].text
    write_model(folder, tokenizer=tokenizer, **ODD_SIZES)
    make_parts_differ(folder)
    tokenizer.save_pretrained(folder)


class Endpoint(Engine):
    """The model of a folder, with its tokenizer. `bodies` are those that were answered by a completion."""

    def __init__(self, folder: Path, known: set[str]) -> None:
        super().__init__(argparse.Namespace(model=str(folder), max_model_len=640))
        self.known = known
        self.tokenizer = load_tokenizer(ModelConfig(str(folder)))
        self.bodies: list[Mapping[str, Any]] = []

    def complete(self, body: Mapping[str, Any], prompt: list[int]) -> dict[str, Any]:
        """Sample, and return the choice and the usage."""
        ends = [] if body.get("ignore_eos") else [self.tokenizer.eos_token_id]
        stops = body.get("stop") or []
        wanted = {
            "max_tokens": body["max_tokens"],
            "temperature": body["temperature"],
            "top_p": body.get("top_p", 1.0),
            "top_k": body.get("top_k", 0),
            "min_p": body.get("min_p", 0.0),
            "stop_token_ids": [*body.get("stop_token_ids", ()), *ends],
            "stop": stops,
            "ignore_eos": True,
            "seed": body.get("seed", 0),
            "logprobs": 0,
            "prompt_logprobs": None,
        }
        with self.lock:
            self.bodies.append(body)
            name = str(len(self.bodies))
        (choice,) = self.generate({"request_id": name, "token_ids": prompt, "sampling_params": wanted})["choices"]
        ids, finish, stop = choice["token_ids"], choice["finish_reason"], choice["stop_reason"]
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if isinstance(stop, str) and not body.get("include_stop_str_in_output"):
            text = text[: text.index(stop)]
        of_vllm = {"token_ids": ids, "stop_reason": stop} if body.get("return_token_ids") else {}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **of_vllm}], "usage": usage}


class EndpointHandler(Handler):
    """Routes under `/v1`."""

    engine: Endpoint

    def _route(self, path: str, body: Any, query: Mapping[str, str]) -> tuple[int, Any]:
        endpoint, encode = self.engine, self.engine.tokenizer.encode
        if unknown := sorted(set(body) - endpoint.known):
            return 400, {"error": {"message": f"Unrecognized request argument supplied: {unknown[0]}"}}
        if path == "/v1/completions":
            prompt = body["prompt"]
            return 200, endpoint.complete(body, encode(prompt) if isinstance(prompt, str) else prompt)
        if path == "/v1/chat/completions":
            rendered = endpoint.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            answer = endpoint.complete(body, encode(rendered, add_special_tokens=False))
            choice = answer["choices"][0]
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
            return 200, answer
        return 404, {"detail": "Not Found"}

    def _misbehave(self, wrong: str, body: Any) -> None:
        kind, _, wait = wrong.partition(" ")
        if kind == "429":
            self.send_response(429)
            self.send_header("Retry-After", wait)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif kind == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif kind == "notjson":
            self._send(200, "of course!", kind="text/plain")
        elif kind == "textonly":
            self._send(200, {"choices": [{"text": "ab", "finish_reason": "length"}]})
        elif kind == "othertokenizer":
            self._send(200, {"choices": [{"text": "ab", "finish_reason": "length", "token_ids": [1, 2, 3]}]})
        else:
            super()._misbehave(wrong, body)


@contextmanager
def serve_endpoint(folder: Path, *, like_vllm: bool = False) -> Iterator[tuple[str, Endpoint]]:
    """Serve the model of a folder, and yield the base URL and the endpoint."""
    endpoint = Endpoint(folder, PLAIN | OF_VLLM if like_vllm else PLAIN)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHandler", (EndpointHandler,), {"engine": endpoint}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
