"""A stranger's work end to end, with nothing of this repository but built wheels. Run with `nox -s outsider`.

1. The engine alone: `--help` and `plugins list` work without torch; each plugin can be added and removed by itself.
2. Engine, plugins and a third party's loss in a clean environment: fine-tuning with `--loss focal`.
3. One first-party plugin upgraded alone, then downgraded: `plugins list --json` and `run.json` follow, nothing else moves.
4. `plugins new` for every kind: what it writes is installed untouched, listed, verified, passes its own tests, and trains.

Everything lives in a temporary folder outside the repository; `--keep` leaves it there. `--every`, as `nox -s nightly` has it, adds and removes
each plugin by pip, verifies the new plugin of each kind, runs the own tests of all new ones with all their cases, and makes a catalogue of all
wheels (`catalogue.py`), in which none is broken.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "running"))

from release import read_projects, set_version  # noqa: E402 from that folder

TORCH = shlex.split(os.environ.get("SKYRL_ENGINE_TORCH", "torch==2.13.0"))
ENGINE = "skyrl-engine"
STRANGER = "acme-focal-loss"
STEPS = 4
UPGRADED = "skyrl-engine-reducers"
NEW = ("loss", "correction", "reducer", "merger", "collator", "observer", "advantage", "environment", "group_filter", "generator")
EVERY = "--every" in sys.argv
VERIFIED = tuple(kind for kind in NEW if kind != "generator") if EVERY else ("loss",)
"""Promises of generators take no examples: their own tests say all that `verify` would."""
TESTED = NEW if EVERY else ("loss", "observer")
"""Kinds whose new plugin's own tests run."""
FEW_CASES = """
from hypothesis import settings

settings.register_profile("few", max_examples=10, deadline=None)
settings.load_profile("few")
"""
"""By day the new plugins' tests take a fifth of the cases."""
KIND_OF = {
    "collator": "skyrl-engine-collators",
    "loss": STRANGER,
    "reducer": UPGRADED,
    "backend": "skyrl-engine-fsdp",
    "merger": "skyrl-engine-mergers",
}

COMMANDS = {"skyrl-engine-tinker": "serve"}
"""Distributions that add a command and no plugin."""

TRAINERS = {"acme-perplexity": "perplexity"}
"""Distributions that add a trainer and no plugin."""

ELSEWHERE = ("skyrl-engine-vllm-server",)
"""Distributions that are plugins of another program."""


