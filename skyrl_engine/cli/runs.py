"""`skyrl-engine runs list|show|diff|watch|fetch|prune`: the runs of a folder, how far they are, and what they take on the disk."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl_engine.cli.command import EngineGroup
from skyrl_engine.cli.terminal import echo, echo_json
from skyrl_engine.cli.watch import watch

if TYPE_CHECKING:
    from skyrl_engine.report.run_facts import RunFacts
    from skyrl_engine.rollout.prune import RolloutPlan
    from skyrl_engine.run.best import Best
    from skyrl_engine.run.directory import RunDirectory
    from skyrl_engine.run.prune import PrunePlan, PruneRules
    from skyrl_engine.run.summary import RunSummary

_RUNS = "runs"
"""The folder in which runs lie that name none."""
_CAUSE = 100
"""Characters of a cause that a list shows."""


@click.group(cls=EngineGroup)
def runs() -> None:
    """List runs, show one, compare some, watch one, fetch one from a store, free what they take on the disk."""


runs.add_command(watch)


# --- list --------------------------------------------------------------------------------------------------------------------------

_SORTS = {
    "created": lambda run: run.created,
    "updated": lambda run: run.updated,
    "name": lambda run: run.name,
    "state": lambda run: (run.state.word, run.created),
    "step": lambda run: run.step,
    "size": lambda run: run.bytes,
}


@runs.command("list")
@click.argument("folder", type=click.Path(path_type=Path), metavar="[FOLDER]", default=_RUNS)
@click.option(
    "--sort", type=click.Choice(list(_SORTS)), default="created", show_default=True, help="What to sort by, the largest last."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_runs(folder: Path, sort: str, as_json: bool) -> None:
    """List the runs in FOLDER, by default runs, and in the folders below it: state, step, last and best metric, size."""
    from skyrl_engine.run.summary import find_runs, summarize_run

    summaries = sorted(map(summarize_run, find_runs(folder)), key=_SORTS[sort])
    if as_json:
        import attrs

        echo_json([attrs.asdict(run) for run in summaries])
        return
    if not summaries:
        echo(f"There is no run in {folder}.")
        return
    from skyrl_engine.cli.render import show_table

    rows = [_list_cells(run, folder) for run in summaries]
    places = [place for place in range(len(_COLUMNS)) if any(row[place] for row in rows)]
    show_table([_COLUMNS[place] for place in places], [[row[place] for place in places] for row in rows])


_COLUMNS = ("run", "trainer", "state", "step", "last", "best", "size", "created", "cause")


def _list_cells(run: "RunSummary", folder: Path) -> tuple[str, ...]:
    from skyrl_engine.model_facts.memory import format_bytes

    path, cause = Path(run.path), run.state.cause or ""
    return (
        str(path.relative_to(folder)) if path != folder else run.name,
        run.trainer or "",
        run.state.word,
        _format_step(run.step, run.total_steps),
        _format_headline(run),
        _format_best(run.best),
        format_bytes(run.bytes),
        _format_time(run.created),
        cause if len(cause) <= _CAUSE else f"{cause[: _CAUSE - 3]}...",
    )


def _format_step(step: int, total: int | None) -> str:
    return f"{step:,}" if total is None else f"{step:,} of {total:,}"


def _format_headline(run: "RunSummary") -> str:
    """Return the metric of the last step by which people know a run: its reward, else its loss."""
    name = next((name for name in ("reward/mean", "loss") if run.last.get(name) is not None), None)
    return "" if name is None else f"{name} {run.last[name]:.4g}"


def _format_best(best: "Best | None") -> str:
    return "" if best is None else f"{best.metric} {best.value:.4g} after step {best.step:,}"


def _format_time(text: str) -> str:
    return text[:16].replace("T", " ")


# --- show --------------------------------------------------------------------------------------------------------------------------


@runs.command("show")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def show_run(run: Path, as_json: bool) -> None:
    """Show the run directory RUN whole: state, sessions, metrics, checkpoints, what it was made of, what it takes on the disk."""
    from skyrl_engine.report.run_facts import read_run

    facts = read_run(run)
    checkpoints, sizes = _list_checkpoints(facts), _list_sizes(facts)
    best = facts.best
    if as_json:
        import attrs

        echo_json(
            {
                "path": str(run),
                "name": facts.name,
                "trainer": facts.trainer,
                "state": attrs.asdict(facts.state),
                "step": facts.step,
                "total_steps": facts.metrics.total_steps,
                "seconds": facts.seconds,
                "tokens": facts.tokens,
                "last": facts.list_last_metrics(),
                "best": None if best is None else attrs.asdict(best),
                "checkpoints": checkpoints,
                "bytes": sizes,
                **{
                    key: facts.manifest.get(key)
                    for key in ("engine", "created", "sessions", "plugins", "observers", "config", "world", "data", "environment")
                },
            }
        )
        return
    _show_run(facts, checkpoints, sizes)


def _show_run(facts: "RunFacts", checkpoints: list[dict[str, Any]], sizes: dict[str, int]) -> None:
    from skyrl_engine.cli.render import show_facts, show_heading, show_table
    from skyrl_engine.model_facts.memory import format_bytes
    from skyrl_engine.report.tables import format_metrics, list_facts

    best = _format_best(facts.best)
    show_facts(
        {
            "run": str(facts.directory.path),
            **_note_move(facts),
            "state": facts.describe_state(),
            "time": f"{facts.seconds:,.4g} s of steps, {facts.tokens:,} tokens",
            **({"best": best} if best else {}),
            "size": ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items()),
        }
    )
    for table in list_facts(facts):
        if table.rows:
            echo()
            show_table([table.title, *[""] * (len(table.rows[0]) - 1)], table.rows)
    if metrics := facts.list_last_metrics():
        show_heading(f"Metrics of step {facts.metrics.last_step:,}")
        show_facts(format_metrics(metrics))
    if checkpoints:
        echo()
        rows = [
            (f"{each['step']:,}", format_bytes(each["bytes"]), ", ".join(word for word in ("latest", "best") if each[word]))
            for each in checkpoints
        ]
        show_table(("Checkpoint of step", "size", ""), rows)


def _note_move(facts: "RunFacts") -> dict[str, str]:
    """Say where a run was begun, if that is a folder of another name: it was moved, copied or renamed."""
    begun = facts.manifest["config"].get("run", {}).get("directory")
    moved = isinstance(begun, str) and Path(begun).name != facts.name
    return {"begun in": f"{begun}; resume it with run.directory={facts.directory.path}"} if moved else {}


def _list_checkpoints(facts: "RunFacts") -> list[dict[str, Any]]:
    from skyrl_engine.errors import ConfigError
    from skyrl_engine.run.best import rank_checkpoints, read_metric
    from skyrl_engine.run.checkpoint import CheckpointStore
    from skyrl_engine.workers.listing import count_bytes

    store = CheckpointStore(facts.directory.checkpoints)
    saved, latest = store.all(), store.latest()
    evaluated = [checkpoint.step for checkpoint in saved]
    metric, higher = read_metric(facts.manifest["config"])
    try:
        best = next(iter(rank_checkpoints(evaluated, facts.list_evaluations(), metric, higher=higher)), None)
    except ConfigError:  # the metric that the run names is in none of its evaluations yet
        best = None
    return [
        {
            "step": checkpoint.step,
            "path": str(checkpoint.path),
            "bytes": count_bytes(checkpoint.path),
            "latest": latest is not None and checkpoint.step == latest.step,
            "best": checkpoint.step == best,
        }
        for checkpoint in saved
    ]


def _list_sizes(facts: "RunFacts") -> dict[str, int]:
    """Return the bytes of a run directory in all, and of the folders in it."""
    from skyrl_engine.workers.listing import count_bytes

    path = facts.directory.path
    return {
        "all": count_bytes(path),
        **{entry.name: count_bytes(entry) for entry in sorted(path.iterdir()) if entry.is_dir() and not entry.is_symlink()},
    }


# --- diff --------------------------------------------------------------------------------------------------------------------------


@runs.command()
@click.argument("runs", type=click.Path(path_type=Path), metavar="RUN...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def diff(runs: tuple[Path, ...], as_json: bool) -> None:
    """Say what differs between run directories: configuration, plugins, data, environment, course, last and best metrics."""
    from skyrl_engine.report.run_facts import read_run
    from skyrl_engine.report.tables import label_runs, list_differences

    if len(runs) < 2:
        raise click.UsageError("A comparison needs two run directories or more.")
    facts = [read_run(run) for run in runs]
    labels, tables = label_runs(facts), list_differences(facts)
    if as_json:
        echo_json({"runs": labels, "differences": {each.title: {row[0]: list(row[1:]) for row in each.rows} for each in tables}})
        return
    from skyrl_engine.cli.render import show_table

    for table in tables:
        if table.rows:
            echo()
            show_table([table.title, *labels], table.rows)
    if not any(table.rows for table in tables):
        echo("The runs differ in nothing that they record.")


# --- fetch -------------------------------------------------------------------------------------------------------------------------


@runs.command()
@click.argument("address", metavar="ADDRESS")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
def fetch(address: str, run: Path) -> None:
    """Bring the run whose copies are at ADDRESS of an object store (checkpoint.store) into the new directory RUN."""
    from skyrl_engine.object_store.place import StorePlace
    from skyrl_engine.run.directory import open_run_directory
    from skyrl_engine.run.fetch import fetch_into

    place = StorePlace.of(address)
    directory = open_run_directory(str(run), name="", resume=False)
    try:
        with directory.lock():
            fetched = fetch_into(place, directory)
    except BaseException:
        directory.remove_traces()
        raise
    echo(f"run directory: {directory.path} (after step {fetched.step})")


# --- prune -------------------------------------------------------------------------------------------------------------------------


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class _Age(click.ParamType[float]):
    """A time such as 12h or 7d, in seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds. Raises BadParameter."""
        match = re.fullmatch(r"(\d{1,6})([smhdw])", str(value))
        if match is None:
            self.fail(f"{value!r} is no time such as 12h or 7d; units are s, m, h, d and w.", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


@runs.command()
@click.argument("runs", type=click.Path(path_type=Path), metavar="RUN...", nargs=-1, required=True)
@click.option("--keep-last", type=click.IntRange(min=1), metavar="COUNT", help="Keep so many of the newest checkpoints.")
@click.option(
    "--keep-best", type=click.IntRange(min=1), metavar="COUNT", help="Keep so many checkpoints with the best evaluations."
)
@click.option("--older-than", type=_Age(), metavar="AGE", help="Delete only checkpoints that were written so long ago: 12h, 7d.")
@click.option("--metric", metavar="METRIC", help="The metric of evaluations that says which checkpoint is the best.")
@click.option("--highest", "higher", flag_value=True, type=bool, help="Higher values of the metric are better.")
@click.option("--lowest", "higher", flag_value=False, type=bool, help="Lower values of the metric are better.")
@click.option("--keep-rollouts", type=click.IntRange(min=1), metavar="STEPS", help="Delete rollouts older than so many steps.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object; needs --yes or --dry-run.")
def prune(runs: tuple[Path, ...], *, keep_rollouts: int | None, dry_run: bool, yes: bool, as_json: bool, **rules: Any) -> None:
    """Delete checkpoints of the run directories RUN that no rule keeps, and old rollouts, after asking.

    The checkpoint to resume from always stays, and so does the one with the best evaluation. A run on which a process works is refused. Of a
    folder of runs, each run below it is pruned, and those that cannot be are left alone.
    """
    from skyrl_engine.run.prune import PruneRules

    chosen = PruneRules(**rules)
    if chosen.keeps_all and keep_rollouts is None:
        raise click.UsageError("Say what to keep with --keep-last, --keep-best, --older-than or --keep-rollouts.")
    if chosen.keeps_all and (chosen.metric is not None or chosen.higher is not None):
        raise click.UsageError("A metric says which checkpoints stay; say how many with --keep-best or --keep-last.")
    if as_json and not (yes or dry_run):
        raise click.UsageError("--json asks nothing. Give --yes or --dry-run too.")
    plans, left_alone = _plan_all(runs, chosen, keep_rollouts)
    # deleted files have no size
    table = _describe_plans(plans)
    if not as_json:
        _show_plans(table, left_alone)
    freed = 0
    if not dry_run and any(row["goes"] for row in table):
        if not as_json:
            _ask(yes=yes)
        freed = _carry_out(plans, chosen)
        if not as_json:
            from skyrl_engine.model_facts.memory import format_bytes

            echo(f"freed: {format_bytes(freed)}")
    if as_json:
        echo_json({"files": table, "left_alone": left_alone, "freed": freed})


def _plan_all(
    runs: Sequence[Path], rules: "PruneRules", keep_rollouts: int | None
) -> "tuple[list[tuple[PrunePlan, RolloutPlan | None]], dict[str, str]]":
    """Return the plans of all runs, and why runs of folders are left alone, by path. Raises EngineError for a run that was named itself."""
    from skyrl_engine.errors import ConfigError, EngineError, Problem
    from skyrl_engine.run.summary import find_runs

    plans, left_alone, seen = [], {}, set()
    for named in runs:
        found = find_runs(named)
        if not found:
            raise ConfigError([Problem(str(named), "holds no run directory", "Name run directories, or a folder of them")])
        for run in found:
            if run.resolve() in seen:
                continue
            seen.add(run.resolve())
            try:
                plans.append(_plan(_require_idle(run), rules, keep_rollouts))
            except EngineError as error:
                if run == named:
                    raise
                left_alone[str(run)] = error.summary
    return plans, left_alone


def _require_idle(run: Path) -> "RunDirectory":
    from skyrl_engine.run.directory import RunDirectory
    from skyrl_engine.run.prune import refuse_live

    directory = RunDirectory(run)
    refuse_live(directory)
    return directory


def _plan(directory: "RunDirectory", rules: "PruneRules", keep_rollouts: int | None) -> "tuple[PrunePlan, RolloutPlan | None]":
    from skyrl_engine.errors import ConfigError, Problem
    from skyrl_engine.rollout.prune import plan_to_prune_rollouts
    from skyrl_engine.run.prune import PrunePlan, plan_prune

    checkpoints = PrunePlan(directory) if rules.keeps_all else plan_prune(directory, rules)
    if keep_rollouts is None:
        return checkpoints, None
    if not directory.rollouts.is_dir():
        raise ConfigError([Problem("--keep-rollouts", f"{directory.path} holds no rollouts", "Leave it out")])
    return checkpoints, plan_to_prune_rollouts(directory, keep_rollouts)


def _describe_plans(plans: "Sequence[tuple[PrunePlan, RolloutPlan | None]]") -> list[dict[str, Any]]:
    """Return what goes and what stays, in JSON values: a row for each folder or file."""
    from skyrl_engine.workers.listing import count_bytes

    rows = []
    for checkpoints, rollouts in plans:
        directory = checkpoints.directory
        goes = [*checkpoints.list_paths(), *(() if rollouts is None else rollouts.segments)]
        stays = {directory.checkpoints / f"step-{step:08d}": reason for step, reason in sorted(checkpoints.stay.items())}
        for path in (*goes, *stays):
            reason = stays.get(path)
            what = str(path.relative_to(directory.path))
            rows.append(
                {"run": str(directory.path), "what": what, "bytes": count_bytes(path), "goes": reason is None, "reason": reason}
            )
    return rows


def _show_plans(table: Sequence[Mapping[str, Any]], left_alone: Mapping[str, str]) -> None:
    from skyrl_engine.cli.render import show_table
    from skyrl_engine.model_facts.memory import format_bytes

    if table:
        rows = [
            (row["run"], row["what"], format_bytes(row["bytes"]), "delete" if row["goes"] else f"keep: {row['reason']}")
            for row in table
        ]
        show_table(("run", "what", "size", ""), rows)
    for run, reason in left_alone.items():
        echo(f"left alone: {run} ({reason})", err=True)
    total = sum(row["bytes"] for row in table if row["goes"])
    echo(f"to delete: {format_bytes(total)}" if total else "nothing to delete")


def _ask(*, yes: bool) -> None:
    import sys

    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("Nobody can be asked here; --yes deletes without a question.")
    if not click.confirm("Delete that?", default=False, err=True):
        raise click.Abort


def _carry_out(plans: "Sequence[tuple[PrunePlan, RolloutPlan | None]]", rules: "PruneRules") -> int:
    """Delete what was agreed to, and nothing of a run in which other things would go by now. Returns freed bytes."""
    from skyrl_engine.errors import EngineError
    from skyrl_engine.rollout.prune import prune_rollouts
    from skyrl_engine.run.prune import hold_to_prune, prune

    freed = 0
    for checkpoints, rollouts in plans:
        if not checkpoints.list_paths() and rollouts is None:
            continue
        directory = checkpoints.directory
        with hold_to_prune(directory):
            now, rollouts_now = _plan(directory, rules, None if rollouts is None else rollouts.keep)
            if not set(checkpoints.list_paths()) <= set(now.list_paths()) or (rollouts is not None and rollouts_now != rollouts):
                raise EngineError(f"{directory.path} has changed since you were asked", remedy="Prune it again")
            freed += prune(checkpoints) + (0 if rollouts is None else prune_rollouts(rollouts))
    return freed
