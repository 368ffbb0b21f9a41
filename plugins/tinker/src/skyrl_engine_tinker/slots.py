"""Places on the ranks: the models that are trained, the base model that hosts sets of adapters, and who waits for a place.

create_model ──► ask ──► place? ──► worker, opened in its first turn ──► leave ──► closed ──► the next that waits
│ no                                                             ▲
└──► waits for signs of life, and is refused beside the living ──┘
"""

import asyncio
import secrets
from collections.abc import Callable

from attrs import define, field, frozen

from skyrl_engine import Engine
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.fair_lock import FairLock
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.model_worker import Answer, ModelWorker, PendingAnswer, failure
from skyrl_engine_tinker.settings import Settings

Opener = Callable[[ServedModel], Answer]
"""The first request of a model, which opens it."""


@frozen(eq=False)
class LoadedModel:
    """A model and its worker; workers of a host and of its sets of adapters share `turns`. It is opened when those `before` are closed."""

    model: ServedModel
    worker: ModelWorker
    turns: FairLock
    before: list["LoadedModel"]

    def close(self) -> None:
        """End the worker behind the request that it is at, and those before, which it may not have come to. Waits."""
        self.worker.close()
        close_all(self.before)


def close_all(places: list[LoadedModel]) -> None:
    """Close places and forget them. Several threads may do so at once."""
    for each in list(places):
        each.close()
    places.clear()


@frozen(eq=False)
class _Newcomer:
    """A model that is asked for while there is no place, and the sessions that gave a sign of life since."""

    model: ServedModel
    opening: Opener
    promise: PendingAnswer
    heard: set[str]


