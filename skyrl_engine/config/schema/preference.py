"""`[preference]`: training on preferences."""

from attrs import frozen


@frozen
class PreferenceConfig:
    """Training on preferences: the recipe. The reference stands in `[reference]`, the options of a loss in `[loss]`."""

    preset: str = "dpo"
    """A published recipe by name; every key of the configuration wins over it. `none` takes the engine's own defaults."""

    vocabulary_metrics: bool = False
    """Report `policy/entropy`, `logits/chosen` and `logits/rejected`, in training and evaluations; they cost passes over the vocabulary."""
