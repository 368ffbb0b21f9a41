"""Tell every observer the events of a run. An observer that fails stops the run and is named; none is dropped quietly."""

from collections.abc import Iterable
from typing import Any

from skyrl_engine.contracts.kinds.observer import (
    CheckpointSaved,
    EvaluationFinished,
    RolloutsFinished,
    SessionFinished,
    SessionStarted,
    StepFinished,
)
from skyrl_engine.errors import ContractError
from skyrl_engine.registry.host import PluginHost
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.owner import Owner
from skyrl_engine.registry.product import check_hooks

KIND = KINDS["observer"]


class ObserverBus:
    """Broadcasts events to observers in pluggy's order: the last registered first, `tryfirst` and `trylast` before and after.

    Every method raises PluginBrokenError naming the observer that failed; an EngineError that an observer raises passes as it is.
    """

    def __init__(self, observers: Iterable[object] = ()) -> None:
        self._host = PluginHost()
        for observer in observers:
            self.register(observer)

    def register(self, observer: object, name: str | None = None) -> None:
        """Add an observer, known in errors by `name` (None: its class's). One that comes late gets the event that the session started.

        Raises ContractError when it implements no observer hook, PluginBrokenError when one does not fit.
        """
        owner = Owner.of_unrecorded(name or _name_of(observer), KIND.name)
        check_hooks(KIND, observer, owner)
        self._host.register(observer, owner)

    def session_started(self, event: SessionStarted) -> None:
        self._host.hook.skyrl_engine_session_started.call_historic(kwargs={"event": event})

    def rollouts_finished(self, event: RolloutsFinished) -> None:
        self._host.hook.skyrl_engine_rollouts_finished(event=event)

    def step_finished(self, event: StepFinished) -> None:
        self._host.hook.skyrl_engine_step_finished(event=event)

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        self._host.hook.skyrl_engine_evaluation_finished(event=event)

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        self._host.hook.skyrl_engine_checkpoint_saved(event=event)

    def session_finished(self, event: SessionFinished) -> None:
        self._host.hook.skyrl_engine_session_finished(event=event)

    def manifest_extra(self) -> dict[str, Any]:
        """Return all observers' facts. Raises ContractError when one returns no dict, or two give one key different values."""
        extra: dict[str, Any] = {}
        givers: dict[str, Owner] = {}
        for owner, facts in self._host.each("skyrl_engine_manifest_extra"):
            if not isinstance(facts, dict):
                raise ContractError(
                    f"skyrl_engine_manifest_extra of {owner.label} returned {type(facts).__name__}",
                    remedy="Return a dict of JSON-serialisable facts",
                )
            for key, value in facts.items():
                if key in extra and extra[key] != value:
                    raise ContractError(
                        f"{givers[key].label} and {owner.label} both add {key!r} to the run manifest",
                        remedy="Take one of them out of run.observers",
                    )
                extra[key] = value
                givers[key] = owner
        return extra


def _name_of(observer: object) -> str:
    return f"observer {type(observer).__module__}.{type(observer).__qualname__}"
