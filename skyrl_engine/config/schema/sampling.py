"""`[sampling]`: steps of trainer sft that train on the student's own answers to the rows' prompts."""

from attrs import field, frozen
from attrs.validators import ge, gt, le, lt


@frozen
class SamplingConfig:
    """Steps that train on the student's own answers to the prompts of their rows, which `[teacher]` judges (GKD, Agarwal et al. 2023)."""

    share: float = field(default=0.0, validator=[ge(0.0), le(1.0)])
    """Probability of such a step, drawn from `run.seed` and the step's number (`lmbda` of GKD); 0: every step trains on the rows' own answers.
    Above 0 the run has a table `[generator]`."""

    max_tokens: int = field(default=512, validator=ge(1))
    """Most tokens of a sampled answer."""

    temperature: float = field(default=1.0, validator=[gt(0.0), lt(float("inf"))])
    """Temperature that answers are sampled at. The loss compares at its own (`loss.temperature`); the sampler's log-probabilities are held
    against the model's at temperature 1 only."""
