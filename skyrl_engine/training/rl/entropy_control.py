"""The coefficient of the entropy bonus, steered towards a target entropy."""

from collections.abc import Mapping
from typing import Final

from attrs import define

from skyrl_engine.config.schema import EntropyControlConfig
from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.objective.parts import ObjectiveParts

ENTROPY: Final = "policy/entropy"
COEFFICIENT: Final = "policy/entropy_coef"
_NEEDS: Final = ("entropy",)


@define
class EntropyControl:
    """The adaptive entropy bonus of Skywork-OR1 (He et al. 2025, arXiv:2505.22312), as TRL's `use_adaptive_entropy` has it.

    After every optimizer step the coefficient rises by `delta` where the step's mean entropy per token was at or below the target, else it
    falls by as much, within [`lowest`, `highest`]. The next step applies it only where that entropy was at or below the target; the first
    applies none. Implements `Steering`. `term` is the name of the term in metrics, `entropy` the last one measured, in nats; None before
    the first.
    """

    config: EntropyControlConfig
    term: str
    coef: float
    entropy: float | None = None

    @classmethod
    def start(cls, config: EntropyControlConfig, objective: ObjectiveParts) -> "EntropyControl":
        """Steer the one term of the objective that is made of the entropy alone. Raises UnsupportedError where there is none, or several."""
        terms = [term for term in objective.terms if tuple(term.product.needs) == _NEEDS]
        if len(terms) != 1:
            raise UnsupportedError(
                f"[rl.entropy] steers the coefficient of the term of the entropy, and [[loss.terms]] has {len(terms) or 'none'} of them",
                remedy='Add one: [[loss.terms]] with use = "entropy" and coef = 0.0, the coefficient to begin with'
                if not terms
                else "Keep one of them",
            )
        return cls(config, terms[0].name, terms[0].coefficient)

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The coefficient of the next step."""
        applies = self.entropy is not None and self.entropy <= self.config.target
        return {self.term: self.coef if applies else 0.0}

    def observe(self, metrics: Mapping[str, Metric]) -> None:
        """Steer by the mean entropy over the tokens of a step that carry loss; a step without any changes nothing."""
        if ENTROPY not in metrics:
            return
        self.entropy = metrics[ENTROPY].result
        if self.entropy <= self.config.target:
            self.coef = min(self.coef + self.config.delta, self.config.highest)
        else:
            self.coef = max(self.coef - self.config.delta, self.config.lowest)
