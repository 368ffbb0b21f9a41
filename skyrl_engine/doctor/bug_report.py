"""One Markdown file with what somebody else needs to understand a failure: findings, versions, settings, and what a run said last."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from skyrl_engine.doctor.finding import DoctorFinding
from skyrl_engine.registry.discovery import ENGINE, normalise
from skyrl_engine.report.run_facts import RunFacts
from skyrl_engine.run.durable import write_durably
from skyrl_engine.run.environment import describe_environment
from skyrl_engine.tracking.flat_config import flatten_config, hide_secrets
from skyrl_engine.visible import visible

_VARIABLES = ("CUDA_", "GLOO_", "HF_", "NCCL_", "OMP_", "PYTORCH_", "RAY_", "SKYRL_ENGINE_", "TORCH_", "TRANSFORMERS_", "VLLM_")
"""Beginnings of names of environment variables that change what the engine and its libraries do."""
_LOG_BYTES, _LOG_LINES = 100_000, 200


def write_bug_report(findings: Sequence[DoctorFinding], path: Path, run: RunFacts | None = None) -> None:
    """Write the file. It holds no text, no token and no path of the home folder, and secrets are hidden as from trackers."""
    text = "\n".join(_lines(findings, run))
    write_durably(path, visible(_hide_home(hide_secrets(text))).encode())


def _lines(findings: Sequence[DoctorFinding], run: RunFacts | None) -> Iterator[str]:
    yield f"# skyrl-engine {metadata.version(ENGINE)}: an examination"
    yield "\nRead it before you pass it on: secrets are hidden where they are called so, and the log is as the run wrote it.\n"
    yield "| topic | state | found | remedy |\n|---|---|---|---|"
    yield from (_row(finding.topic, finding.state, finding.found, finding.remedy or "") for finding in findings)
    yield from _block("Machine", json.dumps(describe_environment(), indent=1), "json")
    yield from _block("Environment variables", "\n".join(_list_variables()))
    yield from _block("Packages", "\n".join(_list_packages()))
    if run is not None:
        yield from _describe_run(run)


def _describe_run(run: RunFacts) -> Iterator[str]:
    manifest = run.manifest
    facts = {
        "state": run.describe_state(),
        **{key: manifest.get(key) for key in ("engine", "trainer", "world", "environment", "sessions")},
    }
    yield from _block(f"Run {run.name}", json.dumps(facts, indent=1, default=str), "json")
    config = flatten_config(_as_mapping(manifest.get("config")))
    yield from _block("Its configuration", "\n".join(f"{key} = {json.dumps(value)}" for key, value in config.items()))
    plugins = _as_mapping(manifest.get("plugins"))
    yield from _block("Its plugins", "\n".join(f"{place}: {_name_plugin(plugin)}" for place, plugin in plugins.items()))
    log = run.directory.path / "run.log"
    if log.is_file():
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            said = file.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        yield from _block("The end of its log", "\n".join(said))


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _name_plugin(plugin: Any) -> str:
    facts = _as_mapping(plugin)
    return " ".join(str(facts.get(key)) for key in ("name", "distribution", "version", "sha256"))


def _list_variables() -> list[str]:
    """Return settings of the engine and of its libraries; the value of one that is called like a secret is hidden with all others."""
    return [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)]


def _list_packages() -> list[str]:
    named = {normalise(each.metadata["Name"] or ""): each.version for each in metadata.distributions()}
    return [f"{name}=={version}" for name, version in sorted(named.items()) if name]


def _row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def _block(title: str, text: str, language: str = "text") -> Iterator[str]:
    yield f"\n## {title}\n\n````{language}\n{text.replace('````', '```` ')}\n````"


def _hide_home(text: str) -> str:
    home = str(Path.home())
    return text if home == "/" else text.replace(home, "~")
