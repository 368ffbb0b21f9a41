"""The best checkpoint of a run by a metric of its evaluations, and how long the run has waited for a better one."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import define

from skyrl_engine.config.schema import EvaluationConfig
from skyrl_engine.config.schema.evaluation import Extreme
from skyrl_engine.errors import CheckpointError, ConfigError, Problem
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.run.checkpoint import BEST_DOCUMENT, Checkpoint, CheckpointStore

logger = logging.getLogger(__name__)


@define
class BestCheckpoint:
    """The best evaluation so far: its optimizer `step` and `score`, None before the first one that was finite.

    `mark` is the score that an improvement is measured from, and `stalled` counts evaluations in a row without one. All of it is saved with
    every checkpoint.
    """

    metric: str
    best_is: Extreme
    step: int | None = None
    score: float | None = None
    mark: float | None = None
    stalled: int = 0

    @classmethod
    def restore(cls, config: EvaluationConfig, checkpoint: Checkpoint | None, store: CheckpointStore) -> "BestCheckpoint | None":
        """Go on from what a checkpoint says (None: from nothing); None for a run that looks for no best one.

        A checkpoint that looked at another metric says nothing. Raises CheckpointError where the best checkpoint is no longer there.
        """
        extreme = config.find_extreme()
        if extreme is None:
            return None
        assert config.best is not None, "a metric without a name has no best value"
        begun = cls(config.best, extreme)
        if checkpoint is None:
            return begun
        if (saved := checkpoint.read_best()) is None:
            logger.warning("%s was written without evaluation.best: the best one is looked for from here on", checkpoint.path)
            return begun
        try:
            restored = cls(**saved)
        except TypeError as error:
            raise checkpoint.damage_error(f"{BEST_DOCUMENT} is not as it was written ({error})") from error
        if (restored.metric, restored.best_is) != (begun.metric, begun.best_is):
            logger.warning(
                "evaluation.best was the %s %s: the %s %s is looked for from here on",
                restored.best_is,
                restored.metric,
                begun.best_is,
                begun.metric,
            )
            return begun
        if restored.step is not None and all(kept.step != restored.step for kept in store.all()):
            raise CheckpointError(
                f"the best checkpoint, of step {restored.step}, is no longer in {store.directory}",
                remedy="Put it back, go on from another checkpoint, or remove evaluation.best",
            )
        return restored

    def require_metric(self, metrics: Mapping[str, float]) -> float:
        """Return the metric among those of an evaluation. Raises ConfigError with their names where it is not."""
        if self.metric in metrics:
            return metrics[self.metric]
        suggestion = did_you_mean(self.metric, metrics)
        raise ConfigError(
            [
                Problem(
                    "evaluation.best",
                    f"evaluations report no metric {self.metric!r}; they report {', '.join(sorted(metrics))}",
                    suggestion or "Name one of these",
                )
            ]
        )

    def look(self, step: int, metrics: Mapping[str, float], min_delta: float) -> bool:
        """Take in the evaluation after a step, and return True where it is the best so far; one that is not finite never is.

        Raises ConfigError for a metric that no evaluation reported yet.
        """
        # an evaluation before this one was finite, or brought no improvement: it had the metric
        was_reported = self.mark is not None or self.stalled > 0
        if was_reported and self.metric not in metrics:
            logger.warning(
                "the evaluation after step %d reports no %s, and counts as one without an improvement", step, self.metric
            )
            score = math.nan
        else:
            score = self.require_metric(metrics)
        if self._gain(score, self.mark) > min_delta:
            self.mark, self.stalled = score, 0
        else:
            self.stalled += 1
        if self._gain(score, self.score) > 0:
            self.step, self.score = step, score
            return True
        return False

    def document(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, in JSON values."""
        return attrs.asdict(self)

    def _gain(self, score: float, earlier: float | None) -> float:
        if not math.isfinite(score):
            return -math.inf
        if earlier is None:
            return math.inf
        return earlier - score if self.best_is == "lowest" else score - earlier
