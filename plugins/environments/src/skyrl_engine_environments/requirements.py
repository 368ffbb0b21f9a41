"""Check the packages that an environment needs in addition to the engine."""

import importlib.util

from skyrl_engine import PluginIncompatibleError


def require_package(package: str, extra: str) -> None:
    """Raises PluginIncompatibleError, with the command that installs it, where a package is missing."""
    if importlib.util.find_spec(package) is None:
        raise PluginIncompatibleError(
            f"the environment {extra} needs the package {package}, which is not installed",
            remedy=f'python -m pip install "skyrl-engine-environments[{extra.replace("_", "-")}]"',
        )
