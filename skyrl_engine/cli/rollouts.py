"""`skyrl-engine rollouts list|show|diff|export|check`: what the model attempted in a run by reinforcement."""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl_engine.cli.command import EngineGroup
from skyrl_engine.cli.shown_attempt import show_attempt
from skyrl_engine.cli.terminal import echo, echo_json

if TYPE_CHECKING:
    from skyrl_engine.contracts.values.rollout import Group, Trajectory
    from skyrl_engine.rollout.arrow_codec import LearnedAttempt
    from skyrl_engine.rollout.attempts import GroupSteps, Shortlist
    from skyrl_engine.rollout.journal_index import JournalIndex
    from skyrl_engine.rollout.moments import PlacedAttempt

_RUN = click.argument("run", type=click.Path(path_type=Path), metavar="RUN")


@click.group(cls=EngineGroup)
def rollouts() -> None:
    """Look at the attempts of a run by reinforcement, compare steps, export them."""


def _index_of(run: Path) -> "JournalIndex":
    """Read the headers of a run's journal, and say on stderr what it lacks, so that nobody takes what is shown for all that there was.

    Raises RolloutError where there is none, or none any more.
    """
    from skyrl_engine.errors import RolloutError
    from skyrl_engine.rollout.checking import read_listing
    from skyrl_engine.rollout.journal_index import read_index
    from skyrl_engine.run.directory import RunDirectory

    directory = RunDirectory(run)
    index = read_index(directory.rollouts, read_listing(directory))
    if not index.segments and index.losses:
        raise RolloutError(
            f"the rollouts of {run} are lost: {'; '.join(index.losses)}",
            remedy=f"Put {directory.rollouts} back; a resume samples again what it needs",
        )
    if not index.segments:
        raise RolloutError(f"{run} holds no rollouts", remedy="Name the directory of a run of trainer rl")
    for loss in [*index.losses, *([] if index.torn is None else [str(index.torn)])]:
        echo(f"not all rollouts are there: {loss}", err=True)
    return index


def _refuse_absent(run: Path, step: int, steps: AbstractSet[int]) -> None:
    """Refuse a step that is none of the `steps` that the journal holds rollouts of."""
    from skyrl_engine.errors import RolloutError

    if step not in steps:
        raise RolloutError(f"{run} holds no rollouts of step {step}", remedy="`skyrl-engine rollouts list` names the steps")


def _groups(index: "JournalIndex", steps: set[int] | None = None) -> Iterator[tuple[int, "Group"]]:
    """Read the step and the group of every record, of some steps alone or of all, in their order."""
    from skyrl_engine.rollout.attempts import read_steps
    from skyrl_engine.rollout.journal_index import apply_decision

    of_groups = read_steps(index)
    for step, ticket in of_groups.list_groups(steps):
        yield step, apply_decision(index.groups[ticket].group(), trained=ticket in of_groups.trained)


def _decoder(run: Path) -> Callable[[Any], str]:
    """Return what makes text of token ids; without a tokenizer it shows the ids, and says why on stderr."""
    from skyrl_engine.rollout.texts import decoder_of
    from skyrl_engine.run.directory import RunDirectory

    decode, why = decoder_of(RunDirectory(run))
    if decode is not None:
        return decode
    echo(f"token ids are shown: {why}", err=True)
    return lambda ids: " ".join(str(int(token_id)) for token_id in ids)


# --- list --------------------------------------------------------------------------------------------------------------------------


@rollouts.command("list")
@_RUN
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_rollouts(run: Path, as_json: bool) -> None:
    """List the steps of the run directory RUN with their groups, rewards and lost attempts."""
    from skyrl_engine.rollout.attempts import summarize_steps

    rows = list(summarize_steps(_index_of(run)))
    if as_json:
        echo_json(rows)
        return
    from skyrl_engine.cli.render import show_table

    shown = [{name: "" if value is None else f"{value:.4g}" for name, value in row.items()} for row in rows]
    show_table(list(rows[0]) if rows else ["step"], [tuple(row.values()) for row in shown])


# --- show --------------------------------------------------------------------------------------------------------------------------


