"""Install a wheel into a virtual environment of its own, and hold each of its plugins to the promises of its kind there."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final, Literal

import attrs
from attrs import field, frozen

from skyrl_engine import __version__
from skyrl_engine.catalogue.pip import pip_install, plain_environment
from skyrl_engine.catalogue.plugin_index import WITHOUT_PROMISES, IndexedPlugin, IndexedWheel
from skyrl_engine.catalogue.wheel_facts import WheelFacts, find_misfit
from skyrl_engine.errors import ConfigError, PluginError
from skyrl_engine.registry.compat import RUNTIME_EXTRA
from skyrl_engine.registry.discovery import ENGINE
from skyrl_engine.scratch import scratch_folder
from skyrl_engine.visible import visible_line

TIME_LIMIT: Final = 1800.0
"""Seconds for the promises of one plugin."""
_LONGEST_REASON: Final = 400
_LARGEST_OUTPUT: Final = 2**24
"""Bytes that are read of what a verification prints."""
_GRACE: Final = 5.0
"""Seconds between asking a process to end and ending it."""

Tell = Callable[[str], None]

_UNMET: Final = """
import sys
from importlib.metadata import distribution
from skyrl_engine.registry.compat import list_unmet
print(*(clause for extra in ("", *sys.argv[2:]) for clause in list_unmet(distribution(sys.argv[1]), extra)), sep="\\n")
"""


@frozen
class TrialSettings:
    """The settings of trials.

    `options` are key=value by "kind:name", `extras` names of extras by distribution, and `folder` is where relative paths in options begin.
    `engine` is a wheel of the engine to try them with, None for the engine that runs. In `wheels`, a folder, pip finds what wheels require.
    """

    wheels: Path
    engine: Path | None = None
    options: Mapping[str, Sequence[str]] = field(factory=dict)
    extras: Mapping[str, Sequence[str]] = field(factory=dict)
    folder: Path | None = None
    time_limit: float = TIME_LIMIT


def describe_untried(facts: WheelFacts, settings: TrialSettings) -> IndexedWheel:
    """Return the entry of a wheel of which nothing is checked yet. Raises ValueError for metadata that no index can hold."""
    return IndexedWheel(
        version=facts.version,
        file=facts.file,
        sha256=facts.sha256,
        size=facts.size,
        engine=engine_version(settings),
        python=platform.python_version(),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        plugins=tuple(IndexedPlugin(kind, name, "unchecked") for kind, name in facts.plugins),
        requires_engine=facts.requires_engine,
        requires_python=facts.requires_python,
        summary=facts.summary,
        license=facts.license,
        homepage=facts.homepage,
    )


def try_wheel(wheel: Path, facts: WheelFacts, settings: TrialSettings, tell: Tell) -> IndexedWheel:
    """Install and verify one wheel; whatever goes wrong is part of what is returned. `tell` takes a line for every plugin."""
    untried = describe_untried(facts, settings)
    if (misfit := find_misfit(untried, untried.engine)) is not None:
        tell(f"not tried: it {misfit}")
        return attrs.evolve(untried, plugins=tuple(attrs.evolve(plugin, reason=f"it {misfit}") for plugin in untried.plugins))
    with scratch_folder("trial") as folder:
        python = make_environment(folder / "environment")
        if (problem := _install(wheel, facts, settings, python)) is not None:
            tell(f"not installed{_clause(problem)}")
            return attrs.evolve(untried, problem=problem)
        unmet = _install_extras(wheel, facts, settings, python)
        (folder / "work").mkdir()
        checked = []
        for plugin in untried.plugins:
            started = time.monotonic()
            checked.append(_check(facts, plugin.kind, plugin.name, settings, python, folder / "work", unmet))
            seconds = time.monotonic() - started
            tell(f"{plugin.reference} {checked[-1].status}, {seconds:.0f} s{_clause(checked[-1].reason)}")
    return attrs.evolve(untried, plugins=tuple(checked))


def make_environment(folder: Path) -> Path:
    """Make a virtual environment without pip, which sees what is installed here after its own packages; return its Python."""
    venv.create(folder, symlinks=os.name != "nt", with_pip=False)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    (own,) = (folder / "Lib" / "site-packages",) if os.name == "nt" else folder.glob("lib/python*/site-packages")
    here = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages") and Path(entry).is_dir()]
    # a folder added by `addsitedir` brings the editable installations in it, too
    lines = "".join(f"import site; site.addsitedir({entry!r})\n" for entry in here)
    (own / "what-is-installed-here.pth").write_text(lines, encoding="utf-8")
    return python


def _install(wheel: Path, facts: WheelFacts, settings: TrialSettings, python: Path) -> str | None:
    """Install the engine's wheel, where there is one, and this wheel with what it requires; return why that fails."""
    files = [file for file in (settings.engine, None if facts.is_engine and settings.engine else wheel) if file is not None]
    if said := pip_install("--ignore-installed", "--no-deps", "--no-index", *files, into=python):
        return _shorten(f"it cannot be installed: {said[-1]}")
    if not _list_unmet(python, facts.name):
        return None
    if said := pip_install("--find-links", settings.wheels, wheel, f"{ENGINE}=={engine_version(settings)}", into=python):
        return _shorten(f"what it requires cannot be installed: {' '.join(said)}")
    return None


