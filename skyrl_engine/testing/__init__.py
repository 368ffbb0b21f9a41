"""The conformance kit: a suite for pytest per kind of plugin, `verify` for programs, and Hypothesis strategies of samples and layouts.

Tests of plugins import from here; the files that define them may move between minor versions. A name is imported when it is first used, so that
importing the package brings neither torch nor Hypothesis.
"""

from typing import TYPE_CHECKING

from skyrl_engine.lazy import lazily

if TYPE_CHECKING:
    from skyrl_engine.testing.advantages.suite import AdvantageConformance
    from skyrl_engine.testing.backends.suite import BackendConformance
    from skyrl_engine.testing.collators.strategies import layouts, sample_columns, sample_lengths
    from skyrl_engine.testing.collators.suite import CollatorConformance
    from skyrl_engine.testing.conformance import Conformance
    from skyrl_engine.testing.corrections.suite import CorrectionConformance
    from skyrl_engine.testing.environments.suite import EnvironmentConformance
    from skyrl_engine.testing.generators.suite import GeneratorConformance
    from skyrl_engine.testing.group_filters.suite import GroupFilterConformance
    from skyrl_engine.testing.kit import promises_of, verify
    from skyrl_engine.testing.losses.suite import LossConformance
    from skyrl_engine.testing.mergers.suite import MergerConformance
    from skyrl_engine.testing.observers.suite import ObserverConformance
    from skyrl_engine.testing.promise import Broken, Finding, Promise, Undecidable, Verdict
    from skyrl_engine.testing.reducers.suite import ReducerConformance
    from skyrl_engine.testing.schedules import verify_schedule
    from skyrl_engine.testing.subject import Subject, select_plugin

__all__ = [
    "AdvantageConformance",
    "BackendConformance",
    "Broken",
    "CollatorConformance",
    "Conformance",
    "CorrectionConformance",
    "EnvironmentConformance",
    "Finding",
    "GeneratorConformance",
    "GroupFilterConformance",
    "LossConformance",
    "MergerConformance",
    "ObserverConformance",
    "Promise",
    "ReducerConformance",
    "Subject",
    "Undecidable",
    "Verdict",
    "layouts",
    "promises_of",
    "sample_columns",
    "sample_lengths",
    "select_plugin",
    "verify",
    "verify_schedule",
]

_HOMES = {
    "AdvantageConformance": "advantages.suite",
    "BackendConformance": "backends.suite",
    "Broken": "promise",
    "CollatorConformance": "collators.suite",
    "Conformance": "conformance",
    "CorrectionConformance": "corrections.suite",
    "EnvironmentConformance": "environments.suite",
    "Finding": "promise",
    "GeneratorConformance": "generators.suite",
    "GroupFilterConformance": "group_filters.suite",
    "LossConformance": "losses.suite",
    "MergerConformance": "mergers.suite",
    "ObserverConformance": "observers.suite",
    "Promise": "promise",
    "ReducerConformance": "reducers.suite",
    "Subject": "subject",
    "Undecidable": "promise",
    "Verdict": "promise",
    "layouts": "collators.strategies",
    "promises_of": "kit",
    "sample_columns": "collators.strategies",
    "sample_lengths": "collators.strategies",
    "select_plugin": "subject",
    "verify": "kit",
    "verify_schedule": "schedules",
}


__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