@define(eq=False)
class ModelSlots:
    """All models on the ranks, touched on the event loop alone.

    There is one model of full weights, or several sets of adapters over one base model. That base model, the host, is a model that nobody
    trains: what samplers of base models and of checkpoints are answered by.
    """

    settings: Settings
    _has_sets: bool = field(init=False)
    _trained: dict[str, LoadedModel] = field(factory=dict)
    _host: LoadedModel | None = None
    _ending: list[LoadedModel] = field(factory=list)
    _newcomers: list[_Newcomer] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        described = Engine.describe(self.settings.engine(next(iter(self.settings.serve.models)), 1, None, None))
        self._has_sets = "adapter_sets" in described.capabilities

    @property
    def trained(self) -> list[ServedModel]:
        """The models that are trained; one that could not be opened, or whose ranks ended, is none."""
        return [each.model for each in self._trained.values() if each.model.failure is None]

    @property
    def all(self) -> list[ServedModel]:
        """Those, and the ones that could not be opened."""
        return [each.model for each in self._trained.values()]

    @property
    def waiting(self) -> int:
        """Count requests that wait for their turn."""
        return sum(each.worker.waiting for each in self._trained.values())

    def find(self, model_id: str) -> LoadedModel | None:
        """Return the place of a model that is trained."""
        return self._trained.get(model_id)

    def ask(self, model: ServedModel, opening: Opener, promise: PendingAnswer) -> None:
        """Open a model that is to be trained, as soon as there is a place.

        Where models of silent sessions are in its way, it waits: it is refused as soon as there is no place beside those whose sessions gave
        a sign of life, and where none comes it has its turn, so that a loop which was killed can be started again at once.
        """
        self._newcomers.append(_Newcomer(model, opening, promise, {model.session}))
        self.admit()
        self._refuse_beside_living()

    def touch(self, session: str) -> None:
        """Note a sign of life."""
        for newcomer in self._newcomers:
            newcomer.heard.add(session)
        self._refuse_beside_living()

    def admit(self) -> None:
        """Open the models for which there is a place, the one that waits longest first."""
        for newcomer in list(self._newcomers):
            if self._conflict(newcomer.model, self.trained) is None:
                self._newcomers.remove(newcomer)
                self._open(newcomer)

    def sampling(self, base_model: str, session: str) -> LoadedModel:
        """Return the place of the model that samples from a base model and from its checkpoints, opened for it if none is there.

        Raises RequestError where a model of another base is trained.
        """
        trained = self.trained
        if trained and trained[0].base_model != base_model:
            raise RequestError(
                f"this server has one base model at a time, and trains {trained[0].base_model}; close its client first"
            )
        if trained and not self._is_set(trained[0]):
            return self._trained[trained[0].model_id]
        return self._hosting(base_model, session)

    def leave(self, model_ids: list[str], *, still_sampled: Callable[[str], bool]) -> list[LoadedModel]:
        """Take models out, and the host where no set is left on it and nobody samples from its base model; `close` closes them."""
        ending = [self._trained.pop(each) for each in model_ids if each in self._trained]
        host = self._host
        if host is not None and not any(map(self._is_set, self.trained)) and not still_sampled(host.model.base_model):
            ending.append(host)
            self._host = None
        self._ending += ending
        return ending

    def withdraw(self, session: str) -> None:
        """Refuse what a session waits for that ended."""
        for newcomer in [each for each in self._newcomers if each.model.session == session]:
            self._newcomers.remove(newcomer)
            newcomer.promise.fail(RequestError("the session ended"))

    async def close(self, ending: list[LoadedModel]) -> None:
        """Close models behind the requests that they are at, and open who waits for their place."""
        for each in ending:
            await asyncio.to_thread(each.close)
            self._ending.remove(each)
        self.admit()

    def _conflict(self, wanted: ServedModel, present: list[ServedModel]) -> str | None:
        """Say why there is no place for a model beside these; None where there is."""
        if not present:
            return None
        first, most = present[0], self.settings.serve.max_models
        if not self._is_set(wanted) or not self._is_set(first):
            shares = "full weights share nothing" if wanted.rank * first.rank == 0 else "this backend trains one set of adapters"
            return f"{shares}, so there is one model at a time, and {first.model_id} is there; close its client first"
        if wanted.base_model != first.base_model:
            return f"this server has one base model at a time, and trains {first.base_model}; close its client first"
        if len(present) >= most:
            return (
                f"{len(present)} models are there, and this server trains {most} at once (serve.max_models); close a client first"
            )
        return None

    def _is_set(self, model: ServedModel) -> bool:
        return self._has_sets and model.rank > 0

    def _refuse_beside_living(self) -> None:
        """Refuse models that have no place even when all silent sessions end."""
        for newcomer in list(self._newcomers):
            living = [each for each in self.trained if each.session in newcomer.heard]
            if (reason := self._conflict(newcomer.model, living)) is not None:
                self._newcomers.remove(newcomer)
                newcomer.promise.fail(RequestError(reason))

    def _open(self, newcomer: _Newcomer) -> None:
        model = newcomer.model
        if self._is_set(model):
            host = self._hosting(model.base_model, model.session)
            model.host = host.model
            before, turns = host.before, host.turns
        else:
            before, turns = self._in_the_way(), FairLock()
        self._trained[model.model_id] = self._start_worker(model, newcomer.opening, newcomer.promise, before, turns)

    def _hosting(self, base_model: str, session: str) -> LoadedModel:
        """Return the host of a base model; one of another, or that is of no use any more, gives way to it."""
        if self._host is not None and self._host.model.base_model == base_model and self._host.model.failure is None:
            return self._host
        name = f"{session}:sample:{secrets.token_hex(4)}"
        # a host of sets has adapters itself, the smallest there are, which nobody trains
        model = ServedModel(self.settings, name, base_model, 1 if self._has_sets else 0, trained=False)
        promise = PendingAnswer(asyncio.get_running_loop())
        self._host = self._start_worker(model, lambda model: model.open(), promise, self._in_the_way(), FairLock())
        return self._host

    def _in_the_way(self) -> list[LoadedModel]:
        """Return the models that must be closed before an engine is opened, the host among them: two at once may not fit."""
        failed = [each for each in self._trained.values() if each.model.failure is not None]
        found = [*([] if self._host is None else [self._host]), *self._ending, *failed]
        self._host = None
        return found

    def _start_worker(
        self, model: ServedModel, opening: Opener, promise: PendingAnswer, before: list[LoadedModel], turns: FairLock
    ) -> LoadedModel:
        """Start the worker of a model; its first request is `opening`, behind the end of those `before`."""

        def first() -> Answer:
            close_all(before)
            try:
                return opening(model)
            except BaseException as error:
                model.not_opened = failure(error)["error"]
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
        worker.submit(0, first, promise)
        return LoadedModel(model, worker, turns, before)
