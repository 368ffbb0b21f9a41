"""The public interface of the engine as text, and what of it a release of the same minor version may not change.

`python tests/running/public_api.py` writes docs/reference/public-api.txt anew; a test says when it is not what the code is.

The text has a block per name of `skyrl_engine` and `skyrl_engine.contracts`, and of the modules of hooks: a line that names it, then an
indented line per member. Fields are in their order, since that is the order of a constructor's arguments, then come functions by name. griffe
reads the sources, so nothing of the engine is imported.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[2]
FILE = "docs/reference/public-api.txt"
ENGINE = "skyrl_engine"
BY_EXPORTS = (ENGINE, f"{ENGINE}.contracts")
"""Modules whose public names are those of `__all__`."""
BY_CONTENT = tuple(f"{ENGINE}.hooks.{module}" for module in ("decorators", "markers", "spec"))
"""Modules whose public names are those that they define, without an underscore."""
CONSTRUCTED = ("define", "frozen", "mutable", "attrs.", "attr.", "dataclass")
"""Beginnings of decorators that make a constructor of a class's fields."""

Blocks = Mapping[str, Sequence[str]]
"""By a name with its module: the line that declares it, then its members' lines."""


def read_public_api(root: Path = ROOT) -> str:
    """Return the text of the public interface that the sources under `root` have."""
    loader = griffe.GriffeLoader(search_paths=[root])
    package = loader.load(ENGINE, try_relative_path=False)  # from `root`, wherever it is called
    assert isinstance(package, griffe.Module)
    lines: list[str] = []
    for module in (*BY_EXPORTS, *BY_CONTENT):
        for name, item in _list_public(package, module):
            lines += _describe(f"{module}.{name}", item)
    return "\n".join(lines) + "\n"


def _list_public(package: griffe.Module, path: str) -> Iterator[tuple[str, griffe.Object]]:
    module = package if path == ENGINE else package[path.removeprefix(f"{ENGINE}.")]
    names = module.exports if path in BY_EXPORTS else [name for name, item in module.members.items() if not item.is_alias]
    for name in sorted(map(str, names or ())):
        item = module.members[name]
        item = item.final_target if isinstance(item, griffe.Alias) else item
        if name == "__version__" or (path not in BY_EXPORTS and name.startswith("_")):
            continue
        yield name, item


def _describe(name: str, item: griffe.Object) -> Iterator[str]:
    if not isinstance(item, griffe.Class):
        yield _declare(item, name)
        return
    decorators = "".join(f"@{_in_a_line(decorator.value)} " for decorator in item.decorators)
    bases = ", ".join(_in_a_line(base) for base in item.bases)
    yield f"{decorators}class {name}({bases})"
    members = [member for member in item.all_members.values() if _is_public(member)]
    fields = [member for member in members if member.is_attribute and "property" not in member.labels]
    others = sorted((member for member in members if member not in fields), key=lambda member: member.name)
    for member in (*fields, *others):
        yield f"    {_declare(member, member.name)}"


def _is_public(member: griffe.Object | griffe.Alias) -> bool:
    return not member.name.startswith("_") or (member.name.startswith("__") and member.is_function)


def _declare(item: griffe.Object | griffe.Alias, name: str) -> str:
    """Return a line for a function, a class or a value."""
    target = item.final_target if isinstance(item, griffe.Alias) else item
    kinds = "".join(f"{label} " for label in ("async", "classmethod", "staticmethod", "property") if label in target.labels)
    if isinstance(target, griffe.Function):
        decorators = "".join(
            f"@{_in_a_line(decorator.value)} " for decorator in target.decorators if "hookspec" in str(decorator.value)
        )
        return f"{decorators}{kinds}def {name}{_in_a_line(target.signature()).removeprefix(target.name)}"
    if isinstance(target, griffe.Attribute):
        annotation = f": {_in_a_line(target.annotation)}" if target.annotation is not None else ""
        of_instances = "instance-attribute" in target.labels and "class-attribute" not in target.labels
        value = "" if target.value is None or kinds or of_instances else f" = {_in_a_line(target.value)}"
        return f"{kinds}{name}{annotation}{value}"
    return f"class {name}"


def _in_a_line(expression: object) -> str:
    return " ".join(str(expression).split())


def parse(text: str) -> Blocks:
    """Return the blocks of such a text."""
    blocks: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            lines.append(line.strip())
        else:
            lines = blocks.setdefault(_find_name(line), [line])
    return blocks


def _find_name(line: str) -> str:
    """Return the dotted name that a block's first line declares."""
    words = line.replace("(", " ").replace(":", " ").split()
    return next(word for word in words if word.startswith(f"{ENGINE}."))


def list_breaking(before: str, after: str) -> list[str]:
    """Say what a plugin or a program written for `before` may miss in `after`; nothing where only something came that nobody must know.

    A name, a member or any part of its line that is gone counts. So does a new member of a protocol, which a plugin's class does not have,
    and a new field that a constructor asks for, or that moves the places of others.
    """
    old, new = parse(before), parse(after)
    reasons = [f"{name} is gone" for name in old if name not in new]
    for name, (head, *members) in old.items():
        if name not in new:
            continue
        new_head, *new_members = new[name]
        if head != new_head:
            reasons.append(f"was {head}, is {new_head}")
        reasons += [f"{name}: `{member}` is gone or changed" for member in members if member not in new_members]
        added = [member for member in new_members if member not in members]
        if "Protocol" in head:
            reasons += [f"{name} is a protocol, and plugins do not have its new `{member}`" for member in added]
        elif any(decorator.lstrip("@").startswith(CONSTRUCTED) for decorator in head.partition(" class ")[0].split()):
            reasons += [
                f"{name}: its constructor asks for the new `{field}`" for field in added if _is_field(field) and " = " not in field
            ]
            kept = [field for field in new_members if _is_field(field) and field in members]
            places = [field for field in new_members if _is_field(field)]
            if "kw_only=True" not in head and places[: len(kept)] != [field for field in members if field in kept]:
                reasons.append(f"{name}: its fields have other places than before")
    return reasons


def _is_field(line: str) -> bool:
    return not line.startswith(("def ", "class", "async ", "static", "property ", "@"))


def main() -> int:
    (ROOT / FILE).write_text(read_public_api(), encoding="utf-8")
    print(f"wrote {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
