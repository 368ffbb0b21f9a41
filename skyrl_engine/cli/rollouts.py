"""`skyrl-engine rollouts list|show|diff|export|check`: what the model attempted in a run by reinforcement."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve, frozen

from skyrl_engine.cli.command import EngineGroup
from skyrl_engine.cli.terminal import echo, echo_json

if TYPE_CHECKING:
    from skyrl_engine.contracts.values.rollout import Group, Trajectory
    from skyrl_engine.rollout.arrow_codec import LearnedAttempt
    from skyrl_engine.rollout.journal_index import JournalIndex

_RUN = click.argument("run", type=click.Path(path_type=Path), metavar="RUN")


@click.group(cls=EngineGroup)
def rollouts() -> None:
    """Look at the attempts of a run by reinforcement, compare steps, export them."""


@frozen(eq=False)
class _ShownAttempt:
    """An attempt with its group, and the step that trained on it or, where none did, that it was sampled for."""

    step: int
    group: "Group"
    trajectory: "Trajectory"
    learned: "LearnedAttempt | None" = None

    @property
    def name(self) -> str:
        attempt = self.trajectory
        return f"step {self.step}, {self.group.environment}: task {self.group.task_key}, attempt {attempt.member} of group {attempt.ticket}"


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


def _step_of(index: "JournalIndex") -> dict[int, int]:
    """Return the step of every group: the one that trained on it, or that it was sampled for."""
    trained = index.steps()
    return {ticket: trained.get(ticket, int(entry.header["start_version"]) + 1) for ticket, entry in index.groups.items()}


def _refuse_absent(run: Path, step: int, steps: AbstractSet[int]) -> None:
    """Refuse a step that is none of the `steps` that the journal holds rollouts of."""
    from skyrl_engine.errors import RolloutError

    if step not in steps:
        raise RolloutError(f"{run} holds no rollouts of step {step}", remedy="`skyrl-engine rollouts list` names the steps")


def _groups(index: "JournalIndex", steps: set[int] | None = None) -> Iterator[tuple[int, "Group"]]:
    """Yield the step and the group of every record, of some steps alone or of all, in their order."""
    from skyrl_engine.rollout.journal_index import apply_decision

    trained = index.steps()
    for ticket, step in sorted(_step_of(index).items(), key=lambda item: (item[1], item[0])):
        if steps is None or step in steps:
            yield step, apply_decision(index.groups[ticket].group(), trained=ticket in trained)


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
    index = _index_of(run)
    trained, steps = index.steps(), _step_of(index)
    rows = [
        _facts(index, step, [ticket for ticket in steps if steps[ticket] == step], trained) for step in sorted(set(steps.values()))
    ]
    if as_json:
        echo_json(rows)
        return
    from skyrl_engine.cli.render import show_table

    shown = [{name: "" if value is None else f"{value:.4g}" for name, value in row.items()} for row in rows]
    show_table(list(rows[0]) if rows else ["step"], [tuple(row.values()) for row in shown])


def _facts(index: "JournalIndex", step: int, tickets: list[int], trained: Mapping[int, int]) -> dict[str, Any]:
    headers = [index.groups[ticket].header for ticket in tickets]
    statuses = [status for header in headers for status in header["statuses"]]
    rewards = [
        reward
        for header in headers
        for reward, status in zip(header["rewards"], header["statuses"], strict=True)
        if status != "failed"
    ]
    return {
        "step": step,
        "groups": sum(ticket in trained for ticket in tickets),
        "dropped": sum(
            ticket not in trained and header["dropped"] is not None for ticket, header in zip(tickets, headers, strict=True)
        ),
        "attempts": len(statuses),
        "failed": statuses.count("failed"),
        "truncated": statuses.count("truncated"),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "lowest": min(rewards, default=None),
        "highest": max(rewards, default=None),
    }


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
    run: Path, step: int | None, choice: str | None, truncated: bool, failed: bool, grep: str | None, limit: int, tokens: bool
) -> None:
    """Show attempts of the run directory RUN: prompts, what was sampled, what environments answered, rewards.

    Without a choice they are those of the newest step; with one, of all steps.
    """
    index = _index_of(run)
    if step is None and not (choice or truncated or failed or grep):
        step = max(_step_of(index).values(), default=None)
    steps = set(_step_of(index).values())
    if step is not None:
        _refuse_absent(run, step, steps)
    decode = _decoder(run)
    attempts = [
        _ShownAttempt(step_of_group, group, trajectory)
        for step_of_group, group in _groups(index, None if step is None else {step})
        for trajectory in group.trajectories
        if (not truncated or trajectory.status == "truncated")
        and (not failed or trajectory.status == "failed")
        and (grep is None or grep.lower() in decode(trajectory.token_ids).lower())
    ]
    if choice is not None:
        attempts = [attempt for attempt in attempts if attempt.trajectory.status != "failed" or failed]
        attempts.sort(key=lambda attempt: attempt.trajectory.reward, reverse=choice == "best")
    for attempt in attempts[:limit]:
        _show_attempt(evolve(attempt, learned=_find_learned(index, attempt)), decode, tokens=tokens)
    if len(attempts) > limit:
        echo(f"\n{len(attempts) - limit} more; --limit shows them")
    if not attempts:
        echo("No attempt is of that kind.")


def _find_learned(index: "JournalIndex", attempt: _ShownAttempt) -> "LearnedAttempt | None":
    """Return what the attempt's step learned from it; None where no step did, or what it learned is not kept."""
    record = index.learned.get(attempt.step)
    of = attempt.trajectory
    return next(
        (
            record_of_attempt
            for record_of_attempt in record.read_learned()
            if (record_of_attempt.ticket, record_of_attempt.member) == (of.ticket, of.member)
        )
        if record is not None
        else iter(()),
        None,
    )


