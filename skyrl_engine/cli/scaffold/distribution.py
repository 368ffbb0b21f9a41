"""Write a distribution: every text of templates/ with the names filled in, first aside and then in its place."""

import shlex
import shutil
import tempfile
from collections.abc import Mapping
from importlib import metadata
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from attrs import frozen
from packaging.version import Version

from skyrl_engine import UnsupportedError, __version__
from skyrl_engine.cli.scaffold.examples import Scaffold, scaffold_of
from skyrl_engine.cli.scaffold.names import Names
from skyrl_engine.registry.kinds import KINDS

LICENSES = ("Apache-2.0", "MIT", "BSD-3-Clause")
_ENDING = ".in"
"""Templates are no Python: tools that walk over the engine's files leave them alone."""


@frozen
class Details:
    """The author's choices besides the names."""

    author: str
    license: str


def write_distribution(names: Names, details: Details, target: Path) -> list[Path]:
    """Write the distribution into `target`, which must not exist, and return its files, relative to it.

    Nothing is left behind when something fails. Raises UnsupportedError where `target` exists or cannot be written, or the kind has no
    template.
    """
    scaffold = scaffold_of(KINDS[names.kind])
    if target.exists() or target.is_symlink():
        raise UnsupportedError(f"{target} already exists", remedy="Choose another place with --directory, or remove it")
    texts = _texts(names, details, scaffold)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UnsupportedError(
            f"{target} cannot be written ({error.strerror})", remedy="Choose another place with --directory"
        ) from error
    try:
        for name, text in texts.items():
            file = aside / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        aside.chmod(0o755)  # a temporary directory is its owner's alone
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return [Path(name) for name in texts]


def _texts(names: Names, details: Details, scaffold: Scaffold) -> dict[str, str]:
    """Return the text of every file of the distribution by its path in it."""
    values = _values(names, details, scaffold)
    templates = files("skyrl_engine.cli.scaffold") / "templates"
    texts = {
        Template(place).substitute(values): _fill_template(template, values)
        for folder in ("distribution", names.kind)
        for place, template in _walk(templates / folder)
    }
    usage = texts.pop("usage.md")
    texts["README.md"] = f"{texts['README.md']}\n{usage}"
    texts["LICENSE"] = _license(templates, details, values)
    texts[f"src/{names.package}/py.typed"] = ""
    return dict(sorted(texts.items()))


def _values(names: Names, details: Details, scaffold: Scaffold) -> dict[str, str]:
    version = Version(__version__)
    engines = f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}"
    runtime = "" if scaffold.runtime is None else f'\n[project.optional-dependencies]\nruntime = ["{scaffold.runtime}"]\n'
    tests = [f"skyrl-engine[testing]{engines}", *([] if scaffold.runtime is None else [scaffold.runtime])]
    return {
        "name": names.plugin,
        "title": names.title,
        "kind": names.kind,
        "kind_words": names.kind.replace("_", " "),
        "distribution": names.distribution,
        "package": names.package,
        "engines": engines,
        "description": scaffold.description,
        "use_quoted": shlex.join(Template(word).substitute(name=names.plugin) for word in scaffold.use),
        "runtime": runtime or "\n[project.optional-dependencies]\n",
        "tests": ", ".join(f'"{test}"' for test in tests),
        "author": details.author,
        "author_quoted": details.author.replace("\\", "\\\\").replace('"', '\\"'),
        "license": details.license,
    }


def _walk(folder: Traversable, place: str = "") -> list[tuple[str, Traversable]]:
    entries = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        inside = f"{place}{entry.name}"
        entries += _walk(entry, f"{inside}/") if entry.is_dir() else [(inside.removesuffix(_ENDING), entry)]
    return entries


def _fill_template(template: Traversable, values: Mapping[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(values)


def _license(templates: Traversable, details: Details, values: Mapping[str, str]) -> str:
    if details.license != "Apache-2.0":
        return _fill_template(templates / "licenses" / f"{details.license}{_ENDING}", values)
    text = metadata.distribution("skyrl-engine").read_text("licenses/LICENSE")  # the engine's own
    assert text is not None, "the engine is installed without its license"
    return text