@rollouts.command()
@_RUN
@click.option("--step", type=click.IntRange(min=1), metavar="STEP", help="Attempts of this step alone.")
@click.option("--worst", "choice", flag_value="worst", help="Begin with the lowest reward.")
@click.option("--best", "choice", flag_value="best", help="Begin with the highest reward.")
@click.option("--truncated", is_flag=True, help="Only attempts that ended at their longest.")
@click.option("--failed", is_flag=True, help="Only attempts that failed, with their causes.")
@click.option("--grep", metavar="TEXT", help="Only attempts whose text holds TEXT, in any case.")
@click.option("--limit", type=click.IntRange(min=1), default=3, show_default=True, metavar="N", help="Show so many at most.")
@click.option("--tokens", is_flag=True, help="One line per token, with log-probabilities, versions, rewards, advantages and gaps.")
def show(
    run: Path, step: int | None, choice: Any, truncated: bool, failed: bool, grep: str | None, limit: int, tokens: bool
) -> None:
    """Show attempts of the run directory RUN: prompts, what was sampled, what environments answered, rewards.

    Without a choice they are those of the newest step; with one, of all steps.
    """
    from skyrl_engine.rollout.attempts import Wanted, choose_attempts, read_steps

    index = _index_of(run)
    groups = read_steps(index)
    if step is None and not (choice or truncated or failed or grep):
        step = int(groups.steps.max()) if len(groups.steps) else None
    if step is not None:
        _refuse_absent(run, step, set(groups.steps.tolist()))
    decode = _decoder(run)
    fits = None if grep is None else lambda token_ids: grep.lower() in decode(token_ids).lower()
    chosen = choose_attempts(index, groups, Wanted(choice, truncated, failed, fits), limit, None if step is None else {step})
    for attempt in _read_attempts(index, groups, chosen):
        show_attempt(attempt, decode, tokens=tokens)
    if chosen.count > limit:
        echo(f"\n{chosen.count - limit} more; --limit shows them")
    if not chosen.count:
        echo("No attempt is of that kind.")


def _read_attempts(index: "JournalIndex", groups: "GroupSteps", chosen: "Shortlist") -> "Iterator[PlacedAttempt]":
    """Read the chosen attempts one by one; a group, and what a step learned, once for all that follow each other."""
    from skyrl_engine.rollout.journal_index import apply_decision
    from skyrl_engine.rollout.moments import PlacedAttempt

    step, group = 0, None
    learned: dict[tuple[int, int], LearnedAttempt] = {}
    for ticket, place in chosen.list_attempts():
        entry, trained = index.groups[ticket], ticket in groups.trained
        if group is None or group.ticket != ticket:
            group = apply_decision(entry.group(), trained=trained)
        step_of_group = groups.trained[ticket] if trained else entry.start_version + 1
        if step_of_group != step:
            step, learned = step_of_group, {}
            if step in index.learned:
                learned = {(attempt.ticket, attempt.member): attempt for attempt in index.learned[step].read_learned()}
        trajectory = group.trajectories[place]
        yield PlacedAttempt(step, group, trajectory, learned.get((ticket, trajectory.member)))


# --- report ------------------------------------------------------------------------------------------------------------------------

_SHOWN = 60
"""Characters of an attempt that the report shows."""


@rollouts.command()
@_RUN
def report(run: Path) -> None:
    """Show how the run directory RUN went: the best, the median and the worst attempt of its first, middle and last step."""
    show_report(run)


def show_report(run: Path) -> None:
    """Print the best, the median and the worst attempt of the first, the middle and the last step that a run recorded and trained."""
    from skyrl_engine.cli.render import show_table
    from skyrl_engine.rollout.moments import choose_by_rank, list_moments

    index = _index_of(run)
    decode = _decoder(run)
    rows = [
        (str(step), name, *_summary(attempt.trajectory, decode))
        for step in list_moments(index)
        for name, attempt in choose_by_rank(index, step)
    ]
    columns = ("step", "attempt", "reward", "tokens", "of which", "sampled")
    places = [place for place, name in enumerate(columns) if name != "of which" or any(row[place] for row in rows)]
    show_table([columns[place] for place in places], [[row[place] for place in places] for row in rows])


def _summary(trajectory: "Trajectory", decode: Callable[[Any], str]) -> tuple[str, str, str, str]:
    """Return reward, number of sampled tokens, parts of the reward, and the beginning of what was sampled, on one line."""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in trajectory.parts.items())
    text = " ".join(decode(trajectory.token_ids[trajectory.sampled]).split())
    return (
        f"{trajectory.reward:.4g}",
        str(len(trajectory.logprobs)),
        parts,
        text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...",
    )


