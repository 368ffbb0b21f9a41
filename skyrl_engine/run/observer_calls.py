"""Tell every observer the events of a run. One that fails stops the run, or is warned of, as it is configured; none is dropped quietly."""

from collections.abc import Iterable
from typing import Any, get_args

from skyrl_engine.contracts.kinds.observer import (
    CheckpointSaved,
    EvaluationFinished,
    OnError,
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
from skyrl_engine.run.lenient_observers import HOOKS, Event, LenientObserver

KIND = KINDS["observer"]


class ObserverBus:
    """Broadcasts events to observers in pluggy's order: the last registered first, `tryfirst` and `trylast` before and after.

    Every method raises PluginBrokenError naming the observer that failed; an EngineError that an observer raises passes as it is. Observers
    that only warn (`on_error`) come after all others, and raise nothing.
    """

    def __init__(self, observers: Iterable[object] = (), *, on_error: OnError | None = None) -> None:
        self._host, self._observers = PluginHost(), PluginHost()
        self._lenient: list[LenientObserver] = []
        self._started: SessionStarted | None = None
        for observer in observers:
            self.register(observer, on_error=on_error)

    def register(self, observer: object, name: str | None = None, *, on_error: OnError | None = None) -> None:
        """Add an observer, known in errors by `name` (None: its class's). One that comes late gets the event that the session started.

        `on_error` says if a failure stops the run or is warned of; None: what the observer's own attribute `on_error` says, else "stop".
        Raises ContractError when it implements no observer hook, PluginBrokenError when one does not fit.
        """
        owner = Owner.of_unrecorded(name or _name_of(observer), KIND.name)
        check_hooks(KIND, observer, owner)
        own = getattr(observer, "on_error", "stop")
        if own not in get_args(OnError):
            raise ContractError(f"{owner.label} has on_error = {own!r}", remedy="Set it to 'stop' or 'warn'")
        self._observers.register(observer, owner)
        if (on_error or own) == "stop":
            self._host.register(observer, owner)
            return
        lenient = LenientObserver(observer, owner)
        self._lenient.append(lenient)
        if self._started is not None:
            lenient.tell(self._started)

    def session_started(self, event: SessionStarted) -> None:
        self._started = event
        self._host.hook.skyrl_engine_session_started.call_historic(kwargs={"event": event})
        for observer in self._lenient:
            observer.tell(event)

    def rollouts_finished(self, event: RolloutsFinished) -> None:
        self._tell(event)

    def step_finished(self, event: StepFinished) -> None:
        self._tell(event)

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        self._tell(event)

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        self._tell(event)

    def session_finished(self, event: SessionFinished) -> None:
        """Tell every observer, the lenient ones also where another one fails: their threads end with the session."""
        try:
            getattr(self._host.hook, HOOKS[type(event)])(event=event)
        finally:
            for observer in self._lenient:
                observer.tell(event)

    def _tell(self, event: Event) -> None:
        getattr(self._host.hook, HOOKS[type(event)])(event=event)
        for observer in self._lenient:
            observer.tell(event)

    def manifest_extra(self) -> dict[str, Any]:
        """Return all observers' facts. Raises ContractError when one returns no dict, or two give one key different values."""
        extra: dict[str, Any] = {}
        givers: dict[str, Owner] = {}
        for owner, facts in self._observers.each("skyrl_engine_manifest_extra"):
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
