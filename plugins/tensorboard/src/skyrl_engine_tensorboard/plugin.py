"""Entry point of the observer `tensorboard`."""

from skyrl_engine import hookimpl
from skyrl_engine.tracking import Tracker
from skyrl_engine_tensorboard.event_files import EventFiles, TensorboardOptions


class TensorboardPlugin:
    """The plugin object behind the entry point."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[TensorboardOptions]:
        return TensorboardOptions

    @hookimpl
    def skyrl_engine_make_observer(self, config: TensorboardOptions) -> Tracker:
        return EventFiles(config)


tensorboard = TensorboardPlugin()
