"""Pages of a catalogue in Markdown: one of all distributions, and one of each."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from skyrl_engine.catalogue.plugin_index import IndexedDistribution, IndexedPlugin, IndexedWheel, PluginIndex
from skyrl_engine.visible import visible_line

CATALOGUE: Final = "catalogue"
"""Name of the page of all distributions, and of the folder of the others and of badges."""

_MADE_BY: Final = (
    "Made by `skyrl-engine plugins index`. A badge says that exactly this file kept the promises of `plugins verify` on the day that its "
    "page names. It does not say that the code is harmless."
)


def write_catalogue_page(index: PluginIndex) -> str:
    """Return the page of all distributions, with links to `catalogue/NAME.md`."""
    rows = [
        (
            f"[{distribution.name}]({CATALOGUE}/{distribution.name}.md)",
            f"![{_escape(wheel.standing)}]({CATALOGUE}/{distribution.name}.svg)",
            _list_kinds(wheel.plugins),
            _escape(wheel.summary),
        )
        for distribution in index.distributions
        for wheel in (distribution.newest,)
    ]
    return "\n".join(
        ["# Catalogue of plugins", "", _MADE_BY, "", *_table(("distribution", "newest version", "offers", "summary"), rows), ""]
    )


def write_distribution_page(distribution: IndexedDistribution) -> str:
    """Return the page of one distribution: its wheels, and what each of their plugins was found to keep."""
    newest = distribution.newest
    facts = [
        _escape(newest.summary),
        f"Licence: {_escape(newest.license)}" if newest.license else "",
        f"Homepage: <{newest.homepage}>" if newest.homepage else "",
        f"Install it: `skyrl-engine plugins install {distribution.name} --index INDEX`",
    ]
    lines = [f"# {distribution.name}", "", f"![{_escape(newest.standing)}]({distribution.name}.svg)", ""]
    for fact in facts:
        lines += [fact, ""] if fact else []
    for wheel in distribution.wheels:
        lines += [*_describe_wheel(wheel), ""]
    return "\n".join(lines)


def _describe_wheel(wheel: IndexedWheel) -> Iterator[str]:
    yield f"## {_escape(wheel.version)}: {wheel.standing}"
    yield ""
    with_what = f"skyrl-engine {_escape(wheel.engine)} and Python {_escape(wheel.python)}"
    tried = f"Tried on {wheel.date} with {with_what}." if wheel.is_tried else f"Listed on {wheel.date}, and not tried."
    ranges = (("skyrl-engine", wheel.requires_engine), ("Python", wheel.requires_python))
    yield " ".join([tried, *(f"It asks for {what} {_escape(wanted)}." for what, wanted in ranges if wanted)])
    yield ""
    yield f"`{wheel.file}`, {wheel.size:,} bytes, SHA-256 `{wheel.sha256}`"
    if wheel.problem is not None:
        yield ""
        yield f"It could not be tried: {_escape(wheel.problem)}."
    if wheel.plugins:
        yield ""
        yield from _table(("plugin", "", "promises kept", "with", "reason"), [_plugin_row(plugin) for plugin in wheel.plugins])


def _plugin_row(plugin: IndexedPlugin) -> tuple[str, ...]:
    broken = f" Broken: {', '.join(map(_escape, plugin.broken))}." if plugin.broken else ""
    return (
        _escape(plugin.reference),
        plugin.status,
        str(plugin.kept or ""),
        _escape(", ".join(plugin.options)),
        f"{_escape(plugin.reason)}{broken}".strip(),
    )


def _list_kinds(plugins: Iterable[IndexedPlugin]) -> str:
    """Return "loss: focal, ppo; reducer: sum"."""
    by_kind: dict[str, list[str]] = {}
    for plugin in plugins:
        by_kind.setdefault(plugin.kind, []).append(_escape(plugin.name))
    return "; ".join(f"{_escape(kind)}: {', '.join(names)}" for kind, names in by_kind.items())


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def _escape(text: str) -> str:
    """Return a text of a stranger as Markdown that shows it: no markup, no line end, no control character."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|~&$])", r"\\\1", visible_line(text))
