"""Entry point of the observer `wandb`."""

from skyrl_engine import hookimpl
from skyrl_engine.tracking import Tracker
from skyrl_engine_wandb.tracker import WandbOptions, WandbTracker


class WandbPlugin:
    """The plugin object behind the entry point."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[WandbOptions]:
        return WandbOptions

    @hookimpl
    def skyrl_engine_make_observer(self, config: WandbOptions) -> Tracker:
        return WandbTracker(config)


wandb = WandbPlugin()
