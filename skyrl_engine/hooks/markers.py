"""The pluggy markers every plugin and the engine itself use."""

import pluggy

PROJECT = "skyrl_engine"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
