"""Slots on the ranks: the models that are trained, the base model that hosts sets of adapters, and models that wait for a slot.

create_model -> ask -> is a slot free?
    yes: a worker opens the model in its first turn -> leave -> close -> admit the next that waits
    no:  the model waits; it is refused if models of living sessions leave no slot

Models for sampling alone (`trainable = false`) are beside all that: each has an engine of its own while somebody samples from it, and neither
gives way to a model nor takes a slot from one.
"""

import asyncio
import secrets
from collections.abc import Callable

from attrs import define, field, frozen

from skyrl_engine import Engine
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.fair_lock import FairLock
from skyrl_engine_tinker.metrics import Counters
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.model_worker import Answer, ModelWorker, PendingAnswer, describe_failure
from skyrl_engine_tinker.settings import Settings

Opener = Callable[[ServedModel], Answer]
"""The first request of a model, which opens it."""


@frozen(eq=False)
class LoadedModel:
    """A model and its worker, which closes the models in `before` first. Workers of a host and of its adapter sets share `turns`."""

    model: ServedModel
    worker: ModelWorker
    turns: FairLock
    before: list["LoadedModel"]

    def close(self) -> None:
        """End the worker after the request that it runs, close the models in `before` if it has not done so, and wait for both."""
        self.worker.close()
        close_all(self.before)


def close_all(models: list[LoadedModel]) -> None:
    """Close models and clear the list. Several threads may do so at once."""
    for model in list(models):
        model.close()
    models.clear()


@frozen(eq=False)
class _Newcomer:
    """A model that waits for a slot, and the sessions that gave a sign of life since."""

    model: ServedModel
    opening: Opener
    promise: PendingAnswer
    heard: set[str]


