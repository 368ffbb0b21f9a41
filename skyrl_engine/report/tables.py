"""Facts of a run, and what differs between several, as tables for whoever shows them."""

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from skyrl_engine.errors import ConfigError, Problem
from skyrl_engine.model_facts.memory import format_bytes
from skyrl_engine.report.run_facts import RunFacts
from skyrl_engine.report.series import MEMORY


@frozen
class Table:
    """Rows of cells under a title."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False


def label_runs(runs: Sequence[RunFacts]) -> list[str]:
    """Return the names of runs, with as many folders above them as it takes to tell them apart."""
    places = [run.directory.path.resolve() for run in runs]
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        labels = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(labels)) == len(labels):
            return labels
    raise ConfigError([Problem(str(runs[0].directory.path), "is named twice", "Name different runs")])


_NOTHING = frozenset({"0", "none", "no"})
"""Facts about data that say nothing where they stand alone, such as how many rows were dropped."""


def list_facts(run: RunFacts) -> tuple[Table, ...]:
    """Return what a run was: model and ranks, data without counts of zero, plugins, settings, sessions, environment."""
    data = tuple(row for row in run.list_data() if row[1] not in _NOTHING)
    model = run.manifest["config"].get("model", {})
    world = run.manifest.get("world", {})
    basics = [
        ("trainer", run.trainer),
        ("model", str(model.get("path"))),
        ("dtype", str(model.get("dtype"))),
        ("engine", f"{run.manifest['engine']['distribution']} {run.manifest['engine']['version']}"),
        ("created", str(run.manifest.get("created"))),
        ("ranks", ", ".join(f"{name} {value}" for name, value in world.items())),
        ("saved at steps", ", ".join(f"{step:,}" for step in run.metrics.checkpoints[-8:]) or "none"),
    ]
    sessions = [
        (
            str(each.get("started")),
            f"from step {each.get('start_step')}",
            f"to step {each.get('end_step')}",
            str(each.get("error") or ""),
        )
        for each in run.manifest["sessions"]
    ]
    return (
        Table("Run", tuple(basics)),
        Table("Data", data, folded=len(data) > 12),
        Table("Plugins", tuple(run.list_plugins())),
        Table("Configuration that differs from the defaults", tuple(run.list_settings())),
        Table("Sessions", tuple(sessions), folded=len(sessions) < 2),
        Table("Environment", tuple(run.list_environment()), folded=True),
    )


def list_differences(runs: Sequence[RunFacts]) -> tuple[Table, ...]:
    """Return what differs between runs: a column for each, and rows of what is not the same in all; tables may be empty.

    Runs of different trainers have different keys. What one of them alone has is a row only where it tells something: a key of the
    configuration that somebody set, a fact about data that is not zero, and no metric.
    """

    def compare(
        title: str, facts: Sequence[Mapping[str, str]], tells_alone: Callable[[str, str], bool] = lambda _key, _value: True
    ) -> Table:
        rows = []
        for key in dict.fromkeys(key for each in facts for key in each):
            values = [each[key] for each in facts if key in each]
            is_compared = len(values) == len(facts) or len(set(values)) > 1
            if is_compared or any(tells_alone(key, value) for value in values):
                rows.append((key, *(each.get(key, "") for each in facts)))
        return Table(title, tuple(row for row in rows if len(set(row[1:])) > 1))

    chosen = {key for run in runs for key, _, _ in run.list_settings()} - {"run.directory"}
    return (
        compare(
            "Configuration",
            [{key: value for key, value in run.flatten_config().items() if key != "run.directory"} for run in runs],
            lambda key, _: key in chosen,
        ),
        compare("Plugins", [_number(run.list_plugins()) for run in runs]),
        compare("Data", [dict(run.list_data()) for run in runs], lambda _, value: value not in _NOTHING),
        compare("Environment", [dict(run.list_environment()) for run in runs]),
        compare(
            "Course",
            [
                {"state": run.describe_state(), "seconds of steps": f"{run.seconds:.4g}", "tokens": f"{run.tokens:,}"}
                for run in runs
            ],
        ),
        compare("Last metrics", [format_metrics(run.list_last_metrics()) for run in runs], lambda _key, _value: False),
        compare(
            "Best metric",
            [{} if run.best is None else {run.best.metric: f"{run.best.value:.6g} after step {run.best.step:,}"} for run in runs],
        ),
    )


def format_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return metrics as text, memory with its unit."""
    return {name: format_bytes(int(value)) if name.startswith(MEMORY) else f"{value:.6g}" for name, value in metrics.items()}


def _number(rows: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return rows as a table, of which equal keys are numbered."""
    table: dict[str, str] = {}
    for key, value in rows:
        name, count = key, 1
        while name in table:
            count += 1
            name = f"{key} {count}"
        table[name] = value
    return table
