"""`--help` and `plugins list` read metadata and import nothing heavy, and no plugin."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "transformers", "datasets", "pyarrow", "numpy", "cattrs", "rich", "yaml", "skyrl_engine.config")
_PROBE = """
import json, resource, sys
from skyrl_engine.cli.app import main
code = main(sys.argv[1:])
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"code": code, "modules": sorted(sys.modules), "cpu": usage.ru_utime + usage.ru_stime}), file=sys.stderr)
"""


def probe(*arguments: str) -> tuple[str, dict]:
    done = subprocess.run([sys.executable, "-c", _PROBE, *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, json.loads(done.stderr.splitlines()[-1])


def plugin_modules() -> set[str]:
    """Import packages of the plugins that are installed, the engine's own observer apart."""
    records = json.loads(probe("plugins", "list", "--json")[0])
    return {record["target"].partition(":")[0] for record in records}


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list", "--json"], ["--version"], ["plugins", "--help"]])
def test_imports_nothing_heavy_and_no_plugin(arguments):
    _, report = probe(*arguments)
    assert report["code"] == 0
    loaded = set(report["modules"])
    assert not loaded & set(HEAVY)
    modules = plugin_modules()
    assert "skyrl_engine_losses" in {module.partition(".")[0] for module in modules}, (
        "the plugins of this repository are not installed"
    )
    assert not loaded & modules
    assert not {name for name in loaded if name.startswith("skyrl_engine_")}


_AT_EXIT = """
import atexit, gc, sys
from skyrl_engine.cli.app import main
before = gc.get_freeze_count()
main(["--version"])
as_a_library = gc.get_freeze_count() - before
atexit.register(lambda: print(as_a_library, gc.get_freeze_count() > 1000))
sys.argv = ["skyrl-engine", "--version"]
sys.exit(main())
"""


def test_a_command_leaves_its_memory_to_the_system_when_it_ends():
    """The interpreter would look through all objects again before it ends; a caller's own process keeps its collector as it was."""
    done = subprocess.run([sys.executable, "-c", _AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 True"


def test_the_probe_would_see_a_heavy_import():
    _, report = probe("config", "schema")
    assert "numpy" in report["modules"]