def _install_extras(wheel: Path, facts: WheelFacts, settings: TrialSettings, python: Path) -> str | None:
    """Install the extra `runtime` and those that are asked for; return why that fails, None where it does not."""
    extras = [*([RUNTIME_EXTRA] if RUNTIME_EXTRA in facts.extras else []), *settings.extras.get(facts.name, ())]
    if facts.is_engine or not extras or not _list_unmet(python, facts.name, *extras):
        return None
    said = pip_install("--find-links", settings.wheels, f"{facts.name}[{','.join(extras)}] @ {wheel.as_uri()}", into=python)
    return _shorten(f"its extras {', '.join(extras)} cannot be installed: {' '.join(said)}") if said else None


def _list_unmet(python: Path, distribution: str, *extras: str) -> str:
    """Return what a distribution requires in an environment and does not find there, as text; empty where it finds everything."""
    asked = subprocess.run(  # noqa: S603 - the Python of the environment
        [str(python), "-P", "-c", _UNMET, distribution, *extras],
        capture_output=True,
        text=True,
        check=False,
        env=plain_environment(),
    )
    # where that cannot be asked, pip finds out
    return asked.stdout.strip() if asked.returncode == 0 else "unknown"


def engine_version(settings: TrialSettings) -> str:
    """Return the version of the engine that wheels are tried with."""
    return __version__ if settings.engine is None else settings.engine.name.split("-")[1]


def _check(
    facts: WheelFacts, kind: str, name: str, settings: TrialSettings, python: Path, folder: Path, unmet: str | None
) -> IndexedPlugin:
    """Verify one plugin in a process of its own."""
    if kind in WITHOUT_PROMISES:
        return IndexedPlugin(kind, name, "unchecked", reason=f"the kit has no promises for a {kind}")
    if unmet is not None:
        return IndexedPlugin(kind, name, "unchecked", reason=unmet)
    options = tuple(settings.options.get(f"{kind}:{name}", ()))
    command = [str(python), "-P", "-m", "skyrl_engine", "plugins", "verify", f"{kind}:{facts.name}:{name}", *options, "--json"]
    with (folder / "out").open("w+b") as out, (folder / "err").open("w+b") as err:
        code = _run(command, settings.folder or folder, out, err, settings.time_limit)
        printed, last = _read(out), _last_line(_read(err))
    if code is None:
        return IndexedPlugin(kind, name, "broken", reason=f"it took longer than {settings.time_limit:g} seconds", options=options)
    found = _read_verdict(printed, kind, name, options)
    if found is not None and code == (0 if found.status == "kept" else PluginError.exit_code):
        return found
    reason = last or f"its verification ended with exit code {code} and said nothing"
    status: Literal["unchecked", "broken"] = "unchecked" if code == ConfigError.exit_code else "broken"
    return IndexedPlugin(kind, name, status, reason=_shorten(reason), options=options)


def _run(command: list[str], folder: Path, out: IO[bytes], err: IO[bytes], seconds: float) -> int | None:
    """Run a command with all processes that it starts; return its exit code, None where it took longer and was ended."""
    variables = {**plain_environment(), "HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
    process = subprocess.Popen(  # noqa: S603 - the engine of the environment
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a process and of those that it started: asked first, so that shared memory and ranks are cleared away."""
    for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_LARGEST_OUTPUT).decode("utf-8", errors="replace")


def _read_verdict(text: str, kind: str, name: str, options: tuple[str, ...]) -> IndexedPlugin | None:
    """Return what the object of `--json` at the end of a text says, after whatever a plugin printed; None where none is about this plugin."""
    start = 0 if text.startswith("{") else text.rfind("\n{") + 1
    try:
        verdict = json.loads(text[start:])
        if (verdict["kind"], verdict["name"]) != (kind, name):
            return None
        findings = {
            status: [each for each in verdict["promises"] if each["status"] == status] for status in ("kept", "broken", "undecided")
        }
        kept = verdict["kept"] is True
        broken = [] if kept else findings["broken"] or findings["undecided"]
        return IndexedPlugin(
            kind,
            name,
            "kept" if kept else "broken",
            kept=len(findings["kept"]),
            broken=tuple(str(each["promise"]) for each in broken),
            reason=_shorten(f"{broken[0]['promise']}: {broken[0]['cause'] or broken[0]['sentence']}") if broken else "",
            options=options,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else ""


def _shorten(text: str) -> str:
    line = visible_line(" ".join(text.split()))
    return line if len(line) <= _LONGEST_REASON else f"{line[: _LONGEST_REASON - 1]}…"


def _clause(reason: str) -> str:
    return f": {reason}" if reason else ""
