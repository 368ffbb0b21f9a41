"""`skyrl-engine prove`: one batch through every cut, on this machine, with real ranks; and with a mistake planted, to see it noticed."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from skyrl_engine.cli.command import EngineCommand, current_settings
from skyrl_engine.cli.json_output import to_finite_json
from skyrl_engine.cli.options import (
    file_argument,
    flags_of,
    load_config,
    overrides_argument,
    plugin_options,
    refuse_unread,
    trust_option,
)
from skyrl_engine.cli.read_keys import ReadKeys
from skyrl_engine.cli.terminal import echo
from skyrl_engine.registry.kinds import AUTO, TABLES

if TYPE_CHECKING:
    from skyrl_engine.config import RawConfig, ResolvedConfig
    from skyrl_engine.proof.plants import Plant
    from skyrl_engine.proof.prover import CaseResult

BROKEN = 1
"""Exit code: the promise does not hold, or a planted mistake went unnoticed."""

READ = ReadKeys(frozenset(("plugins", *TABLES)))
"""Tables of a configuration that are read."""

_DEFAULT_LOSS: Mapping[str, Any] = {
    "use": "ppo",
    "terms": [{"use": "kl", "coef": 0.1}, {"use": "entropy", "coef": 0.01}],
}


@click.command(cls=EngineCommand, reads=READ)
@file_argument(required=False)
@overrides_argument
@plugin_options("sft")
@click.option("--plant", metavar="MISTAKE", help="Plant a mistake and see which rows notice; `list` names them all.")
@click.option(
    "--ranks", type=click.IntRange(min=1), metavar="RANKS", default=2, show_default=True, help="Processes of the last rows, by Ray."
)
@click.option(
    "--family", type=click.Choice(["qwen3", "llama"]), default="qwen3", show_default=True, help="Architecture of the model."
)
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def prove(
    file: Path | None,
    overrides: tuple[str, ...],
    *,
    plant: str | None,
    ranks: int,
    family: str,
    trust_code: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Prove that the gradient does not depend on how a batch is cut.

    16 recorded rollouts go through the chosen loss, reducer and backend in micro-batches of 1, 2 and 8 rows, by token budget, padded, packed
    and with shared prefixes, in order and shuffled, on one rank and on several. Every row compares loss, gradient and per-token outputs with
    their definition: one sample after the other through the plain model in float64. Without a loss it takes ppo with a KL and an entropy
    term. Of CONFIG, only plugins and their options are read.
    """
    from skyrl_engine.cli import render
    from skyrl_engine.proof.cuts import prove_cuts

    if plant == "list":
        _list_plants()
        return 0
    chosen = None if plant is None else _plant(plant)
    raw = load_config(file, overrides, flags_of(options), trust_code=trust_code)
    unread = "Remove it: of a configuration, plugins and their options are read"
    refuse_unread(raw, lambda key: None if READ.has(key) else unread)
    resolved = dict(_by_collator(raw))
    terms = [plugin for plugin in next(iter(resolved.values())).plugins.values() if plugin.coefficient is not None]
    if chosen is not None and chosen.needs_terms and not terms:
        raise click.UsageError(
            f"--plant {plant} changes terms, and the objective has none; leave out --loss, or add [[loss.terms]]."
        )
    rows = []
    for row in prove_cuts(resolved, chosen, ranks, family):
        rows.append(row)
        if not as_json:
            render.show_proof_row(row)
    broken = [row for row in rows if not row.holds and not row.excuse]
    noticed = chosen is None or bool(broken)
    if as_json:
        echo(to_finite_json({"plant": plant, "holds": not broken, "rows": [_facts(row) for row in rows]}))
    elif not current_settings().quiet:
        echo(f"\n{_verdict(rows, broken, plant)}")
    if chosen is not None:
        return 0 if noticed else BROKEN
    return BROKEN if broken else 0


def _plant(name: str) -> "Plant":
    from skyrl_engine.config.wording import format_value
    from skyrl_engine.near_words import did_you_mean
    from skyrl_engine.proof.plants import PLANTS

    if name not in PLANTS:
        meant = did_you_mean(name, PLANTS, show=format_value) or f"Choose one of {', '.join(PLANTS)}"
        raise click.UsageError(f"there is no mistake {name!r}. {meant}")
    return PLANTS[name]


def _list_plants() -> None:
    from skyrl_engine.cli.render import show_facts
    from skyrl_engine.proof.plants import PLANTS

    show_facts({name: plant.meaning for name, plant in PLANTS.items()})


def _by_collator(raw: "RawConfig") -> "Iterator[tuple[str, ResolvedConfig]]":
    """Return the configuration with `padded`, `packed` and `tree`, and with its own collator where that is another one."""
    from skyrl_engine.config import resolve
    from skyrl_engine.proof.cuts import STANDARD

    table = {name: value for name, value in raw.table.items() if name in READ.names - {"collator"}}
    plain = with_default_loss(attrs.evolve(raw, table=table))
    own = raw.table.get("collator", {})
    chosen: Any = own.get("use", AUTO) if isinstance(own, Mapping) else None
    if not isinstance(chosen, str) or (chosen == AUTO and set(own) - {"use"}):
        resolve(raw, need=())  # says what is wrong
    others: dict[str, Any] = {} if chosen == AUTO else {chosen: own}
    for name, collator in {**{name: {"use": name} for name in STANDARD}, **others}.items():
        yield name, resolve(attrs.evolve(plain, table={**plain.table, "collator": collator}), need=())


def with_default_loss(raw: "RawConfig") -> "RawConfig":
    """Return the configuration, with ppo, a KL and an entropy term where it names no loss."""
    loss = raw.table.get("loss", {})
    if not isinstance(loss, Mapping) or "use" in loss:
        return raw
    return attrs.evolve(raw, table={**raw.table, "loss": {**_DEFAULT_LOSS, **loss}})


def _facts(row: "CaseResult") -> dict[str, Any]:
    difference = None if row.difference is None else attrs.asdict(row.difference)
    return {
        "case": row.case.name,
        "holds": row.holds,
        "difference": difference,
        "explanation": row.explanation or None,
        "declared": row.excuse or None,
    }


def _verdict(rows: "list[CaseResult]", broken: "list[CaseResult]", plant: str | None) -> str:
    declared = sum(bool(not row.holds and row.excuse) for row in rows)
    if plant is not None:
        return (
            f"{plant} was planted, and {len(broken)} of {len(rows)} rows noticed."
            if broken
            else f"{plant} was planted, and no row noticed: the chosen loss and reducer do not depend on what it changes."
        )
    if broken:
        return f"{len(broken)} of {len(rows)} cuts give another gradient. The promise does not hold."
    if declared:
        return f"{len(rows) - declared} of {len(rows)} cuts give the same loss and gradient; {declared} differ, as declared."
    same = f"All {len(rows)} cuts give the same loss, gradient and outputs."
    return f"{same} See a mistake noticed: skyrl-engine prove --plant per_microbatch_mean"
