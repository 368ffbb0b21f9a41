"""Remote generators with one fault each, made from a right one: a client here, and `hf` in a thread of its own for the server.

Weights come as a folder, which the server reads. A fault is what a client, a server or what lies between them was seen to do.
"""

import threading
from queue import Empty, SimpleQueue

import numpy as np
from attrs import evolve
from safetensors.torch import load_file

from skyrl_engine.contracts import Completion, GeneratorDescription, VersionSpans
from skyrl_engine.modeling.sampler_model import fill
from skyrl_engine_generators.generator import HfGenerator
from skyrl_engine_generators.options import HfOptions


class Tensors:
    """Tensors by name, as `hf` takes them."""

    forms = frozenset({"tensors"})

    def __init__(self, held):
        self.held = held

    def tensors(self):
        return iter(self.held.items())


def read_files(files):
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


class Remote:
    """Right: the client hands requests to the server and takes its answers from a queue."""

    capabilities = ("logprobs", "seeded", "abort", "stop_strings", "filters", "update_while_generating", "prefix_reuse")
    scores = ("prompt_logprobs", "top_logprobs", "top_prompt_logprobs")
    description = GeneratorDescription(frozenset({*capabilities, *scores}), ("directory",), "remote", 8)

    def __init__(self):
        self.server, self.lock, self.answers = HfGenerator(HfOptions(slots=8)), threading.Lock(), SimpleQueue()
        self.under_way, self.ended = set(), threading.Event()
        self.busy = threading.Event()

    def start(self, start):
        self.held = self.read(start.weights.directory())
        self.version = start.version
        self.server.start(evolve(start, weights=Tensors(self.held)))
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        """Let the server sample, a step at a time, so that calls come between."""
        while self.busy.wait() and not self.ended.is_set():
            with self.lock:
                for completion in self.server.poll(0.0):
                    self.under_way.discard(completion.request_id)
                    self.answers.put(self.answer(completion))
                if not self.under_way:
                    self.busy.clear()
            # others wait for the lock
            threading.Event().wait(0.0005)

    def answer(self, completion):
        return completion

    def submit(self, requests):
        with self.lock:
            self.server.submit(requests)
            self.under_way |= {request.request_id for request in requests}
            self.busy.set()

    def poll(self, timeout):
        completions = []
        try:
            completions.append(self.answers.get(timeout=timeout) if timeout > 0 else self.answers.get_nowait())
            while True:
                completions.append(self.answers.get_nowait())
        except Empty:
            return completions

    def abort(self, request_ids=None):
        with self.lock:
            self.server.abort(request_ids)

    def update(self, weights, version, target="policy"):
        tensors = self.read(weights.directory())
        with self.lock:
            self.take(tensors, version, target)
            if target == "policy":
                self.version = version

    def read(self, folder):
        return read_files(sorted(folder.glob("*.safetensors")))

    def take(self, tensors, version, target):
        """Give the server new weights."""
        self.server.update(Tensors(tensors), version, target)

    def release(self, target):
        with self.lock:
            self.server.release(target)

    def end_sessions(self, sessions):
        with self.lock:
            self.server.end_sessions(sessions)

    def close(self):
        self.ended.set()
        self.busy.set()
        self.thread.join()
        self.server.close()


class AnswersTwice(Remote):
    """Answers for the server at once when a request is aborted, and hands on what the server says of it later."""

    def abort(self, request_ids=None):
        with self.lock:
            chosen = self.under_way if request_ids is None else self.under_way & set(request_ids)
            for number in chosen:
                none = VersionSpans(np.array([], dtype=np.int32), np.array([], dtype=np.int64))
                self.answers.put(Completion(number, np.array([], np.int32), np.array([], np.float32), none, "abort"))


class LosesRequestsAtAnUpdate(Remote):
    """The server starts again with new weights, and knows nothing of what was under way."""

    def take(self, tensors, version, target):
        self.server.abort()
        for completion in self.server.poll(0.0):
            self.under_way.discard(completion.request_id)
        super().take(tensors, version, target)


class TellsTheClientsVersion(Remote):
    """The client writes down the version that it gave last, whatever the server had sampled before it came."""

    def answer(self, completion):
        count = min(1, len(completion.token_ids))
        spans = VersionSpans(np.zeros(count, dtype=np.int32), np.full(count, self.version, dtype=np.int64))
        return evolve(completion, versions=spans)


class CountsAnUpdateBeforeItArrived(Remote):
    """Says that the server has new weights when it was told of them, and one update late it has."""

    late = None

    def take(self, tensors, version, target):
        self.late, tensors = tensors, self.late or self.held
        super().take(tensors, version, target)


class ReadsOneFile(Remote):
    """Reads the first file of an update, and keeps the rest."""

    def update(self, weights, version, target="policy"):
        self.held |= read_files(sorted(weights.directory().glob("*.safetensors"))[:1])
        with self.lock:
            self.take(self.held, version, target)


class TakesWhatComes(Remote):
    """Keeps its own where a weight did not come, and says that all is well."""

    def take(self, tensors, version, target):
        self.held |= tensors
        super().take(self.held, version, target)


class TakesAnotherModel(Remote):
    """Leaves out what has another shape, as loading does that ignores them."""

    def take(self, tensors, version, target):
        fits = {name: tensor for name, tensor in tensors.items() if name not in self.held or self.held[name].shape == tensor.shape}
        self.held |= {name: fits.get(name, held) for name, held in self.held.items() if name in tensors}
        super().take({name: fits.get(name, self.held.get(name)) for name in tensors}, version, target)


class KeepsRowsOfOldWeights(Remote):
    """New weights reach the model, and what its rows had read with the old ones stays."""

    def take(self, tensors, version, target):
        held = self.server._sets.get(target)
        if held is None:
            super().take(tensors, version, target)
            return
        fill(held.model, tensors.items(), "the model")
        held.loop.version = version