@define(eq=False)
class ModelSlots:
    """All models on the ranks, touched on the event loop alone.

    There is one model of full weights, or several sets of adapters over one base model. That base model, the host, is a model that nobody
    trains; samplers of base models and of checkpoints sample from it. Where the ranks are in this process their engines take turns: they draw
    from the same random states.
    """

    settings: Settings
    counters: Counters = field(factory=Counters)
    _one_process: bool = field(init=False)
    _turns: FairLock = field(factory=FairLock)
    _has_sets: bool = field(init=False)
    _trained: dict[str, LoadedModel] = field(factory=dict)
    _host: LoadedModel | None = None
    _sampled: dict[str, LoadedModel] = field(factory=dict)
    """Models for sampling alone, by name."""
    _ending: list[LoadedModel] = field(factory=list)
    _newcomers: list[_Newcomer] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        described = Engine.describe(self.settings.engine(next(iter(self.settings.serve.models)), 1, None, None))
        self._has_sets = "adapter_sets" in described.capabilities
        self._one_process = self.settings.tables.get("run", {}).get("launch", "inline") == "inline"

    @property
    def trained(self) -> list[ServedModel]:
        """The models that are trained, without those that could not be opened or whose ranks ended."""
        return [loaded.model for loaded in self._trained.values() if loaded.model.failure is None]

    @property
    def all(self) -> list[ServedModel]:
        """All models in slots, also those that could not be opened or whose ranks ended."""
        return [loaded.model for loaded in self._trained.values()]

    @property
    def waiting(self) -> int:
        """Count requests that wait for their turn."""
        others = [*self._sampled.values(), *([] if self._host is None else [self._host])]
        return sum(loaded.worker.waiting for loaded in (*self._trained.values(), *others))

    def find(self, model_id: str) -> LoadedModel | None:
        """Return a model that is trained, with its worker."""
        return self._trained.get(model_id)

    def ask(self, model: ServedModel, opening: Opener, promise: PendingAnswer) -> None:
        """Open a model for training as soon as a slot is free.

        If models of silent sessions fill the slots, it waits. It is refused once models whose sessions gave a sign of life leave no slot. If
        the silent sessions end, it is opened, so that a killed loop can be started again at once.
        """
        self._newcomers.append(_Newcomer(model, opening, promise, {model.session}))
        self.admit()
        self._refuse_newcomers_without_slot()

    def touch(self, session: str) -> None:
        """Note a sign of life."""
        for newcomer in self._newcomers:
            newcomer.heard.add(session)
        self._refuse_newcomers_without_slot()

    def admit(self) -> None:
        """Open the models for which a slot is free, in the order in which they were asked for."""
        for newcomer in list(self._newcomers):
            if self._explain_conflict(newcomer.model, self.trained) is None:
                self._newcomers.remove(newcomer)
                self._open(newcomer)

    def sampling(self, base_model: str, session: str) -> LoadedModel:
        """Return the model that samples from a base model and from its checkpoints; open one if there is none.

        Raises RequestError where a model of another base is trained, but for models that are for sampling alone.
        """
        if base_model in self.settings.sampling_only:
            return self._get_sampled_model(base_model, session)
        trained = self.trained
        if trained and trained[0].base_model != base_model:
            raise RequestError(
                f"this server has one base model at a time, and trains {trained[0].base_model}; close its client first"
            )
        if trained and not self._is_set(trained[0]):
            return self._trained[trained[0].model_id]
        return self._get_host(base_model, session)

    def leave(self, model_ids: list[str], *, still_sampled: Callable[[str], bool]) -> list[LoadedModel]:
        """Take models out of their slots, the host if no set is left on it and nobody samples from its base model, and models for sampling
        alone from which nobody samples; `close` closes them.
        """
        ending = [self._trained.pop(model_id) for model_id in model_ids if model_id in self._trained]
        host = self._host
        if host is not None and not any(map(self._is_set, self.trained)) and not still_sampled(host.model.base_model):
            ending.append(host)
            self._host = None
        ending += [self._sampled.pop(name) for name in list(self._sampled) if not still_sampled(name)]
        self._ending += ending
        return ending

    def withdraw(self, session: str) -> None:
        """Refuse the waiting models of a session that ended."""
        for newcomer in [newcomer for newcomer in self._newcomers if newcomer.model.session == session]:
            self._newcomers.remove(newcomer)
            newcomer.promise.fail(RequestError("the session ended"))

    async def close(self, ending: list[LoadedModel]) -> None:
        """Close models after the requests that they run, and open those that wait for a slot."""
        for loaded in ending:
            await asyncio.to_thread(loaded.close)
            self._ending.remove(loaded)
            if all(model.slot != loaded.model.slot for model in self.all):
                self.counters.forget_slot(loaded.model.slot)
        self.admit()

    def _explain_conflict(self, newcomer: ServedModel, present: list[ServedModel]) -> str | None:
        """Say why a model has no slot next to these; None if it has one."""
        if not present:
            return None
        first, most = present[0], self.settings.serve.max_models
        if not self._is_set(newcomer) or not self._is_set(first):
            shares = "full weights share nothing" if newcomer.rank * first.rank == 0 else "this backend trains one set of adapters"
            return f"{shares}, so there is one model at a time, and {first.model_id} is there; close its client first"
        if newcomer.base_model != first.base_model:
            return f"this server has one base model at a time, and trains {first.base_model}; close its client first"
        if len(present) >= most:
            return (
                f"{len(present)} models are there, and this server trains {most} at once (serve.max_models); close a client first"
            )
        return None

    def _is_set(self, model: ServedModel) -> bool:
        return self._has_sets and model.rank > 0

    def _refuse_newcomers_without_slot(self) -> None:
        """Refuse models that have no slot even if all silent sessions end."""
        for newcomer in list(self._newcomers):
            living = [model for model in self.trained if model.session in newcomer.heard]
            if (reason := self._explain_conflict(newcomer.model, living)) is not None:
                self._newcomers.remove(newcomer)
                newcomer.promise.fail(RequestError(reason))

    def _open(self, newcomer: _Newcomer) -> None:
        model, taken = newcomer.model, {model.slot for model in self.all}
        model.slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        if self._is_set(model):
            host = self._get_host(model.base_model, model.session)
            model.host = host.model
            before, turns = host.before, host.turns
        else:
            before, turns = self._take_models_in_the_way(), self._make_turns()
        self._trained[model.model_id] = self._start_worker(model, newcomer.opening, newcomer.promise, before, turns)

    def _get_host(self, base_model: str, session: str) -> LoadedModel:
        """Return the host of a base model. A host of another base model, or one that failed, is closed first."""
        if self._host is not None and self._host.model.base_model == base_model and self._host.model.failure is None:
            return self._host
        self._host = self._open_base(base_model, session, self._take_models_in_the_way())
        return self._host

    def _get_sampled_model(self, base_model: str, session: str) -> LoadedModel:
        """Return a model for sampling alone; open it if it is not there. One that failed, or is being closed, is closed first."""
        loaded = self._sampled.get(base_model)
        if loaded is None or loaded.model.failure is not None:
            before = [each for each in self._ending if each.model.base_model == base_model]
            self._sampled[base_model] = self._open_base(base_model, session, before if loaded is None else [*before, loaded])
        return self._sampled[base_model]

    def _open_base(self, base_model: str, session: str, before: list[LoadedModel]) -> LoadedModel:
        """Open a base model, which nobody trains, after the models in `before` are closed."""
        name = f"{session}:sample:{secrets.token_hex(4)}"
        # a host of sets has adapters itself, the smallest there are, which nobody trains
        rank = 1 if self._has_sets else 0
        model = ServedModel(self.settings, name, base_model, rank, trained=False, counters=self.counters)
        promise = PendingAnswer(asyncio.get_running_loop())
        return self._start_worker(model, lambda model: model.open(), promise, before, self._make_turns())

    def _make_turns(self) -> FairLock:
        return self._turns if self._one_process else FairLock()

    def _take_models_in_the_way(self) -> list[LoadedModel]:
        """Take out and return the models that must be closed before an engine is opened, with the host: two engines may not fit."""
        failed = [loaded for loaded in self._trained.values() if loaded.model.failure is not None]
        ending = [*([] if self._host is None else [self._host]), *self._ending, *failed]
        self._host = None
        return ending

    def _start_worker(
        self, model: ServedModel, opening: Opener, promise: PendingAnswer, before: list[LoadedModel], turns: FairLock
    ) -> LoadedModel:
        """Start the worker of a model; its first request closes the models in `before`, then runs `opening`."""

        def open_model() -> Answer:
            # they may need a turn to end
            with turns.release_meanwhile():
                close_all(before)
            try:
                return opening(model)
            except BaseException as error:
                model.not_opened = describe_failure(error)["error"]
                raise

        worker = ModelWorker(
            asyncio.get_running_loop(),
            gap_timeout_s=self.settings.serve.gap_timeout_s,
            pump=model.pump,
            end=model.close,
            drains=lambda session: not model.trained or session != model.session,
            drop=model.drop_samples,
            miss=model.miss,
            turns=turns,
        )
        worker.submit(0, open_model, promise)
        return LoadedModel(model, worker, turns, before)
