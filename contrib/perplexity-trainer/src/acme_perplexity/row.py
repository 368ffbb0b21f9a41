"""The row of the trainer `perplexity`, and its options. Importing it does not import torch."""

from attrs import field, frozen
from attrs.validators import ge

from skyrl_engine.training import Trainer


@frozen
class PerplexityConfig:
    """Options of the table [perplexity]."""

    batch_size: int = field(default=64, validator=ge(1))
    """Samples that are scored together, over all ranks."""


PERPLEXITY = Trainer(
    "perplexity",
    tables=("data", "training", "evaluation", "checkpoint"),
    kinds=("collator", "loss", "correction", "reducer", "backend", "merger"),
    run="acme_perplexity.trainer:run_perplexity",
    plan="acme_perplexity.trainer:plan_perplexity",
    options="acme_perplexity.row:PerplexityConfig",
)
