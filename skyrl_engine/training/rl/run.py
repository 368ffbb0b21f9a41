"""Reinforcement learning: attempts at tasks, what they were worth, and optimizer steps on them, with an exact resume."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs

from skyrl_engine.cleanup import finally_close
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.observer import RolloutsFinished
from skyrl_engine.engine.engine import Engine
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.background_source import BackgroundSource
from skyrl_engine.rollout.env_pool import EpisodePool
from skyrl_engine.rollout.group_source import GroupSource, RolloutSource
from skyrl_engine.rollout.guard import SamplerGuard
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.ledger import RolloutLedger
from skyrl_engine.rollout.offline_source import OfflineSource, Recording
from skyrl_engine.rollout.routing import EpisodeRouter, SamplerRouter
from skyrl_engine.rollout.runner import RolloutRunner
from skyrl_engine.rollout.segments import read_segment, segments_of
from skyrl_engine.run.durable import write_durably
from skyrl_engine.run.progress import LOADING
from skyrl_engine.run.session import RunSession, open_session
from skyrl_engine.spans import Phases
from skyrl_engine.training.loop import Loop, RunResult
from skyrl_engine.training.moving_reference import MovingReference
from skyrl_engine.training.rl.entropy_control import EntropyControl
from skyrl_engine.training.rl.handover import WeightHandover, make_canary
from skyrl_engine.training.rl.kl_penalty import KlPenalty
from skyrl_engine.training.rl.prepare import Progress, prepare
from skyrl_engine.training.rl.prepared import LiveRolloutSpec, PreparedRl
from skyrl_engine.training.rl.reward_model import add_rewards, replace_rewards
from skyrl_engine.training.rl.state import RlState, state_in
from skyrl_engine.training.rl.trainer import Live, RlTrainer

_A_RUN: Final = re.compile(r"[0-9a-f]{16}")
"""The name of a run in its journal."""


def run_rl(
    resolved: ResolvedConfig,
    *,
    observers: Sequence[object] = (),
    resume: bool | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Train to the configured end, or until a signal asks to stop.

    `observers` listen with those of the configuration; `resume` overrides `checkpoint.resume`; `progress` gets how many groups of a step
    are there. Whatever goes wrong ends the ranks and the environments, is recorded in the run directory, and is raised again.
    """
    with open_session(resolved, observers=observers, resume=resume) as session:
        prepared = prepare(session.resolved, progress=progress)
        config = prepared.resolved.config
        checkpoint = session.resumed_from
        state = None
        if checkpoint is not None:
            state = state_in(
                checkpoint,
                prepared.environment_versions,
                permissions=list_permissions(prepared),
                allow_changed=config.checkpoint.allow_changed,
            )
        session.record_start(
            prepared.resolved,
            seeds={"run": config.run.seed},
            world={"launch": config.run.launch, "ranks": config.run.ranks, **attrs.asdict(prepared.assembly.description.topology)},
            data={"environments": prepared.environment_versions, **_recording_facts(prepared)},
        )
        if progress is not None:
            progress(LOADING, 0, 0)
        with (
            Engine.launch(
                prepared.resolved, prepared.assembly, prepared.files, prepared.optimizer_steps, prepared.layout
            ) as engine,
            _trainer(prepared, engine, session, state, progress) as trainer,
        ):
            session.announce_start(config.rl.steps)
            return Loop(
                session,
                engine,
                trainer,
                evaluation=config.evaluation,
                checkpoint=config.checkpoint,
                total_steps=config.rl.steps,
                run_config=config.run,
            ).run()


def list_permissions(prepared: PreparedRl) -> dict[str, str]:
    """Return what `checkpoint.allow_changed` calls every environment, by its name."""
    pairs = zip(prepared.names, prepared.environments, strict=False)
    return {name: f"environment:{selected.loaded.record.name}" for name, selected in pairs}


def _recording_facts(prepared: PreparedRl) -> dict[str, Any]:
    return {"rollouts": str(prepared.rollouts)} if isinstance(prepared.rollouts, Recording) else {}


@contextmanager
def _trainer(
    prepared: PreparedRl, engine: Engine, session: RunSession, state: RlState | None, progress: Progress | None
) -> "Iterator[RlTrainer]":
    """Start what gives groups, and end it."""
    settings = prepared.resolved.config.rl
    if session.resumed_from is not None:
        engine.load(session.resumed_from.state)
    reference = load_frozen_models(prepared, engine, session.directory.reference, state)
    rollouts, models = prepared.rollouts, prepared.reward_models
    phases = Phases()
    with ExitStack() as ends:
        live: Live | None = None
        source: GroupSource
        if isinstance(rollouts, Recording):
            source = OfflineSource(
                rollouts,
                settings.groups,
                prepared.resolved.config.run.seed,
                0 if state is None else state.step,
                partial(replace_rewards, models, engine) if models else None,
            )
        else:
            source, live = ends.enter_context(_sampling(prepared, rollouts, engine, session, state, phases, progress))
        yield make_trainer(prepared, engine, source, live, reference, state, session.rollouts_finished, phases)


def load_frozen_models(prepared: PreparedRl, engine: Engine, references: Path, state: RlState | None) -> MovingReference | None:
    """Load the models next to the trained one onto the ranks; return the reference, whose copies are in `references`, where there is one."""
    reference: MovingReference | None = None
    if prepared.reference is not None:
        copied = None if state is None else state.reference
        reference = MovingReference.load(engine, references, prepared.resolved.config.reference, prepared.reference, copied)
    if prepared.teacher is not None:
        engine.add_frozen(prepared.teacher)
    for model in prepared.reward_models:
        engine.add_frozen(model.frozen)
    return reference