_SHOWN = 60
"""Characters of an attempt that the report shows."""

_WORDS = ("prompt", "sampled", "observed")


def _show_attempt(attempt: _ShownAttempt, decode: Callable[[Any], str], *, tokens: bool) -> None:
    from skyrl_engine.cli.render import show_facts, show_heading, show_segments, show_table
    from skyrl_engine.rollout.exported import segments_of

    trajectory, group, learned = attempt.trajectory, attempt.group, attempt.learned
    show_heading(attempt.name)
    rewards = [finished.reward for finished in group.finished]
    facts = {
        "reward": f"{trajectory.reward:g}" + (f" (mean of the group: {sum(rewards) / len(rewards):.4g})" if rewards else ""),
        **{f"  {name}": f"{value:g}" for name, value in trajectory.parts.items()},
        "advantage": None if learned is None else _range(learned.advantages),
        "gap": None if learned is None else _gaps(trajectory, learned),
        "status": trajectory.status + (f": {trajectory.cause}" if trajectory.cause else ""),
        "dropped": group.dropped,
        "success": None if trajectory.success is None else "yes" if trajectory.success else "no",
        "turns": f"{trajectory.turns}, ended by {', '.join(trajectory.stops)}" if trajectory.stops else None,
        "tokens": f"{len(trajectory.logprobs)} sampled of {len(trajectory.token_ids)}, by version {_versions(trajectory)}",
    }
    show_facts({name: value for name, value in facts.items() if value is not None})
    if tokens:
        columns = ("place", "kind", "id", "text", "logprob", "version", "reward", "advantage", "gap", *trajectory.columns)
        show_table(columns, list(_token_rows(trajectory, learned, decode)))
    else:
        show_segments([(_WORDS[kind], decode(trajectory.token_ids[places])) for kind, places in segments_of(trajectory)])


def _versions(trajectory: "Trajectory") -> str:
    versions = [str(int(version)) for version in trajectory.versions.versions]
    return " to ".join(dict.fromkeys([versions[0], versions[-1]])) if versions else "none"


def _range(values: Any) -> str:
    lowest, highest = float(values.min()), float(values.max())
    return f"{lowest:.4g}" if lowest == highest else f"{lowest:.4g} to {highest:.4g}"


def _gaps(trajectory: "Trajectory", learned: "LearnedAttempt") -> str:
    """Say how far the trained model's log-probabilities are from the sampler's."""
    gaps = abs(learned.trained_logprobs - trajectory.logprobs)
    return f"mean {float(gaps.mean()):.2g}, largest {float(gaps.max()):.2g} nats"


def _token_rows(
    trajectory: "Trajectory", learned: "LearnedAttempt | None", decode: Callable[[Any], str]
) -> Iterator[tuple[Any, ...]]:
    from skyrl_engine.rollout.exported import segments_of

    versions, drawn = trajectory.versions.per_token(len(trajectory.logprobs)), 0
    for kind, places in segments_of(trajectory):
        for place in range(places.start, places.stop):
            token = int(trajectory.token_ids[place])
            of_sampled: tuple[Any, ...] = ("",) * (5 + len(trajectory.columns))
            if _WORDS[kind] == "sampled":
                reward = float(trajectory.rewards[drawn])
                of_learned = ("", "")
                if learned is not None:
                    gap = learned.trained_logprobs[drawn] - trajectory.logprobs[drawn]
                    of_learned = (f"{learned.advantages[drawn]:.4g}", f"{gap:.1e}")
                shown = f"{reward:g}" if reward else ""
                of_sampled = (f"{trajectory.logprobs[drawn]:.4f}", int(versions[drawn]), shown, *of_learned)
                of_sampled += tuple(f"{values[drawn]:.4g}" for values in trajectory.columns.values())
                drawn += 1
            yield (place, _WORDS[kind], token, repr(decode([token]))[1:-1], *of_sampled)


# --- report ------------------------------------------------------------------------------------------------------------------------


@rollouts.command()
@_RUN
def report(run: Path) -> None:
    """Show how the run directory RUN went: the best, the median and the worst attempt of its first, middle and last step."""
    show_report(run)


def show_report(run: Path) -> None:
    """Print the best, the median and the worst attempt of the first, the middle and the last step that a run recorded and trained."""
    from skyrl_engine.cli.render import show_table

    index = _index_of(run)
    trained = sorted(step for step, tickets in index.trained.items() if any(ticket in index.groups for ticket in tickets))
    moments = list(dict.fromkeys(trained[place] for place in (0, (len(trained) - 1) // 2, -1))) if trained else []
    decode, rows = _decoder(run), []
    for step in moments:
        groups = [group for step_of_group, group in _groups(index, {step}) if step_of_group == step and group.dropped is None]
        attempts = sorted(
            (trajectory for group in groups for trajectory in group.finished), key=lambda trajectory: -trajectory.reward
        )
        if not attempts:
            continue
        parts = {"best": attempts[0], "median": attempts[len(attempts) // 2], "worst": attempts[-1]}
        rows += [(str(step), name, *_summary(trajectory, decode)) for name, trajectory in parts.items()]
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
    decode = _decoder(run)
    for place in shared[:limit]:
        for step, group in zip(steps, (before[place], after[place]), strict=True):
            best = max(group.finished, key=lambda trajectory: trajectory.reward, default=None)
            if best is not None:
                _show_attempt(_ShownAttempt(step, group, best), decode, tokens=False)


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
