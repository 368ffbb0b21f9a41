"""`skyrl-engine serve`."""

import json
import signal
import sys
from pathlib import Path
from typing import TextIO

import click


@click.command()
@click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; the default takes calls of this machine alone."
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on.")
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="File with the key that clients must send.")
@click.option(
    "--allow-anyone",
    is_flag=True,
    help="Take calls without a key of whoever reaches the address, web pages of its machines among them.",
)
@click.option(
    "--request-log", type=click.File("a", lazy=False), metavar="FILE", help="Write a line of JSON per request; - for the output."
)
def serve(config: Path, *, host: str, port: int, api_key_file: Path | None, allow_anyone: bool, request_log: TextIO | None) -> None:
    """Serve the models of CONFIG to clients of the Tinker API, until SIGTERM or an interrupt; it ends within 5 seconds.

    CONFIG is a TOML file with the table [serve], and the tables that a run has, without a model, a loss and a reducer. Who can call can train,
    sample and read checkpoints. Without a key, programs of this machine can.
    """
    import uvicorn

    from skyrl_engine_tinker.access import is_loopback
    from skyrl_engine_tinker.app import application
    from skyrl_engine_tinker.ending import REQUESTS_SECONDS, EndingServer
    from skyrl_engine_tinker.settings import Settings

    if api_key_file is None and not allow_anyone and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} is reached from other machines, whose users could all call. Give --api-key-file FILE, or --allow-anyone."
        )
    if api_key_file is not None and allow_anyone:
        raise click.UsageError("--allow-anyone asks for no key, and --api-key-file gives one. Leave one of them out.")
    settings = Settings.read(config)
    try:
        key = None if api_key_file is None else api_key_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise click.ClickException(f"{api_key_file} cannot be read: {error.strerror}") from error
    if key == "":
        raise click.ClickException(f"{api_key_file} holds no key")
    # uvicorn ends in order, then raises the signal that it caught once more: the end that was asked for is no failure
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    app = application(settings, key, request_log, anyone=allow_anyone)
    served = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=REQUESTS_SECONDS,
    )
    listening = served.bind_socket()
    # calls wait from here on, so the line below is true when it is read
    listening.listen(served.backlog)
    # names come from a file, and may hold anything
    names = ", ".join(json.dumps(name)[1:-1] for name in settings.serve.models)
    click.echo(f"Serving {names} on http://{host}:{listening.getsockname()[1]}")
    EndingServer(served, app.state.release_polls).run(sockets=[listening])
