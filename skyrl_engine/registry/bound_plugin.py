"""A plugin at work in a run."""

from typing import Generic, TypeVar

from attrs import frozen

from skyrl_engine.contracts.values.roles import Role
from skyrl_engine.registry.owner import Owner

Product = TypeVar("Product")


@frozen(eq=False)
class BoundPlugin(Generic[Product]):
    """A plugin's product at work: its owner, its place in the configuration, its name in metrics, its coefficient.

    `place` is a key of the configuration: `collator`, `loss.terms[0]`. `coefficient` multiplies the values of a term of the objective, and
    `on` limits a term to samples of that role.
    """

    product: Product
    owner: Owner
    place: str
    name: str
    coefficient: float = 1.0
    on: Role | None = None

    @property
    def label(self) -> str:
        """Return the plugin as errors name it: its kind, name, distribution and version."""
        return self.owner.label