class Environment:
    """A virtual environment of its own, whose commands see neither this repository nor the caller's Python settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        scripts = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = str(scripts / "python")
        self.engine = str(scripts / ENGINE)
        run([sys.executable, "-m", "venv", str(folder)], cwd=folder.parent)

    def install(self, *requirements: str) -> None:
        run([self.python, "-m", "pip", "install", "--quiet", "--no-compile", *requirements], cwd=self.folder)

    def remove(self, distribution: str) -> None:
        run([self.python, "-m", "pip", "uninstall", "--quiet", "--yes", distribution], cwd=self.folder)

    def has(self, module: str) -> bool:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([self.python, "-c", code], cwd=self.folder, env=plain_environment(), check=False).returncode == 0

    def resolve(self, *requirements: str) -> set[str]:
        """Return the names of the distributions that pip would install."""
        asked = [self.python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
        report = json.loads(run([*asked, *requirements], cwd=self.folder))
        return {found["metadata"]["name"].lower() for found in report["install"]}

    def plugins(self, beside: Path | None = None) -> dict[str, str]:
        """Versions by distribution, as `plugins list --json` shows them; `beside` is a folder of more packages."""
        listed = json.loads(run([self.engine, "plugins", "list", "--json"], cwd=self.folder, beside=beside))
        return {row["distribution"]: row["version"] for row in listed}


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="outsider-"))
    assert ROOT not in folder.parents, "the clean environment must lie outside the repository"
    started = time.monotonic()
    try:
        wheels = build_wheels(folder / "wheels")
        with ThreadPoolExecutor() as pool:  # each waits for processes of its own
            for part in [pool.submit(engine_alone, folder / "alone", wheels), pool.submit(everything, folder, wheels)]:
                part.result()
        if EVERY:
            from catalogue import make_catalogue

            expect("exit code of plugins index", make_catalogue(folder / "wheels", folder / "catalogue"), wanted=0)
    finally:
        if "--keep" in sys.argv:
            say(f"kept {folder}")
        else:
            shutil.rmtree(folder)
    say(f"all as it should be, in {time.monotonic() - started:.0f} s")
    return 0


def build_wheels(target: Path) -> dict[str, Path]:
    """A wheel of every distribution, by distribution name."""
    projects = [ROOT, *sorted((ROOT / "plugins").iterdir()), *sorted((ROOT / "contrib").iterdir())]
    built = build([project for project in projects if (project / "pyproject.toml").exists()], target)
    wheels = {wheel.name.partition("-")[0].replace("_", "-"): wheel for wheel in built}
    say(f"built {', '.join(wheels)}")
    return wheels


def build(projects: Sequence[Path], target: Path, **variables: str) -> list[Path]:
    """Return the wheels of these projects, folders or source distributions, which one call of pip builds."""
    asked = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
    run([*asked, *map(str, projects)], cwd=ROOT, **variables)
    wheels = sorted(target.glob("*.whl"))
    assert len(wheels) == len(projects), f"{len(projects)} projects made {len(wheels)} wheels"
    return wheels


def engine_alone(folder: Path, wheels: Mapping[str, Path]) -> None:
    """Each plugin is listed beside the engine alone, and none of them wants torch."""
    environment = Environment(folder)
    environment.install(str(wheels[ENGINE]))
    expect("torch in an environment with the engine alone", environment.has("torch"), wanted=False)
    usage = run([environment.engine, "--help"], cwd=folder)
    expect("--help shows the usage", "Usage:" in usage, wanted=True)
    only = {ENGINE: version_of(wheels[ENGINE])}
    expect("plugins of the engine alone", environment.plugins(), wanted=only)
    for name, wheel in wheels.items():
        if name == ENGINE:
            continue
        beside = None
        if EVERY or name in (UPGRADED, *COMMANDS):
            environment.install(str(wheel))
        else:
            # pip takes seconds for each of them; what it does is to unpack a wheel
            beside = folder / "beside" / name
            with ZipFile(wheel) as content:
                content.extractall(beside)
        added = {} if name in (*COMMANDS, *TRAINERS, *ELSEWHERE) else {name: version_of(wheel)}
        expect(f"plugins with {name} beside the engine", environment.plugins(beside), wanted=only | added)
        if command := COMMANDS.get(name):
            usage = run([environment.engine, command, "--help"], cwd=folder)
            expect(f"{command} --help shows the usage", "Usage:" in usage, wanted=True)
        if trainer := TRAINERS.get(name):
            schema = json.loads(run([environment.engine, "config", "schema"], cwd=folder, beside=beside))
            expect(f"the trainers that {name} adds", schema["properties"]["trainer"]["enum"][4:], wanted=[trainer])
        if beside is None:
            environment.remove(name)
            expect(f"plugins without {name}", environment.plugins(), wanted=only)
    needed = environment.resolve(*map(str, wheels.values()))
    expect("torch among what all distributions need", "torch" in needed, wanted=False)
    expect("torch, after every plugin was there once", environment.has("torch"), wanted=False)


def everything(folder: Path, wheels: Mapping[str, Path]) -> None:
    environment = Environment(folder / "all")
    say("installing torch, the engine and all plugins")
    environment.install(*TORCH)
    others = [str(wheel) for name, wheel in wheels.items() if name != ENGINE]
    environment.install(f"{wheels[ENGINE]}[train]", *others)
    versions = {name: version_of(wheel) for name, wheel in wheels.items() if name not in (*COMMANDS, *TRAINERS, *ELSEWHERE)}
    expect("plugins, all from wheels", environment.plugins(), wanted=versions)
    run([environment.python, str(Path(__file__).with_name("tiny_model.py")), str(folder)], cwd=folder)
    (folder / "train.toml").write_text(configuration(folder))

    train(environment, folder, "first", versions)
    newer = build_newer(folder, UPGRADED)
    environment.install("--no-deps", "--no-index", str(newer))
    train(environment, folder, "upgraded", versions | {UPGRADED: version_of(newer)})
    environment.install("--no-deps", "--no-index", str(wheels[UPGRADED]))
    train(environment, folder, "downgraded", versions)

    losses = {name: losses_of(folder / name) for name in ("first", "upgraded", "downgraded")}
    expect("losses before and after, which the versions do not change", losses["upgraded"], wanted=losses["first"])
    expect("losses after the downgrade", losses["downgraded"], wanted=losses["first"])
    new_plugins(environment, folder, versions)


def new_plugins(environment: Environment, folder: Path, versions: Mapping[str, str]) -> None:
    """Every kind that `plugins new` writes, from its folder to a run that uses all of them at once."""
    environment.install("hypothesis", "pytest")
    for kind in NEW:
        run([environment.engine, "plugins", "new", kind, "brand-new"], cwd=folder)
    names = [f"brand-new-{kind.replace('_', '-')}" for kind in NEW]
    projects = [folder / name for name in names]
    environment.install("--no-deps", "--no-index", *map(str, build(projects, folder / "new-wheels")))
    if not EVERY:
        (folder / "conftest.py").write_text(FEW_CASES)
    # One interpreter for all of them; their test files have the same name, which only importlib's way of importing takes.
    tested = [str(folder / f"brand-new-{kind.replace('_', '-')}") for kind in TESTED]
    together = [environment.python, "-m", "pytest", "-q", "--import-mode=importlib", *tested]
    say(f"tests of {', '.join(TESTED)}: {run(together, cwd=folder).strip().splitlines()[-1]}")
    expect(
        "plugins, the new ones among them",
        environment.plugins(),
        wanted={**versions, **dict.fromkeys(names, "0.1.0")},
    )
    for plugin in (f"{kind}:brand_new" for kind in VERIFIED):
        # Their own tests, above, held the new ones to the same promises with more cases.
        command = [environment.engine, "plugins", "verify", plugin, "--examples", "3", "--json"]
        say(f"verified {plugin}: {len(json.loads(run(command, cwd=folder))['promises'])} promises")
    chosen = [f"--{kind}=brand_new" for kind in ("collator", "loss", "reducer", "merger")]
    others = ['loss.corrections=[{ use = "brand_new" }]', 'run.observers=["metrics_jsonl", "brand_new"]']
    directory = folder / "new"
    run([environment.engine, "run", "train.toml", *chosen, *others, f"run.directory={directory}", "--debug"], cwd=folder)
    expect("lines that the new observer wrote", len((directory / "steps.csv").read_text().splitlines()), wanted=STEPS + 1)
    losses_of(directory)
    model, data = str(folder / "model"), str(folder / "train.jsonl")
    options = ["--loss", "brand_new", "--steps", "2", "--output", str(folder / "sft"), f"data.cache={folder / 'cache'}"]
    run([environment.engine, "sft", "--model", model, "--data", data, *options, "--debug"], cwd=folder)
    expect("the model that sft left", (folder / "sft" / "model").is_dir(), wanted=True)
    chosen = [
        "--env",
        "brand_new",
        "--advantage",
        "brand_new",
        "--generator",
        "brand_new",
        'group_filters=[{ use = "brand_new", share = 1.0 }]',
    ]
    sizes = ["--steps", "2", "--groups", "2", "--group-size", "2", "--max-tokens", "96", "rl.max_prompt_tokens=128"]
    options = [*chosen, *sizes, "--output", str(folder / "rl"), "evaluation.at_end=false"]
    run([environment.engine, "rl", "--model", model, *options, "--debug"], cwd=folder)
    expect("the model that rl left", (folder / "rl" / "model").is_dir(), wanted=True)


def configuration(folder: Path) -> str:
    return f"""
