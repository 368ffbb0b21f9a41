"""Tasks of ranks about loading: importable by name, because ranks are spawned."""

import ctypes
import threading
from pathlib import Path

import torch
from fsdp_tasks import start

M_MMAP_THRESHOLD = -3
"""glibc's number of that setting of malloc."""


def read_anonymous_bytes() -> int:
    """Return the memory of this process that no file backs: pages of the mapped weights, which the system shares and drops, do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def peak_of_loading(directory: str, *, small: str, whole: bool) -> int:
    """Return by how many bytes this rank's memory grew at its highest while a model of bfloat16 files was loaded."""
    from skyrl_engine.modeling import placement

    in_parts = placement.load_without_weights
    # tensors of real sizes go back to the system when they are freed (glibc: those above 32 MiB); these are smaller
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    start(small).close()
    if whole:
        placement.load_without_weights = lambda *_, **__: "the test asks for it"
    before, highest, done = read_anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.005):
            highest = max(highest, read_anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        backend = start(directory)
    finally:
        done.set()
        watcher.join()
        placement.load_without_weights = in_parts
    backend.close()
    return highest - before


def write_deep_model(directory: Path) -> int:
    """Write a model of 24 equal layers, in bfloat16; return the bytes of its weights in float32."""
    import transformers

    from skyrl_engine.modeling.tiny import write_model

    write_model(directory / "float32", "llama", hidden_size=256, intermediate_size=2560, num_hidden_layers=24)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "float32", dtype=torch.bfloat16)
    model.save_pretrained(directory / "model")
    return sum(4 * parameter.numel() for parameter in model.parameters())
