"""Charts of a report: which metrics each shows, and what it tells."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Literal

from attrs import frozen


@frozen
class Chart:
    """Metrics of one unit in one picture. `metrics` are patterns of names, in the order of the lines."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    tells: str
    """One sentence for the reader."""

    kind: Literal["lines", "stack"] = "lines"
    band: tuple[str, str] | None = None
    """Metrics of the lowest and the highest value, drawn as an area behind the first line."""

    source: Literal["steps", "spans", "evaluations"] = "steps"
    beside: str | None = None
    """A metric of evaluations that is drawn into the same picture, such as the loss on held-out data."""

    def choose(self, names: Iterable[str]) -> list[str]:
        """Return the names that the chart shows, in the order of its patterns."""
        listed = list(names)
        ends = {name for each in listed for name in bounds_of(each) if name in listed}
        return list(
            dict.fromkeys(name for pattern in self.metrics for name in listed if fnmatchcase(name, pattern) and name not in ends)
        )


def bounds_of(name: str) -> tuple[str, str]:
    """Return the names of the metrics that are the ends of an interval around another, where a run records one."""
    return f"{name}_low", f"{name}_high"


@frozen
class ChartGroup:
    """Charts under one heading."""

    title: str
    charts: tuple[Chart, ...]


SECTIONS = (
    ChartGroup(
        "Reward",
        (
            Chart(
                "Reward",
                "reward",
                ("reward/mean", "reward/all_mean"),
                "Mean reward of the attempts that are trained on; all_mean counts dropped groups too, so that a filter cannot make it climb.",
                band=("reward/min", "reward/max"),
            ),
            Chart("Parts of the reward", "reward", ("reward/part/*", "reward/model_mean"), "The mean of each part of the reward."),
            Chart("Reward by environment", "reward", ("reward/*/mean",), "The mean reward in each environment."),
            Chart(
                "Success",
                "share",
                ("rollout/success", "rollout/pass@*", "rollout/maj@*", "rollout/*/success"),
                "Share of attempts, or of tasks, that succeed.",
            ),
        ),
    ),
    ChartGroup(
        "Preferences",
        (
            Chart("Margin", "reward", ("rewards/margins",), "By how much the chosen answer is ahead of the rejected one."),
            Chart(
                "Margin of rewards",
                "reward",
                ("reward/pair_margin",),
                "By how much the chosen attempt's reward is ahead, where attempts make pairs.",
            ),
            Chart(
                "Implicit rewards",
                "reward",
                ("rewards/chosen", "rewards/rejected"),
                "Both falling together is common, and no sign of learning.",
            ),
            Chart("Accuracy", "share", ("rewards/accuracies", "accuracy"), "Share of pairs whose chosen answer is ahead."),
            Chart(
                "Accuracy by source",
                "share",
                ("rewards/accuracies/*",),
                "Share of each dataset's pairs whose chosen answer is ahead.",
            ),
            Chart("Log-probabilities", "nats", ("logps/*",), "Of whole answers, mean over the batch."),
        ),
    ),
    ChartGroup(
        "Learning",
        (
            Chart(
                "Loss",
                "",
                ("loss",),
                "The objective of each step, and the loss on held-out data where there is any.",
                beside="loss",
            ),
            Chart("Loss by source", "", ("loss/*",), "The loss on each dataset or environment."),
            Chart("Gradient norm", "", ("grad_norm",), "Before clipping; spikes come before a run diverges."),
            Chart("Learning rate", "", ("learning_rate",), "Of each step."),
            Chart("Clipped tokens", "share", ("clip_fraction*", "*/clip_fraction"), "Share of tokens whose ratio the loss clips."),
            Chart("Distance from the old policy", "nats", ("approximate_kl",), "An estimate of the divergence within a step."),
            Chart(
                "Distance from the reference",
                "nats",
                ("reference_kl", "reward/kl", "teacher/divergence"),
                "An estimate per token, or per attempt for reward/kl.",
            ),
        ),
    ),
    ChartGroup(
        "Evaluation",
        (
            Chart("Loss on held-out data", "", ("loss", "loss/*"), "Mean over loss weights.", source="evaluations"),
            Chart(
                "Success on held-out tasks",
                "share",
                ("evaluation/pass@*", "evaluation/avg@*", "evaluation/maj@*"),
                "With its 95% interval where the run records one.",
                source="evaluations",
            ),
            Chart(
                "Reward on held-out tasks",
                "reward",
                ("evaluation/reward*", "evaluation/*/reward*"),
                "Mean over held-out tasks.",
                source="evaluations",
            ),
            Chart(
                "Length on held-out tasks",
                "tokens",
                ("evaluation/tokens_*",),
                "Sampled tokens of an attempt.",
                source="evaluations",
            ),
        ),
    ),
    ChartGroup(
        "Policy",
        (
            Chart("Entropy", "nats", ("policy/entropy", "entropy*"), "Falling to 0 means that the model always says the same."),
            Chart(
                "Sampler against trainer",
                "nats",
                ("policy/gap_mean", "policy/gap_max", "policy/gap_stale_mean"),
                "Distance of the sampler's log-probabilities from the trainer's: rounding alone gives 1e-7 in float32 and 1e-2 in bfloat16.",
            ),
            Chart("Effective sample size", "share", ("policy/ess",), "1 where the sampler is the trained policy."),
            Chart("Ratio to the old policy", "ratio", ("policy/ratio_mean", "policy/ratio_max"), "Of the trained tokens."),
            Chart("Corrections", "", ("corrections/*",), "What corrections of stale or mismatched samples did."),
        ),
    ),
    ChartGroup(
        "Rollouts",
        (
            Chart("Length", "tokens", ("rollout/tokens_mean", "rollout/tokens_max"), "Sampled tokens of an attempt."),
            Chart("Turns", "turns", ("rollout/turns_mean",), "Of the model in an attempt."),
            Chart(
                "Ends",
                "share",
                ("rollout/truncated", "rollout/stopped_by/*", "rollout/tool_problems"),
                "Why turns and attempts ended.",
            ),
            Chart(
                "Dropped and failed",
                "share",
                ("rollout/zero_variance", "rollout/dropped/*", "rollout/failed"),
                "Groups that taught nothing, and attempts that failed.",
            ),
            Chart("Environment", "", ("environment/*/mean",), "Metrics that environments give."),
            Chart(
                "Staleness",
                "steps",
                ("async/staleness_mean", "async/staleness_max"),
                "Steps between the weights that sampled and those that train.",
            ),
            Chart("Groups", "groups", ("async/groups_ready", "async/groups_running"), "Waiting to be trained on, and under way."),
        ),
    ),
    ChartGroup(
        "Time and memory",
        (
            Chart(
                "Time of a step by phase",
                "s",
                ("time/*",),
                "Wall seconds of the controller; the phases add up to the step.",
                kind="stack",
            ),
            Chart("Time of a step", "s", ("seconds",), "Wall seconds."),
            Chart(
                "CPU time of a step by span",
                "CPU s",
                ("*",),
                "Summed over the controller and all ranks.",
                kind="stack",
                source="spans",
            ),
            Chart("Throughput", "tokens / s", ("tokens_per_second", "rollout/tokens_per_second"), "Without padding."),
            Chart(
                "Padding and sharing",
                "share",
                ("padding_share", "shared_share"),
                "Part of the dense batch that is padding, and part of the tokens that others share and that is computed once.",
            ),
            Chart(
                "Waiting", "s", ("async/*waited_seconds", "async/drain_seconds"), "Training for samples, and sampling for weights."
            ),
            Chart(
                "Memory by rank",
                "bytes",
                ("memory/*",),
                "Peak since the step before: of tensors on a GPU, of the process on CPUs.",
            ),
            Chart("Compilation", "s", ("compile_seconds",), "Of the slowest rank."),
        ),
    ),
)


