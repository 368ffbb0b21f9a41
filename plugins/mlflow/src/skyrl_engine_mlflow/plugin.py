"""Entry point of the observer `mlflow`."""

from skyrl_engine import hookimpl
from skyrl_engine.tracking import Tracker
from skyrl_engine_mlflow.tracker import MlflowOptions, MlflowTracker


class MlflowPlugin:
    """The plugin object behind the entry point."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[MlflowOptions]:
        return MlflowOptions

    @hookimpl
    def skyrl_engine_make_observer(self, config: MlflowOptions) -> Tracker:
        return MlflowTracker(config)


mlflow = MlflowPlugin()
