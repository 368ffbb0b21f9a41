"""A loss as the documentation prints it, and what it is where it is loaded."""

from pathlib import Path

import attrs

from skyrl_engine import LossTokens
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.resolve import Registry

FOCAL = '''
from attrs import define
from skyrl_engine import loss

@define
class FocalConfig:
    gamma: float = 2.0

@loss(needs=("logprobs",), config=FocalConfig)
def focal(tokens, config):
    """Focal cross-entropy (Lin et al. 2017, eq. 4), float32[n]."""
    miss = 1 - tokens.logprobs.exp()
    return -(miss ** config.gamma) * tokens.logprobs
'''


def resolve(reference: str, kind: str = "loss", base: Path | None = None) -> PluginRecord:
    return Registry.discover().resolve(kind, reference, base=base)


def is_focal(loaded) -> None:
    import torch

    assert [(field.name, field.default) for field in attrs.fields(loaded.schema)] == [("gamma", 2.0)]
    focal = loaded.make(loaded.schema(gamma=1.0), FactoryContext())
    assert (focal.name, focal.needs, focal.reducers, focal.batch_local) == ("focal", ("logprobs",), None, False)
    logprobs = torch.tensor([-0.5, -2.0])
    tokens = LossTokens({"logprobs": logprobs}, None, None)  # type: ignore[arg-type]  # focal reads logprobs only
    torch.testing.assert_close(focal(tokens), -(1 - logprobs.exp()) * logprobs)
