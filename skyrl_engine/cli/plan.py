"""`skyrl-engine plan`: say what a run would do and what each rank would hold, without a GPU and without weights."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from skyrl_engine.cli.command import EngineCommand, current_settings
from skyrl_engine.cli.options import file_argument, flags_of, load_config, overrides_argument, plugin_options, trust_option
from skyrl_engine.cli.run import make_plan
from skyrl_engine.cli.terminal import echo, echo_json

if TYPE_CHECKING:
    from skyrl_engine.config import RawConfig
    from skyrl_engine.engine.layout_fit import PlannedLayout
    from skyrl_engine.engine.layout_search import ProposedLayout

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_MOST_BYTES: Final = 2**63
_LONGEST: Final = 2**31


def _read_bytes(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """Return the number of bytes of `80GiB`."""
    if text is None:
        return None
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    exact = None if match is None or match[2].lower() not in units else Fraction(match[1]) * units[match[2].lower()]
    if exact is None or not 1 <= exact < _MOST_BYTES:
        raise click.BadParameter(f"{text!r} is no size of memory. Write a number and a unit, such as 80GiB or 141GB.")
    return int(exact)


@click.command(cls=EngineCommand)
@file_argument(required=True)
@overrides_argument
@plugin_options()
@click.option("--ranks", type=click.IntRange(min=1), metavar="RANKS", help="Number of ranks, in the place of run.ranks.")
@click.option(
    "--gpu-memory",
    callback=_read_bytes,
    metavar="SIZE",
    help="Plan for GPUs of this memory each, wherever they are; this machine's devices and cores do not count then.",
)
@click.option(
    "--lengths",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Lengths in tokens, a number a line: the step is planned of such samples, and datasets are not read.",
)
@click.option("--fit", is_flag=True, help="Propose layouts of the model that fit the GPUs, best first, as keys to paste.")
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object; with --fit, a list of them.")
def plan(
    file: Path,
    overrides: tuple[str, ...],
    *,
    ranks: int | None,
    gpu_memory: int | None,
    lengths: Path | None,
    fit: bool,
    trust_code: bool,
    as_json: bool,
    **choices: Any,
) -> int:
    """Say what a run with CONFIG would do, what each rank would hold and what it would send; refuse what `run` would refuse.

    No weight is read and no rank is started: `run --dry-run` shows the same for this machine. With --fit, layouts by the backends that are
    installed are compared: those without offloading come first, then those that compute less, then those that send less.
    """
    from skyrl_engine.cli.shown_plan import show_plan
    from skyrl_engine.config import Assumptions, Option, ResolvedConfig, override, resolve

    flags = flags_of(choices)
    if ranks is not None:
        flags["run.ranks"] = Option("--ranks", ranks)
        if ranks > 1:
            flags["run.launch"] = Option("--ranks", "ray")
    assumed = Assumptions(gpu_memory, None if lengths is None else _read_lengths(lengths))

    def make(layout: "ProposedLayout | None" = None) -> tuple[ResolvedConfig, Any]:
        raw = load_config(file, overrides, flags, trust_code=trust_code)
        if layout is not None:
            keys = {key: Option("--fit", value) for key, value in layout.keys.items()}
            raw = override(_without_backend(raw), flags=keys)
        _refuse_other_device(raw.table, gpu_memory)
        resolved = attrs.evolve(resolve(raw), assumed=assumed)
        return resolved, make_plan(resolved, current_settings())

    resolved, planned = make()
    if fit:
        from skyrl_engine.engine.layout_fit import fit_layouts

        memory = _memory_of(planned)
        if memory is None or memory.device_bytes is None:
            raise click.UsageError("--fit needs the memory of a GPU, and none is known here. Give it: --gpu-memory 80GiB.")
        layouts = fit_layouts(
            resolved, memory, lambda layout: _memory_of(make(layout)[1]), of_backend=choices.get("backend") is not None
        )
        _show_layouts(layouts, as_json=as_json)
        return 0
    if as_json:
        echo_json(_to_values(planned))
    else:
        show_plan(planned)
    return 0


def _without_backend(raw: "RawConfig") -> "RawConfig":
    """Return the configuration without the table of its backend: a layout has one of its own."""
    table = {name: value for name, value in raw.table.items() if name != "backend"}
    return attrs.evolve(raw, table=table, origins={key: at for key, at in raw.origins.items() if key.split(".")[0] != "backend"})


def _show_layouts(layouts: Sequence["PlannedLayout"], *, as_json: bool) -> None:
    """Print layouts, best first: what each takes, and its keys as TOML."""
    if as_json:
        echo_json([each.to_values() for each in layouts])
        return
    from skyrl_engine.config.report import to_toml
    from skyrl_engine.model_facts.memory import format_bytes

    for number, each in enumerate(layouts, 1):
        most, step = each.plan.most.total, each.plan.step
        assert each.plan.device_bytes is not None, "devices are known"
        bubble = f", {step.bubble:.0%} of a step waiting" if step.bubble else ""
        echo(
            f"# {number}. {format_bytes(most)} of tensors, {most / each.plan.device_bytes:.0%} of a GPU; {step.micro_batches:,} micro-batches; "
            f"sends {format_bytes(step.sent)} a step{bubble}"
        )
        tables: dict[str, dict[str, Any]] = {}
        for key, value in each.layout.keys.items():
            table, _, name = key.partition(".")
            tables.setdefault(table, {})[name] = value
        echo(to_toml(tables))


def _refuse_other_device(table: Mapping[str, Any], gpu_memory: int | None) -> None:
    run = table.get("run")
    if gpu_memory is not None and isinstance(run, Mapping) and run.get("device") == "cpu":
        raise click.UsageError('--gpu-memory plans for GPUs, and the configuration says run.device = "cpu". Leave out one of them.')


def _read_lengths(file: Path) -> tuple[int, ...]:
    """Read a length a line. Raises DataError for a file that cannot be read, and naming the first line that is none."""
    from skyrl_engine.errors import DataError

    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})", remedy="Name a file with one length on each line") from error
    lengths = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text.isdecimal() or not 0 < int(text) < _LONGEST:
            raise DataError(
                f"{file}:{number} is {text[:40]!r}, and no number of tokens", remedy="Write one length above 0 on each line"
            )
        lengths.append(int(text))
    if not lengths:
        raise DataError(f"{file} holds no length", remedy="Write one length in tokens on each line")
    return tuple(lengths)


def _memory_of(planned: Any) -> Any:
    """Return the plan of memory; None where another distribution's trainer gives none."""
    return getattr(planned, "memory", None)


def _to_values(planned: Any) -> dict[str, Any]:
    """Return a plan in plain values; that of another distribution's trainer is a mapping of lines."""
    if not attrs.has(type(planned)):
        return dict(planned)
    memory = planned.memory
    values = attrs.asdict(planned, filter=lambda field, _: field.name != "memory")
    return {**values, "memory": None if memory is None else memory.to_values()}
