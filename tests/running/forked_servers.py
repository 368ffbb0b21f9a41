"""Servers as forks of one process that has imported what they need, since that takes six seconds of the processor.

This file as a program stands for such a server: it hands its words, variables, folder and output to the process that listens at
SERVERS_FORKED_AT, and each of the two ends with the other.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ADDRESS = "SERVERS_FORKED_AT"
FORKS_AT = "--forks-at"
"""Word of a server program, before the descriptor of a listening socket: it forks servers for those who connect."""


@contextmanager
def parent_of_servers(program: Path) -> Iterator[None]:
    """Let this file stand for servers of a program, which calls `fork_servers`."""
    with tempfile.TemporaryDirectory(prefix="forks-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        words = [sys.executable, str(program), FORKS_AT, str(listener.fileno())]
        parent = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
        os.environ[ADDRESS] = f"{folder}/socket"
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            parent.communicate()


def stand_for_fork(address: str) -> None:
    """Ask for a fork, and end when it ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        told = {"words": sys.argv[1:], "environment": {**os.environ}, "folder": str(Path.cwd())}
        data = json.dumps(told).encode() + b"\n"
        socket.send_fds(connection, [data[:1]], [1, 2])
        connection.sendall(data[1:])
        connection.recv(1)


def fork_servers(descriptor: int, main: Callable[[list[str]], None]) -> None:
    """Run `main(words)` in a fork for everyone who asks, until standard input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    signal.signal(signal.SIGCHLD, _take_ended)
    with socket.socket(fileno=descriptor) as listener:
        while True:
            connection, _ = listener.accept()
            data, places, _, _ = socket.recv_fds(connection, 1, 2)
            told = json.loads(data + connection.makefile("rb").readline())
            if not os.fork():
                listener.close()
                _be_server(connection, places, told, main)
            connection.close()
            for place in places:
                os.close(place)


def _take_ended(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def _be_server(connection: socket.socket, places: list[int], told: dict[str, Any], main: Callable[[list[str]], None]) -> None:
    def end_with_asker() -> None:
        connection.recv(1)
        os._exit(1)

    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        threading.Thread(target=end_with_asker, daemon=True).start()
        for place, own in zip(places, (1, 2), strict=True):
            os.dup2(place, own)
        os.environ.clear()
        os.environ.update(told["environment"])
        os.chdir(told["folder"])
        main(told["words"])
    finally:
        os._exit(1)


if __name__ == "__main__":
    stand_for_fork(os.environ[ADDRESS])
    sys.exit("the server has ended")
