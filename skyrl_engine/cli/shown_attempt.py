"""An attempt as `skyrl-engine rollouts` shows it: facts, and its text or a line per token."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_engine.contracts.values.rollout import Trajectory
    from skyrl_engine.rollout.arrow_codec import LearnedAttempt
    from skyrl_engine.rollout.moments import PlacedAttempt

_WORDS = ("prompt", "sampled", "observed")


def show_attempt(attempt: "PlacedAttempt", decode: Callable[[Any], str], *, tokens: bool) -> None:
    """Print an attempt, with a line per token if `tokens`."""
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
