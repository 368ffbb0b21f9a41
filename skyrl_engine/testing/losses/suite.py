"""A pytest suite of the promises to losses.

    class TestMyLoss(LossConformance):
        plugin = "acme-losses:mine"
        options = {"gamma": 3.0}

and pytest runs every promise that the loss claims. Override `loss` to hand over a product without a plugin around it, and add
`oracle(self, tokens)`, which returns the values due in float64, to be held to a definition of your own.
"""

from typing import ClassVar

from skyrl_engine.contracts.kinds.loss import Loss
from skyrl_engine.testing.conformance import Conformance
from skyrl_engine.testing.losses.promises import LOSS_PROMISES


class LossConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the loss under test from `loss`.

    `surrogate_gradient = True` declares that the gradient is, on purpose, not that of the values.
    """

    kind = "loss"
    promises = LOSS_PROMISES
    offers = ("oracle",)
    flags = ("surrogate_gradient",)
    surrogate_gradient: ClassVar[bool] = False

    def loss(self) -> Loss:
        """Make the loss under test, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `loss`")
