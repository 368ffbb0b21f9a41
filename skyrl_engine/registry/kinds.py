"""The kinds of plugin, one row each: a row names everything that the engine, its command line and its kit know of a kind.

A new kind is a row here, a file in `contracts/kinds/`, its hooks in `hooks/spec.py` and `docs/reference/hooks.md`, a suite, a scaffold and
a how-to page. A row names objects as text, "module:name", so that naming a kind imports nothing; `import_object` reads such a text.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

CONFIG_SCHEMA_HOOK = "skyrl_engine_config_schema"
DESCRIBE_BACKEND_HOOK = "skyrl_engine_describe_backend"
DESCRIBE_GENERATOR_HOOK = "skyrl_engine_describe_generator"

OBSERVER_HOOKS = (
    "skyrl_engine_session_started",
    "skyrl_engine_rollouts_finished",
    "skyrl_engine_step_finished",
    "skyrl_engine_evaluation_finished",
    "skyrl_engine_checkpoint_saved",
    "skyrl_engine_session_finished",
    "skyrl_engine_manifest_extra",
)

_PLUGIN_TABLE = "skyrl_engine.config.schema.tables:PluginTable"

AUTO = "auto"
"""Stands for a value, or a plugin, that the engine chooses while it plans a run."""


@frozen
class Kind:
    """One kind of plugin."""

    name: str

    hooks: tuple[str, ...]
    """Hooks that its plugins must implement, the factory first."""

    contract: str | None = None
    """Protocol of the product; None where any object will do that implements one of `product_hooks`."""

    late: frozenset[str] = field(default=frozenset(), kw_only=True)
    """Attributes of the contract that a product has only once it was set up."""

    values: str | None = field(default=None, kw_only=True)
    """Function from a product to what is wrong with the values it declares, sentence by sentence."""

    product_hooks: tuple[str, ...] = field(default=(), kw_only=True)
    """Hooks that the product implements itself, at least one of them."""

    table: str | None = field(default=None, kw_only=True)
    """Class of the configuration table, named after the kind, that selects a plugin; None where something else selects it."""

    default: str | None = field(default=None, kw_only=True)
    """Plugin that is selected where nobody says which, or AUTO; every kind with a table has one."""

    automatic: str | None = field(default=None, kw_only=True)
    """Distribution of the plugins that AUTO may stand for; None where it stands for none of this kind."""

    option: bool = field(default=False, kw_only=True)
    """Commands that train have an option, named after the kind, that selects a plugin."""

    suite: str = field(kw_only=True)
    """Promises that plugins of this kind are held to."""

    scaffold: str | None = field(default=None, kw_only=True)
    """Example that `plugins new` writes; without it `no_scaffold` says why, and `start_from` what to begin with."""

    no_scaffold: str = field(default="", kw_only=True)

    start_from: str = field(default="", kw_only=True)

    instead: str | None = field(default=None, kw_only=True)
    """Remedy for a plugin that fails; None: choose another one."""

    @property
    def alternative(self) -> str:
        """Return the remedy for a plugin that fails, other than correcting it: "choose another loss"."""
        return self.instead or f"choose another {self.name}"

    @property
    def group(self) -> str:
        """Return the entry-point group that a distribution declares."""
        return f"skyrl_engine.{self.name}"

    @property
    def factory_hook(self) -> str:
        return self.hooks[0]

    @property
    def page(self) -> str:
        """Return the path of the kind's documentation page, under docs/."""
        return f"reference/hooks.md#{self.factory_hook}"

    @property
    def with_article(self) -> str:
        """Return the name with its article: "a loss", "an observer"."""
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"


def import_object(text: str) -> Any:
    """Import the object that a row names as "module:name"."""
    module, _, name = text.partition(":")
    return getattr(import_module(module), name)


