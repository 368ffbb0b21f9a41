"""The checks of the compiled kernels are themselves tested: each fault of kernel_mutants.toml, put into the sources, must be noticed.

A fault counts as noticed when check_kernels.py, run on the module that is built with it, names something wrong, or when a sanitizer stops
the process. The sources as they are pass the same checks.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from skyrl_engine_collators import kernels

pytestmark = [
    pytest.mark.proof,
    pytest.mark.of_sources(
        "plugins/collators/native",
        "plugins/collators/src",
        "plugins/collators/tests",
        "plugins/collators/hatch_build.py",
    ),
]

PROJECT = Path(__file__).parent.parent
MUTANTS = tomllib.loads((PROJECT / "tests" / "kernel_mutants.toml").read_text())["mutant"]
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g", "-w")


class Compiler:
    """Builds modules out of the sources with one of them changed; the others are compiled once."""

    def __init__(self, folder, library):
        spec = importlib.util.spec_from_file_location("collators_hatch_build_of_mutants", PROJECT / "hatch_build.py")
        self.build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.build)
        self.folder, self.library = folder, library
        self.objects = {
            path.name: self.compile_source(path, folder / f"{path.stem}.o") for path in sorted(self.build.SOURCES.glob("*.c"))
        }

    def compile_source(self, source, target):
        headers = [f"-I{self.build.SOURCES}", *(f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude"))]
        run(["gcc", *self.build.FLAGS, *SANITIZED, *headers, "-c", str(source), "-o", str(target)])
        return target

    def module(self, changed=None, text=""):
        """The extension module, with `text` as the source `changed` if that is given."""
        objects = dict(self.objects)
        if changed is not None:
            (self.folder / changed).write_text(text)
            objects[changed] = self.compile_source(self.folder / changed, self.folder / "changed.o")
        target = self.folder / self.build.NAME
        run(["gcc", *SANITIZED, "-shared", *map(str, objects.values()), "-o", str(target)])
        return target

    def check(self, module):
        options = {"LD_PRELOAD": self.library, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
        script = [sys.executable, str(PROJECT / "tests" / "check_kernels.py"), str(module), str(kernels.INTERFACE)]
        return subprocess.run(
            script, env={**os.environ, **options}, capture_output=True, text=True, check=False, errors="replace", timeout=120
        )


def run(command):
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{command[0]} does not compile this:\n{process.stderr}"
    return process.stdout.strip()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    library = run(["gcc", "-print-file-name=libasan.so"]) if shutil.which("gcc") else ""
    if not Path(library).is_absolute():
        pytest.skip("no gcc with libasan on this machine")
    return Compiler(tmp_path_factory.mktemp("mutants"), library)


def test_the_sources_as_they_are_pass(compiler):
    process = compiler.check(compiler.module())
    assert process.returncode == 0, process.stdout + process.stderr[-4000:]


def test_there_are_at_least_forty_in_every_source_and_no_two_alike(compiler):
    assert len({(mutant["file"], mutant["original"], mutant["replacement"]) for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert {mutant["file"] for mutant in MUTANTS} == compiler.objects.keys()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant['file']}: {mutant['breaks']}")
def test_each_fault_is_noticed(compiler, mutant):
    source = (compiler.build.SOURCES / mutant["file"]).read_text()
    count = source.count(mutant["original"])
    assert count == 1, (
        f"native/{mutant['file']} holds the text of this mutant {count} times instead of once; bring kernel_mutants.toml up to date:\n"
        f"{mutant['original']}"
    )
    process = compiler.check(compiler.module(mutant["file"], source.replace(mutant["original"], mutant["replacement"])))
    assert process.returncode != 0, f"nothing notices that {mutant['breaks']}"
