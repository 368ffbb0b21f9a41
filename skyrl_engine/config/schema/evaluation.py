"""`[evaluation]`: the steps at which to evaluate, the best checkpoint, and an early end."""

from fnmatch import fnmatchcase
from typing import Final, Literal

from attrs import field, frozen
from attrs.validators import ge, in_, lt, min_len, optional

Extreme = Literal["lowest", "highest"]
"""The end of a metric's scale that is best."""

_LOWEST: Final = ("*loss*", "*perplexity*", "*error*", "*_kl", "*/kl", "kl", "*divergence*")
_HIGHEST: Final = (
    *("*avg@*", "*pass@*", "*maj@*", "*success*", "*accurac*", "*margins*", "steps/right", "*exact_match*"),
    *("*reward*mean", "evaluation/*reward*"),
)


def find_best_end(metric: str) -> Extreme | None:
    """Return which end of a metric's scale is best, by its name; None where the name does not tell."""
    if any(fnmatchcase(metric, pattern) for pattern in _LOWEST):
        return "lowest"
    return "highest" if any(fnmatchcase(metric, pattern) for pattern in _HIGHEST) else None


def list_pass_numbers(samples: int) -> list[int]:
    """Return the numbers k of the pass@k that an evaluation of `samples` attempts per task reports: 1, 2, 4 and so on, and `samples`."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})


@frozen
class EvaluationConfig:
    """The steps at which to evaluate on the held-out data, the best checkpoint, and an early end."""

    every: int | None = field(default=None, validator=optional(ge(1)))
    """Optimizer steps between two evaluations; none: only those that the keys below ask for."""

    at_start: bool = False
    """Evaluate before the first step; needs held-out data."""

    at_end: bool = True
    """Evaluate after the last step, if there is held-out data."""

    best: str | None = field(default=None, validator=optional(min_len(1)))
    """Metric of evaluations, such as `loss`, by which the best checkpoint is kept whatever `checkpoint.keep` says, and exported at the end.
    Evaluations before the first step do not count. none: the last step's model is exported."""

    best_is: Literal["auto", "lowest", "highest"] = field(default="auto", validator=in_(("auto", "lowest", "highest")))
    """The best value of `best`. `auto`: the lowest of losses; the highest of rewards, shares of successes and accuracies."""

    patience: int | None = field(default=None, validator=optional(ge(1)))
    """Evaluations in a row without an improvement of `best` by more than `min_delta` after which the run ends; none: it never ends early."""

    min_delta: float = field(default=0.0, validator=[ge(0.0), lt(float("inf"))])
    """Difference that `patience` asks of an improvement; the best checkpoint is the best one by any difference."""

    samples: int = field(default=1, validator=ge(1))
    """Attempts per held-out task, of trainer rl: they give avg@k and pass@k for k up to this number."""

    tasks: int = field(default=64, validator=ge(1))
    """Held-out tasks to attempt in one evaluation, of trainer rl; all where an environment has fewer."""

    temperature: float = field(default=0.0, validator=[ge(0.0), lt(float("inf"))])
    """Temperature to attempt held-out tasks with, of trainer rl; 0 takes the most likely token."""

    def find_extreme(self) -> Extreme | None:
        """Return which value of `best` is the best one; None where neither the configuration nor the metric says it, or there is none."""
        if self.best is None:
            return None
        if self.best_is != "auto":
            return self.best_is
        return find_best_end(self.best)
