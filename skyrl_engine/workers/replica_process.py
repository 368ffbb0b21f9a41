"""The process of one replica of a generator: `python -m skyrl_engine.workers.replica_process FD`, with a socket to the controller.

It takes calls and answers each of them once, and sends completions as they come. It ends when the controller closes the socket or dies.
An actor of Ray runs the same loop (`ray_replica.py`).
"""

import os
import signal
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, Final

from skyrl_engine.workers.replica_messages import Call, CallEnd, ReplicaStart, Sampled

SLICE_SECONDS: Final = 0.05
"""The longest that a replica samples without looking for a call."""

SIGN_SECONDS: Final = 1.0
"""A replica that samples sends something so often, if only that it is there."""


_process: Final = ExitStack()


def serve(connection: Connection) -> None:
    """Make the generator that the first message names, and serve calls until the controller is gone."""
    start: ReplicaStart = connection.recv()
    try:
        driver = _start(start)
    except Exception as error:  # noqa: BLE001 - every failure must reach the controller with its cause
        connection.send(CallEnd.of_failure(error))
        return
    connection.send(CallEnd())
    sent = monotonic()
    while True:
        if not driver.is_sampling or connection.poll():
            call: Call = connection.recv()
            try:
                getattr(driver, call.method)(*call.arguments)
            except Exception as error:  # noqa: BLE001 - as above
                connection.send(CallEnd.of_failure(error))
            else:
                connection.send(CallEnd())
            if call.method == "close":
                return
            continue
        try:
            completions = driver.poll(SLICE_SECONDS, eager=True)
        except Exception as error:  # noqa: BLE001 - as above
            connection.send(CallEnd.of_failure(error))
            return
        if completions or monotonic() - sent > SIGN_SECONDS:
            connection.send(Sampled(completions))
            sent = monotonic()


def _start(start: ReplicaStart) -> Any:
    from skyrl_engine.config import SelectedPlugin
    from skyrl_engine.modeling.matmul_precision import multiply_in
    from skyrl_engine.workers.generation import GeneratorDriver
    from skyrl_engine.workers.worker import seed_everything

    # for as long as this process lives
    _process.enter_context(multiply_in(start.context.matmul_precision))
    seed_everything(start.context.seed)
    driver = GeneratorDriver(SelectedPlugin.from_lock(start.lock).bind("generator", start.context))
    driver.start(start.facts.make_start(start.model, start.device, start.weights, version=start.version))
    return driver


def serve_until_gone(connection: Connection) -> None:
    """Serve, and end this process when the controller is gone."""
    try:
        serve(connection)
    except (EOFError, ConnectionError, TimeoutError):
        # whatever threads a generator has must not keep the process
        os._exit(0)


def main() -> None:
    # Ctrl-C reaches the whole terminal; the controller decides what becomes of it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve_until_gone(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
