"""Seconds to give a server the weights of a 135M model by gloo, against a bare broadcast of the same bytes between the same two processes.

The tensors are those of a Llama of 30 layers of width 576 (the sizes of SmolLM2-135M) in bfloat16, in which a server takes them. The trainer's
side is that of the generator vllm (`TransferGroup`), the server's side that of skyrl-engine-vllm-server (`receive`), in a process of its own
that loads nothing. What stands beside a transfer in a run, the server's pause, its loading, and the checks of what arrived, is not in it. The
bare broadcast is one call for all bytes at once. Wall time, rounds in turn, the least of each. Run with `nox -s bench`.
"""

import math
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine

from skyrl_engine_vllm.transfer import TransferGroup, free_port
from skyrl_engine_vllm_server.groups import join_group, receive

ROUNDS = 5
BAR = 2.0
HOST, SECONDS = "127.0.0.1", 120.0
LAYERS, HIDDEN, KEYS, FEED_FORWARD, VOCABULARY = 30, 576, 192, 1536, 49152
dist: Any = torch.distributed


def list_shapes() -> list[tuple[int, ...]]:
    """Shapes of all tensors, in the order in which a checkpoint lists them."""
    layer = [
        *((HIDDEN,), (HIDDEN, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, HIDDEN)),
        *((HIDDEN,), (FEED_FORWARD, HIDDEN), (FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD)),
    ]
    return [(VOCABULARY, HIDDEN), *layer * LAYERS, (HIDDEN,)]


def serve(port: int, shapes: Sequence[tuple[int, ...]], end: Connection) -> None:
    """Take all tensors, one at a time and then all bytes at once, round by round."""
    torch.set_num_threads(1)
    group = join_group(HOST, port, 1, 2, SECONDS)
    names, dtypes = [""] * len(shapes), ["bfloat16"] * len(shapes)
    for _ in range(ROUNDS + 1):
        end.recv()
        for _ in receive(group, names, dtypes, shapes, lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype)):
            pass
        end.send(None)
        end.recv()
        broadcast(group, torch.empty(sum(map(math.prod, shapes)), dtype=torch.bfloat16))
        end.send(None)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def main() -> None:
    torch.set_num_threads(1)
    shapes, port = list_shapes(), free_port()
    tensors = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port, shapes, theirs), daemon=True)
    server.start()
    group = TransferGroup(HOST, port, 2, "gloo", SECONDS)

    def transfer() -> None:
        for tensor in tensors:
            group.send(tensor, lambda: False)

    least = {"transfer": math.inf, "bare": math.inf}
    for _ in range(ROUNDS + 1):
        for name, work in (("transfer", transfer), ("bare", lambda: broadcast(group._group, flat))):
            ours.send(None)
            started = time.perf_counter()
            work()
            ours.recv()
            least[name] = min(least[name], time.perf_counter() - started)
    server.join()
    ratio = least["transfer"] / least["bare"]
    print(
        f"{machine()}, torch {torch.__version__}; {len(tensors)} tensors, {flat.nbytes / 1e6:.0f} MB in bfloat16, over the loopback"
    )
    print(
        f"transfer {1e3 * least['transfer']:.0f} ms, bare broadcast {1e3 * least['bare']:.0f} ms: "
        f"{ratio:.2f} times as long {compare_with_bar(ratio, at_most=BAR)}"
    )


if __name__ == "__main__":
    main()