def make_trainer(
    prepared: PreparedRl,
    engine: Engine,
    source: GroupSource,
    live: Live | None,
    reference: MovingReference | None,
    state: RlState | None,
    on_rollouts: Callable[[RolloutsFinished], None],
    phases: Phases,
) -> RlTrainer:
    """Make a trainer that goes on from what a checkpoint says; from the start where `state` is None."""
    settings = prepared.resolved.config.rl
    penalty = None if settings.kl is None else KlPenalty.start(settings.kl)
    control = None if settings.entropy is None else EntropyControl.start(settings.entropy, prepared.assembly.objective)
    trainer = RlTrainer(prepared, engine, source, live, penalty, reference, on_rollouts, phases, control)
    if state is not None:
        trainer.restore(state)
    return trainer


@contextmanager
def _sampling(
    prepared: PreparedRl,
    rollouts: LiveRolloutSpec,
    engine: Engine,
    session: RunSession,
    state: RlState | None,
    phases: Phases,
    progress: Progress | None,
) -> "Iterator[tuple[GroupSource, Live]]":
    """Start sampler, environments and journal, and end them."""
    config = prepared.resolved.config
    settings = config.rl
    beside = settings.staleness > 0
    sampler = engine.start_sampler(
        prepared.resolved.plugins["generator"],
        version=0 if state is None else state.step,
        longest=prepared.longest,
        folder=session.directory.generator,
        beside=beside,
    )
    rules = RolloutLedger(
        settings.groups,
        settings.staleness,
        order=prepared.order,
        concurrency=settings.concurrency,
        steps=settings.steps,
        max_drop_share=config.rollouts.max_drop_share,
        on_starved=config.rollouts.on_starved,
    )
    run = _identity(session, None if state is None else state.journal)
    pool = episode_pool(prepared)
    with (
        finally_close(pool.shutdown),
        open_journal(
            session.directory.rollouts,
            run=run,
            keep=config.rollouts.keep,
            resumed=None if state is None else state.step,
            listed=None if state is None else state.segments,
        ) as journal,
    ):
        saved = rules.state() if state is None else state.ledger
        ledger = RolloutLedger.from_state(saved, rules, journal.index.list_journaled_groups())
        completions, episodes = SamplerRouter(sampler), EpisodeRouter(pool)
        runner = RolloutRunner(
            completions.open_client(),
            episodes.open_client(),
            rollouts.renderer,
            prepared.names,
            [part.product.claims for part in rollouts.tasks.environments],
            prepared.sampling,
            prepared.limits,
            config.run.seed,
            # a clock of its own: it runs beside the trainer's
            phases=Phases() if beside else phases,
        )
        on_progress = None if progress is None else lambda ready, wanted: progress("attempts", ready, wanted)
        guard = SamplerGuard.of(settings.max_gap, config.model.dtype, stops=settings.on_gap == "stop")
        models = prepared.reward_models
        valued = partial(add_rewards, models, engine) if models else None
        source = RolloutSource(
            ledger,
            runner,
            journal,
            rollouts.tasks.of,
            prepared.filters,
            None if beside else valued,
            progress=on_progress,
            phases=runner.phases,
        )
        live = Live(rollouts, completions.open_client(), episodes.open_client(), guard, journal)
        if not beside:
            source.update = sampler.update
            yield source, live
            return
        canary = make_canary(rollouts, completions.open_client(), sampler.description, guard.limit)
        handover = WeightHandover(engine, sampler, canary)
        handover.prepare_check(0 if state is None else state.step)
        drains = not prepared.in_flight_updates
        with BackgroundSource(source, handover, drains, phases, progress=on_progress, valued=valued) as background:
            yield background, attrs.evolve(live, status=background.status)


def episode_pool(prepared: PreparedRl) -> EpisodePool:
    """Return processes for the run's environments, which its caller shuts down."""
    config = prepared.resolved.config.rollouts
    return EpisodePool(
        [selected.to_lock_entry() for selected in prepared.environments],
        prepared.names,
        prepared.assembly.context,
        workers=config.workers,
        timeout_s=config.timeout_s,
        retries=config.retries,
    )


def _identity(session: RunSession, known: str | None) -> str:
    """Name the run, the same for all of its sessions: by the moment its directory's first session began.

    `known` is the name in the checkpoint that the session goes on from. Where the file that holds the name is lost or damaged, checkpoint and
    segments say it. Raises RolloutError where the directory's rollouts are another run's.
    """
    path = session.directory.rollouts / "run"
    text = path.read_text(errors="replace") if path.exists() else ""
    if not _A_RUN.fullmatch(text):
        path.parent.mkdir(parents=True, exist_ok=True)
        named = next((segment.run for segment in map(read_segment, segments_of(path.parent)) if segment.run is not None), None)
        run_id = hashlib.sha256(f"{time.time_ns()} {session.directory.path}".encode()).hexdigest()[:16]
        text = known or named or run_id
        write_durably(path, text)
    if known is not None and text != known:
        raise RolloutError(
            f"{path.parent} holds the rollouts of another run ({text}, and the checkpoint is of {known})",
            remedy="Put the run's own rollouts back, or remove the folder: what was sampled after the checkpoint is then sampled again",
        )
    return text