def list_charts(steps: Iterable[str], spans: Iterable[str], evaluations: Iterable[str]) -> Iterator[ChartGroup]:
    """Yield the sections whose charts have something to show, and behind them one with every metric that none of them shows."""
    names = {"steps": list(steps), "spans": list(spans), "evaluations": list(evaluations)}
    shown: set[tuple[str, str]] = set()
    for section in SECTIONS:
        charts = tuple(chart for chart in section.charts if chart.choose(names[chart.source]))
        for chart in charts:
            shown.update((chart.source, name) for name in _list_shown(chart, names[chart.source]))
        if charts:
            yield ChartGroup(section.title, charts)
    rest = [(source, name) for source in ("steps", "evaluations") for name in names[source] if (source, name) not in shown]
    if rest:
        yield ChartGroup(OTHERS, tuple(Chart(name, "", (_quote(name),), "", source=source) for source, name in rest))  # type: ignore[arg-type]


OTHERS = "Other metrics"


def _list_shown(chart: Chart, names: list[str]) -> list[str]:
    """Return all metrics that a chart draws, as lines or as the ends of an interval."""
    chosen = chart.choose(names)
    return [*chosen, *(chart.band or ()), *(end for name in chosen for end in bounds_of(name))]


def _quote(name: str) -> str:
    """Return the pattern that the name alone fits."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