# --- diff --------------------------------------------------------------------------------------------------------------------------


@rollouts.command()
@_RUN
@click.option("--steps", type=click.IntRange(min=1), nargs=2, required=True, metavar="A B", help="The two steps.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=1, show_default=True, metavar="N", help="Tasks whose best attempts are shown."
)
def diff(run: Path, steps: tuple[int, int], limit: int) -> None:
    """Compare what two steps of the run directory RUN made of the same tasks."""
    from skyrl_engine.cli.render import show_table

    index = _index_of(run)
    of_step: dict[int, dict[tuple[str, str], Group]] = {step: {} for step in steps}
    for step, group in _groups(index, set(steps)):
        of_step[step][group.environment, group.task_key] = group
    for step in steps:
        _refuse_absent(run, step, {step for step, groups in of_step.items() if groups})
    before, after = (of_step[step] for step in steps)
    shared = sorted(before.keys() & after.keys())
    names = [f"reward {step}" for step in steps] + [f"tokens {step}" for step in steps]
    rows = [
        (f"{environment}: {key}", *_means([before[environment, key]], [after[environment, key]])) for environment, key in shared
    ]
    every = ("all tasks", *_means(list(before.values()), list(after.values())))
    show_table(("task", *names), [*rows, every])
    if not shared:
        echo("\nThe steps share no task.")
        return
    if limit == 0:
        return
    from skyrl_engine.rollout.moments import PlacedAttempt

    decode = _decoder(run)
    for place in shared[:limit]:
        for step, group in zip(steps, (before[place], after[place]), strict=True):
            best = max(group.finished, key=lambda trajectory: trajectory.reward, default=None)
            if best is not None:
                show_attempt(PlacedAttempt(step, group, best), decode, tokens=False)


def _means(*sides: "list[Group]") -> list[str]:
    rewards = [[trajectory.reward for group in side for trajectory in group.finished] for side in sides]
    lengths = [[float(len(trajectory.logprobs)) for group in side for trajectory in group.finished] for side in sides]
    return [f"{sum(values) / len(values):.4g}" if values else "" for values in [*rewards, *lengths]]


# --- export ------------------------------------------------------------------------------------------------------------------------


@rollouts.command()
@_RUN
@click.option("--to", type=click.Choice(["jsonl", "parquet"]), required=True, help="Form of the file.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The file to write.")
@click.option("--min-reward", type=float, metavar="X", help="Only attempts that finished with this reward or more.")
def export(run: Path, to: Any, out: Path, min_reward: float | None) -> None:
    """Write the rollouts of the run directory RUN as rows of texts, tokens and rewards.

    `skyrl-engine sft --data FILE` trains on them (with --min-reward: on the good ones), and `rl.rollouts` takes a whole export in the place of
    sampling.
    """
    from skyrl_engine.rollout.exported import rows_of, write_rows
    from skyrl_engine.rollout.texts import decoder_of
    from skyrl_engine.run.directory import RunDirectory

    index = _index_of(run)
    decode, why = decoder_of(RunDirectory(run))
    if decode is None:
        echo(f"the texts are left out: {why}", err=True)
    trained = index.steps()

    def rows() -> Iterator[dict[str, Any]]:
        for _, group in _groups(index):
            for row in rows_of(group, step=trained.get(group.ticket), decode=decode):
                good = min_reward is None or (row["status"] != "failed" and row["reward"] >= min_reward)
                if good and row["segment_lengths"]:
                    yield row

    count = write_rows(rows(), out, to)
    echo(f"rows: {count}\nfile: {out}")


# --- check -------------------------------------------------------------------------------------------------------------------------


@rollouts.command()
@_RUN
def check(run: Path) -> int:
    """Check the journal of the run directory RUN: all of it can be read, and no group was trained on twice."""
    from skyrl_engine.cli.render import show_lines
    from skyrl_engine.rollout.checking import check_journal, read_listing
    from skyrl_engine.run.directory import RunDirectory

    _index_of(run)
    directory = RunDirectory(run)
    checked = check_journal(directory.rollouts, read_listing(directory))
    echo(f"{checked.groups} groups of {checked.attempts} attempts, {checked.steps} steps trained")
    show_lines([*checked.notes, *checked.wrong])
    echo("wrong" if checked.wrong else "whole: every group that was trained on is recorded, and was trained on once")
    return int(bool(checked.wrong))