[model]
path = {json.dumps(str(folder / "model"))}

[data]
train = {json.dumps(str(folder / "train.jsonl"))}
cache = {json.dumps(str(folder / "cache"))}

[training]
steps = {STEPS}
batch_size = 8
micro_batch_rows = 4

[optimizer]
learning_rate = 0.01
"""


def train(environment: Environment, folder: Path, name: str, versions: Mapping[str, str]) -> None:
    """Fine-tune with the stranger's loss into `folder / name`, and compare both reports of what was used with `versions`."""
    expect(f"plugins listed, {name}", environment.plugins(), wanted=dict(versions))
    directory = folder / name
    run([environment.engine, "run", "train.toml", "--loss", "focal", f"run.directory={directory}", "--debug"], cwd=folder)
    recorded = json.loads((directory / "run.json").read_text())["plugins"]
    used = {kind: (plugin["distribution"], plugin["version"]) for kind, plugin in recorded.items()}
    expect(f"plugins in run.json, {name}", used, wanted={kind: (owner, versions[owner]) for kind, owner in KIND_OF.items()})


def build_newer(folder: Path, distribution: str) -> Path:
    """Build the plugin's next version from a copy of its source."""
    project = read_projects(ROOT)[distribution]
    copy = folder / "newer"
    shutil.copytree(project.folder, copy)
    file = copy / "pyproject.toml"
    file.write_text(set_version(file.read_text(), after(project.version)))
    (wheel,) = build([copy], folder / "newer-wheels")
    return wheel


def after(version: Version) -> Version:
    """Return the patch version that follows."""
    return Version(f"{version.major}.{version.minor}.{version.micro + 1}")


def losses_of(directory: Path) -> list[float]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = [row["metrics"]["loss"] for row in rows if row["kind"] == "step"]
    expect(f"optimizer steps logged in {directory.name}", len(losses), wanted=STEPS)
    return losses


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def plain_environment() -> dict[str, str]:
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    # MLflow's files, to which it logs where there is no server
    of_mlflow = {"MLFLOW_ALLOW_FILE_STORE": "true"}
    return variables | {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"} | of_mlflow


def run(command: Sequence[str], *, cwd: Path, beside: Path | None = None, **variables: str) -> str:
    """Standard output of a command that must succeed; what it said is shown when it does not. `beside` is a folder of more packages."""
    done = attempt(command, cwd=cwd, **({} if beside is None else {"PYTHONPATH": str(beside)}), **variables)
    if done.returncode:
        say(f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}\nended with exit code {done.returncode}")
        raise SystemExit(1)
    return done.stdout


def attempt(command: Sequence[str], *, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail, in an environment without this repository and with these variables."""
    return subprocess.run(command, cwd=cwd, env=plain_environment() | variables, capture_output=True, text=True, check=False)


def expect(what: str, found: object, *, wanted: object) -> None:
    if found != wanted:
        say(f"NOT AS IT SHOULD BE: {what}\n  wanted {wanted}\n  found  {found}")
        raise SystemExit(1)
    say(f"{what}: {found}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
