"""The catalogue of this repository's own plugins, made by `skyrl-engine plugins index`. Run with `nox -s catalogue`.

Wheels of all distributions are built, tried and verified in `.cache/catalogue`, where a second run tries only those that have changed. Then
`docs/reference/catalogue.md` and the folder beside it are written. Further options are those of `plugins index`: `-- --list-only` lists
wheels that have changed as not tried, until somebody has an hour.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from outsider import ROOT, build_wheels, plain_environment

MATERIAL = ROOT / "plugins" / "environments" / "tests" / "material"
DOCS = ROOT / "docs" / "reference"
OPTIONS = """
[options]
"environment:function" = ["data=./sums.jsonl", "eval_fraction=0.3", "reward=./rewards.py:exact"]
"environment:prompts" = ["data=./sums.jsonl", "eval_fraction=0.3"]
"environment:gymnasium" = ["id=./own_guess.py:Guess", "max_turns=12", "size=50", "eval_size=20"]
"environment:reasoning_gym" = ["task=spell_backward"]
"generator:replay" = ["rollouts=recorded"]
"generator:openai" = ["url=http://127.0.0.1:9/v1", "model=m"]
"observer:mlflow" = ["uri=./mlruns"]
"observer:wandb" = ["mode=offline"]

[extras]
skyrl-engine-environments = ["reasoning-gym", "gymnasium"]
skyrl-engine-trackio = ["client"]
"""
"""Options without which plugins cannot be made. vLLM's generator wants servers, so it stays unchecked here; `nox -s vllm` has them."""

FURTHER = "\n[What a badge means](../explanation/what-a-badge-means.md), and [how to install from a catalogue](../how-to/use-a-catalogue.md).\n"


def copy_material(folder: Path) -> None:
    """Make a folder with the files that OPTIONS names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("sums.jsonl", "rewards.py", "own_guess.py"):
        shutil.copy(MATERIAL / name, folder)


def make_catalogue(wheels: Path, folder: Path, *more: str) -> int:
    """Try the wheels of a folder, and write their catalogue into `folder`; return the exit code of `plugins index`, which also gets `more`."""
    copy_material(folder)
    (folder / "options.toml").write_text(OPTIONS)
    command = [sys.executable, "-m", "skyrl_engine", "plugins", "index", str(wheels)]
    options = ["--output", str(folder / "made"), "--options", str(folder / "options.toml")]
    return subprocess.run([*command, *options, *more], env=plain_environment(), check=False).returncode


def main() -> int:
    folder = ROOT / ".cache" / "catalogue"
    shutil.rmtree(folder / "wheels", ignore_errors=True)
    build_wheels(folder / "wheels")
    code = make_catalogue(folder / "wheels", folder, *sys.argv[1:])
    if not (folder / "made" / "catalogue.md").exists():
        return code
    shutil.rmtree(DOCS / "catalogue", ignore_errors=True)
    shutil.copytree(folder / "made" / "catalogue", DOCS / "catalogue")
    (DOCS / "catalogue.md").write_text((folder / "made" / "catalogue.md").read_text() + FURTHER)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
