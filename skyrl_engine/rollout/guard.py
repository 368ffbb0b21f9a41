"""The guard against a sampler that does not hold the weights it was given."""

import logging

from attrs import define

from skyrl_engine.errors import RolloutError

logger = logging.getLogger(__name__)


@define
class SamplerGuard:
    """Compares the sampler's log-probabilities with the model's, step by step; two steps in a row above `limit` stop the run.

    `limit` is in nats, the mean distance per sampled token; `stops` False warns instead. `above` counts steps in a row.
    """

    limit: float
    stops: bool = True
    above: int = 0

    @classmethod
    def of(cls, max_gap: float | None, precision: str, *, stops: bool = True) -> "SamplerGuard":
        """Make a guard with this limit, or with that of the precision in which the model computes."""
        return cls((0.05 if precision == "bfloat16" else 1e-3) if max_gap is None else max_gap, stops)

    def look(self, gap: float, version: int, gap_to_first: float | None = None) -> None:
        """Take the mean distance of tokens that the weights of `version` sampled. Raises RolloutError for the second one too large.

        `gap_to_first` is the distance from the weights that the run began with, where they are still at hand: a small one says what is wrong.
        """
        # not <=: a distance that is no number is too large
        self.above = 0 if gap <= self.limit else self.above + 1
        if self.above < 2:
            return
        cause = (
            f"the sampler's log-probabilities differ from the model's by {gap:.3g} nats per token, at version {version} and the one before it: "
            f"above {self.limit:g}, the sampler does not hold the weights it was given, or computes with less precision"
        )
        if gap_to_first is not None and gap_to_first <= self.limit:
            cause += "; its log-probabilities are those of version 0, so no update has reached it"
        if self.stops:
            raise RolloutError(
                cause, remedy="Check how the generator takes weights; if the distance is its precision, raise rl.max_gap"
            )
        logger.warning("%s", cause)
