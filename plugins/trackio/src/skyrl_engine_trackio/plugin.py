"""Entry point of the observer `trackio`."""

from skyrl_engine import hookimpl
from skyrl_engine.tracking import Tracker
from skyrl_engine_trackio.tracker import TrackioOptions, TrackioTracker


class TrackioPlugin:
    """The plugin object behind the entry point."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[TrackioOptions]:
        return TrackioOptions

    @hookimpl
    def skyrl_engine_make_observer(self, config: TrackioOptions) -> Tracker:
        return TrackioTracker(config)


trackio = TrackioPlugin()
