"""The guard against a sampler that does not hold the weights it was given."""

from typing import Literal

from attrs import define

from skyrl_engine.errors import RolloutError


@define
class SamplerGuard:
    """Compares the sampler's log-probabilities with the model's, step by step; two steps in a row above `limit` stop the run.

    `limit` is in nats, the mean distance per sampled token; None: nothing stops the run. `above` counts steps in a row.
    """

    limit: float | None
    above: int = 0

    @classmethod
    def of(cls, max_gap: float | Literal["auto", "off"], precision: str) -> "SamplerGuard":
        """Make a guard of `rl.max_gap`, for a model that computes in `precision`."""
        if max_gap == "off":
            return cls(None)
        return cls((1e-3 if precision in ("float32", "float64") else 0.05) if max_gap == "auto" else float(max_gap))

    def look(self, gap: float, version: int) -> None:
        """Take the mean distance of tokens that the weights of `version` sampled. Raises RolloutError for the second one too large."""
        if self.limit is None:
            return
        # not <=: a distance that is no number is too large
        self.above = 0 if gap <= self.limit else self.above + 1
        if self.above >= 2:
            raise RolloutError(
                f"the sampler's log-probabilities differ from the model's by {gap:.3g} nats per token, at version {version} and the one "
                f"before it: above {self.limit:g}, the sampler does not hold the weights it was given, or computes with less precision",
                remedy="Check how the generator takes weights; if the distance is its precision, raise rl.max_gap",
            )
