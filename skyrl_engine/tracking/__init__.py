"""Send runs to trackers: one base for all of them. Public to plugins; a tracker's own package is imported when a run starts."""

from skyrl_engine.tracking.options import TrackerOptions
from skyrl_engine.tracking.tables import TrackedTable
from skyrl_engine.tracking.tracker import TrackedRun, Tracker

__all__ = ["TrackedRun", "TrackedTable", "Tracker", "TrackerOptions"]
