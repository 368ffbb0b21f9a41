"""The kinds of plugin, one row each. A kind is an entry-point group, a factory hook, a contract and a page; nothing is hidden elsewhere."""

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen

CONFIG_SCHEMA_HOOK = "skyrl_engine_config_schema"
DESCRIBE_BACKEND_HOOK = "skyrl_engine_describe_backend"

OBSERVER_HOOKS = (
    "skyrl_engine_session_started",
    "skyrl_engine_step_finished",
    "skyrl_engine_evaluation_finished",
    "skyrl_engine_checkpoint_saved",
    "skyrl_engine_session_finished",
    "skyrl_engine_manifest_extra",
)
"""What the product of an observer's factory may implement; at least one of them."""


@frozen
class Kind:
    """One kind of plugin.

    `hooks` are those its plugins must implement, the factory first. `contract` is "module:Protocol" of the product, as text so that naming
    a kind imports nothing; None where any object with hook implementations will do. `late` are attributes of the contract that a product
    has only once it was set up. `instead` is what to do about a plugin that fails, where it is not to choose another.
    """

    name: str
    hooks: tuple[str, ...]
    contract: str | None
    late: frozenset[str] = frozenset()
    instead: str | None = None

    @property
    def alternative(self) -> str:
        """What to do when one plugin of this kind fails, beside correcting it: "choose another loss"."""
        return self.instead or f"choose another {self.name}"

    @property
    def group(self) -> str:
        """The entry-point group that a distribution declares."""
        return f"skyrl_engine.{self.name}"

    @property
    def factory_hook(self) -> str:
        return self.hooks[0]

    @property
    def page(self) -> str:
        return f"reference/hooks.md#{self.factory_hook}"

    @property
    def with_article(self) -> str:
        """The name as a sentence needs it: "a loss", "an observer"."""
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"


_ROWS = (
    Kind("collator", ("skyrl_engine_make_collator",), "skyrl_engine.contracts.kinds.collator:Collator"),
    Kind("loss", ("skyrl_engine_make_loss",), "skyrl_engine.contracts.kinds.loss:Loss"),
    Kind(
        "correction",
        ("skyrl_engine_make_correction",),
        "skyrl_engine.contracts.kinds.correction:Correction",
        instead="leave it out",
    ),
    Kind("reducer", ("skyrl_engine_make_reducer",), "skyrl_engine.contracts.kinds.reducer:Reducer"),
    Kind(
        "backend",
        ("skyrl_engine_make_backend", DESCRIBE_BACKEND_HOOK),
        "skyrl_engine.contracts.kinds.backend:Backend",
        late=frozenset({"coords"}),
    ),
    Kind("merger", ("skyrl_engine_make_merger",), "skyrl_engine.contracts.kinds.merger:Merger"),
    Kind("observer", ("skyrl_engine_make_observer",), None, instead="take it out of run.observers"),
)

KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _ROWS})
