"""`skyrl-engine plugins verify`: run the conformance kit against one plugin and show its verdict."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl_engine.cli.command import EngineCommand, suggest_or_list
from skyrl_engine.cli.key_values import options_argument
from skyrl_engine.cli.read_keys import NO_KEYS
from skyrl_engine.cli.terminal import echo_json
from skyrl_engine.errors import PluginAmbiguousError, PluginBrokenError, PluginError, PluginNotFoundError

if TYPE_CHECKING:
    from skyrl_engine.config.schema import GeneratorPlacement
    from skyrl_engine.registry.record import PluginRecord
    from skyrl_engine.registry.resolve import Registry
    from skyrl_engine.testing.promise import Verdict


@click.command(cls=EngineCommand, reads=NO_KEYS)
@click.argument("plugin", metavar="PLUGIN")
@options_argument
@click.option(
    "--examples", type=click.IntRange(min=1), metavar="N", help="Cases per promise, instead of as many as the kit thinks enough."
)
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="LAYOUT",
    help="Parallel sizes to try a backend on, such as tp2xpp2; several times for several. Without it: one rank, and dp2.",
)
@click.option(
    "--placement",
    type=click.Choice(["auto", "rank", "process"]),
    default="auto",
    help="Place to try a generator in, as generator.placement of a run; auto: where its description says.",
)
@click.option("--all", "every", is_flag=True, help="List the promises that are kept, or not claimed, too.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def verify(
    plugin: str,
    overrides: tuple[str, ...],
    examples: int | None,
    layouts: tuple[str, ...],
    placement: "GeneratorPlacement",
    *,
    every: bool,
    as_json: bool,
) -> int:
    """Hold a plugin to the contract of its kind, and show the smallest case that breaks a promise.

    PLUGIN is KIND:NAME, DISTRIBUTION:NAME or ./file.py:name; for a name in a file that is a plugin of several kinds, KIND:./file.py:name.
    The exit code is 3 where a promise is broken.
    """
    from skyrl_engine.cli.plugin_options import parse_options, select_plugin
    from skyrl_engine.registry.resolve import Registry
    from skyrl_engine.testing.kit import promises_of
    from skyrl_engine.testing.kit import verify as held

    record = find_record(Registry.discover(), plugin)
    promises_of(record.kind)
    _check_layouts(record.kind, layouts)
    if placement != "auto" and record.kind != "generator":
        raise click.UsageError(f"--placement is for generators, and this is a {record.kind}.")
    options = parse_options(overrides)
    selected = select_plugin(record, options)
    verdict = held(selected, examples=examples, layouts=layouts, placement=placement, given=options)
    if as_json:
        echo_json(_facts(record, selected.table, verdict))
    else:
        from skyrl_engine.cli.render import show_verdict

        show_verdict(str(record), selected.table, verdict, every=every)
    return 0 if verdict.kept else PluginError.exit_code


def _check_layouts(kind: str, layouts: tuple[str, ...]) -> None:
    from skyrl_engine.proof.layouts import ParallelSizes

    if layouts and kind != "backend":
        raise click.UsageError(f"--layout is for backends, and this is a {kind}.")
    for layout in layouts:
        try:
            ParallelSizes.parse(layout)
        except ValueError as error:
            raise click.UsageError(f"--layout {error}.") from error


def find_record(registry: "Registry", text: str) -> "PluginRecord":
    """Return the plugin that the text names; its kind is inferred where the text does not begin with one."""
    from skyrl_engine.registry.kinds import KINDS
    from skyrl_engine.registry.plugin_ref import parse

    head, colon, rest = text.partition(":")
    if colon and head in KINDS:
        if not rest:
            raise click.UsageError(f"{text!r} is not of the form KIND:REFERENCE, such as loss:cross_entropy.")
        return registry.resolve(head, rest, base=Path.cwd())
    reference = parse(text)
    if reference.path is not None:
        return registry.resolve(_kind_in_file(registry, text), text, base=Path.cwd())
    matching = [
        record
        for record in registry.records()
        if record.name == reference.name and reference.distribution in (None, record.distribution)
    ]
    kinds = sorted({record.kind for record in matching})
    if len(kinds) > 1:
        raise PluginAmbiguousError(
            f"{text!r} is {' and '.join(f'a {kind}' for kind in kinds)}",
            remedy=f"Write {kinds[0]}:{text}, or another kind before it",
        )
    if not kinds:
        raise PluginNotFoundError(
            f"nothing installed offers {text!r}",
            remedy=suggest_or_list(text, sorted({record.name for record in registry.records()}), "plugins"),
        )
    return registry.resolve(kinds[0], text)


def _kind_in_file(registry: "Registry", text: str) -> str:
    """Return the kind of a local file's plugin, by the factory hook that it implements."""
    from skyrl_engine.registry.loader import list_implemented_kinds

    try:
        record = registry.resolve("loss", text, base=Path.cwd())  # of any kind: the file says which
    except PluginNotFoundError as error:
        raise PluginNotFoundError(error.cause.replace("the local loss", "the local plugin"), remedy=error.remedy) from error
    kinds = list_implemented_kinds(record)
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise PluginAmbiguousError(
            f"{text} makes {' and '.join(kinds)}", remedy=f"Write {kinds[0]}:{text}, or another of these kinds"
        )
    raise PluginBrokenError(
        f"{text} implements no factory of a plugin",
        remedy="Mark the function with skyrl_engine.loss, correction, reducer, advantage, group_filter or reward",
    )


def _facts(record: "PluginRecord", options: Any, verdict: "Verdict") -> dict[str, Any]:
    return {
        "kind": record.kind,
        "name": record.name,
        "reference": record.reference,
        "version": record.version,
        "sha256": record.sha256,
        "options": dict(options),
        "kept": verdict.kept,
        "promises": [
            {
                "promise": finding.promise,
                "sentence": finding.sentence,
                "status": finding.status,
                "cause": finding.cause,
                "remedy": finding.remedy,
                "factor": finding.factor,
                "counterexample": list(finding.counterexample),
            }
            for finding in verdict.findings
        ],
    }