_ROWS = (
    Kind(
        "collator",
        ("skyrl_engine_make_collator",),
        "skyrl_engine.contracts:Collator",
        values="skyrl_engine.registry.values:of_collator",
        table=_PLUGIN_TABLE,
        default=AUTO,
        automatic="skyrl-engine-collators",
        option=True,
        suite="skyrl_engine.testing.collators.promises:COLLATOR_PROMISES",
        scaffold="skyrl_engine.cli.scaffold.examples:COLLATOR",
    ),
    Kind(
        "loss",
        ("skyrl_engine_make_loss",),
        "skyrl_engine.contracts:Loss",
        values="skyrl_engine.registry.values:of_loss",
        table="skyrl_engine.config.schema.tables:LossTable",
        default="cross_entropy",
        option=True,
        suite="skyrl_engine.testing.losses.promises:LOSS_PROMISES",
        scaffold="skyrl_engine.cli.scaffold.examples:LOSS",
    ),
    Kind(
        "correction",
        ("skyrl_engine_make_correction",),
        "skyrl_engine.contracts:Correction",
        values="skyrl_engine.registry.values:of_correction",
        suite="skyrl_engine.testing.corrections.promises:CORRECTION_PROMISES",
        scaffold="skyrl_engine.cli.scaffold.examples:CORRECTION",
        instead="leave it out",
    ),
    Kind(
        "reducer",
        ("skyrl_engine_make_reducer",),
        "skyrl_engine.contracts:Reducer",
        values="skyrl_engine.registry.values:of_reducer",
        table=_PLUGIN_TABLE,
        default="token_mean",
        option=True,
        suite="skyrl_engine.testing.reducers.promises:REDUCER_PROMISES",
        scaffold="skyrl_engine.cli.scaffold.examples:REDUCER",
    ),
    Kind(
        "backend",
        ("skyrl_engine_make_backend", DESCRIBE_BACKEND_HOOK),
        "skyrl_engine.contracts:Backend",
        late=frozenset({"coords"}),
        table=_PLUGIN_TABLE,
        default="fsdp",
        option=True,
        suite="skyrl_engine.testing.backends.promises:BACKEND_PROMISES",
        no_scaffold=(
            "it holds a model, its parallel layout, its optimizer and its checkpoints, and a few generated lines of that would only look "
            "like one"
        ),
        start_from="a copy of plugins/fsdp, which is small because skyrl_engine.modeling does what backends share",
    ),
    Kind(
        "merger",
        ("skyrl_engine_make_merger",),
        "skyrl_engine.contracts:Merger",
        table=_PLUGIN_TABLE,
        default="ordered",
        option=True,
        suite="skyrl_engine.testing.mergers.promises:MERGER_PROMISES",
        scaffold="skyrl_engine.cli.scaffold.examples:MERGER",
    ),
    Kind(
        "advantage",
        ("skyrl_engine_make_advantage",),
        "skyrl_engine.contracts:Advantage",
        values="skyrl_engine.registry.values:of_advantage",
        table=_PLUGIN_TABLE,
        default="grpo",
        option=True,
        suite="skyrl_engine.testing.advantages.promises:ADVANTAGE_PROMISES",
        scaffold="skyrl_engine.cli.scaffold.examples:ADVANTAGE",
    ),
    Kind(
        "environment",
        ("skyrl_engine_make_environment",),
        "skyrl_engine.contracts:Environment",
        values="skyrl_engine.registry.values:of_environment",
        suite="skyrl_engine.testing.environments.promises:ENVIRONMENT_PROMISES",
        scaffold="skyrl_engine.cli.scaffold.examples:ENVIRONMENT",
    ),
    Kind(
        "group_filter",
        ("skyrl_engine_make_group_filter",),
        "skyrl_engine.contracts:GroupFilter",
        suite="skyrl_engine.testing.group_filters.promises:GROUP_FILTER_PROMISES",
        scaffold="skyrl_engine.cli.scaffold.examples:GROUP_FILTER",
        instead="leave it out",
    ),
    Kind(
        "generator",
        ("skyrl_engine_make_generator", DESCRIBE_GENERATOR_HOOK),
        "skyrl_engine.contracts:Generator",
        table="skyrl_engine.config.schema.tables:GeneratorTable",
        default="hf",
        option=True,
        suite="skyrl_engine.testing.generators.promises:GENERATOR_PROMISES",
        scaffold="skyrl_engine.cli.scaffold.examples:GENERATOR",
    ),
    Kind(
        "observer",
        ("skyrl_engine_make_observer",),
        product_hooks=OBSERVER_HOOKS,
        suite="skyrl_engine.testing.observers.promises:OBSERVER_PROMISES",
        scaffold="skyrl_engine.cli.scaffold.examples:OBSERVER",
        instead="take it out of run.observers",
    ),
)

KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _ROWS})

TABLES: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _ROWS if kind.table is not None})
"""Kinds that a configuration table of their name selects."""
