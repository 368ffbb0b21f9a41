"""One recipe on one backend in one layout: planned as a run is, refused in planning's words, or measured against one rank in float64."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import attrs
import numpy as np
import torch
from attrs import define, frozen
from parity import BACKENDS, describe_refusal
from recipes import RECIPES, configure, write_material

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.trainers import TRAINERS
from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.errors import EngineError, PluginNotFoundError
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.proof.comparison import Measurement, compare, relative_difference
from skyrl_engine.proof.rollouts import make_rollouts
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.testing.ranks.world import start_shared_world
from skyrl_engine.testing.ranks.world_transport import group_on
from skyrl_engine.training.replay.step import Past
from skyrl_engine.training.rl.prepare import prepare
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.spec import WorkerSpec

LOSS, GRADIENT, WEIGHTS, LOGPROBS = 1e-6, 1e-5, 1e-6, 2e-5
"""Largest relative differences of losses, of any parameter's gradient and of any parameter's next weights; log-probabilities are in nats."""

MOVED = 1e-3
"""The first step moves the weights by at least this part of their norm, so that next weights say something."""


@frozen
class RecipeCell:
    """Largest differences of a recipe's two steps from those of one rank in float64; `gradient` is None where a call leaves none to gather.

    `tokens` counts sampled tokens that differ. `moved` is how far the first step moved the weights, relative to their norm.
    """

    loss: float
    gradient: float | None
    weights: float
    logprobs: float
    tokens: int
    moved: float

    @property
    def agrees(self) -> bool:
        return (
            self.loss <= LOSS
            and (self.gradient is None or self.gradient <= GRADIENT)
            and self.weights <= WEIGHTS
            and self.logprobs <= LOGPROBS
            and self.tokens == 0
            and self.moved >= MOVED
        )


@frozen
class RecipeEntry:
    """A recipe on a backend in a layout: a cell, or the sentence it is refused with while planning, or what it failed of."""

    recipe: str
    backend: str
    layout: str
    cell: RecipeCell | None = None
    refused: str = ""
    failed: str = ""

    @property
    def name(self) -> str:
        return f"{self.recipe}, {self.backend}, {self.layout}"

    @property
    def problem(self) -> str:
        """Say why the entry does not hold; empty where it is refused in planning's words, or agrees."""
        if self.failed:
            return self.failed
        if self.cell is not None:
            return "" if self.cell.agrees else str(self.cell)
        return "" if self.refused else "a hole: neither measured nor refused"


@frozen(eq=False)
class RecipeSteps:
    """The two steps of a recipe: passes that leave a gradient, losses, weights before and after each step, and what was sampled."""

    passes: Sequence[Measurement]
    losses: Sequence[float]
    logprobs: np.ndarray
    weights: Sequence[Mapping[str, np.ndarray]]
    completions: Sequence[Completion]


@define(eq=False)
class RecipeMatrix:
    """A context manager: material in a folder, ranks that cells share, and the definition of every recipe once it is asked for."""

    _stack: ExitStack = attrs.field(factory=ExitStack, init=False)
    _definitions: dict[str, RecipeSteps] = attrs.field(factory=dict, init=False)
    _folder: Path = attrs.field(init=False)

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-engine-recipes-")))
        with quiet_progress():
            write_material(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def plan(self, recipe: str, backend: str, layout: str) -> ResolvedConfig | RecipeEntry:
        """Plan as `--dry-run` does; the configuration, or the entry of a refusal. Raises PluginNotFoundError without the backend."""
        try:
            resolved = configure(recipe, BACKENDS[backend], layout, self._folder)
            TRAINERS[RECIPES[recipe].trainer].load_plan()(resolved)
        except PluginNotFoundError:
            raise
        except EngineError as error:
            return RecipeEntry(recipe, backend, layout, refused=describe_refusal(error).replace(f"{self._folder}/", ""))
        return resolved

    def entry(self, recipe: str, backend: str, layout: str) -> RecipeEntry:
        """Plan, and where planning takes it run and compare. Raises PluginNotFoundError where the backend is not installed."""
        planned = self.plan(recipe, backend, layout)
        if isinstance(planned, RecipeEntry):
            return planned
        expected = self._define(recipe)
        try:
            cell = measure(self._run(recipe, planned), expected)
        except (EngineError, AssertionError) as error:  # a rank's traceback comes as an AssertionError
            return RecipeEntry(recipe, backend, layout, failed=str(error).strip().splitlines()[-1])
        return RecipeEntry(recipe, backend, layout, cell)

    def _define(self, recipe: str) -> RecipeSteps:
        """Return the steps of one rank of fsdp in float64."""
        if recipe not in self._definitions:
            self._definitions[recipe] = self._run(recipe, configure(recipe, BACKENDS["fsdp"], "dp1", self._folder, dtype="float64"))
        return self._definitions[recipe]

    def _run(self, recipe: str, resolved: ResolvedConfig) -> RecipeSteps:
        chosen = RECIPES[recipe]
        with patch("skyrl_engine.engine.engine.launch_workers", _on_shared_ranks):
            if chosen.samples:
                with self._open_sampling(resolved) as (engine, plan):
                    return _take_steps(engine, plan, {}, 1.0, samples=True)
            with self._open_replay(resolved, chosen.trainer) as step:
                if chosen.staged:
                    return _take_staged(step.engine, step.plan)
                return _take_steps(step.engine, step.plan, step.bound, step.temperature)

    @contextmanager
    def _open_replay(self, resolved: ResolvedConfig, trainer: str) -> Iterator[Any]:
        """Bring the first step of a run back, as the trainer was about to take it: its models beside, its scores and advantages."""
        replay = TRAINERS[trainer].load_replay()
        assert replay is not None
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            place = Path(name)
            past = Past(RunDirectory(place / "run"), 1, None, {1: {}}, {})
            with replay(resolved, past, place) as step:
                yield step

    @contextmanager
    def _open_sampling(self, resolved: ResolvedConfig) -> Iterator[tuple[Engine, Plan]]:
        """Start the ranks of a run that samples, with its generator, and plan a batch of recorded rollouts."""
        prepared = prepare(resolved)
        launched = Engine.launch(prepared.resolved, prepared.assembly, prepared.files, prepared.optimizer_steps, prepared.layout)
        with launched as engine, tempfile.TemporaryDirectory(dir=self._folder) as folder:
            generator = prepared.resolved.plugins["generator"]
            engine.start_sampler(generator, longest=prepared.longest, folder=Path(folder))
            yield engine, engine.plan(make_rollouts(engine.assembly.objective.reads))


def _on_shared_ranks(spec: WorkerSpec, **_: Any) -> WorkerGroup:
    return group_on(start_shared_world(spec.topology.world_size), spec)


def _take_steps(engine: Engine, plan: Plan, bound: Mapping[str, str], temperature: float, *, samples: bool = False) -> RecipeSteps:
    passes, weights = [], [engine.weights()]
    completions = _sample(engine) if samples else []
    for _ in range(2):
        result = engine.forward_backward(plan, bound=bound, temperature=temperature).result()
        output = result.output
        magnitude = float(np.abs(output.fields["token_loss"].values).mean())
        passes.append(Measurement(output.metrics["loss"].result, magnitude, engine.gradients(), output))
        engine.optim_step().result()
        weights.append(engine.weights())
        completions += _sample(engine) if samples else []
    losses = [done.loss for done in passes]
    logprobs = np.concatenate([done.output.fields["logprobs"].values for done in passes])
    return RecipeSteps(passes, losses, logprobs, weights, completions)


def _take_staged(engine: Engine, plan: Plan) -> RecipeSteps:
    """Take both steps in one call: the output of every sample comes from the step that its mini-batch took."""
    columns = plan.columns
    before = engine.weights()
    result = engine.train(engine.plan(columns, mini_batch_size=len(columns) // 2), staged=True)
    logprobs = result.output.fields["logprobs"].values
    return RecipeSteps([], [result.metrics["loss"].result], logprobs, [before, engine.weights()], [])


def _sample(engine: Engine) -> list[Completion]:
    """Sample at prompts of unequal lengths from the weights as they are."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(60, 90, length).astype(np.int32) for length in (3, 17, 5, 9, 30)]
    requests = [
        GenerationRequest(number + 100 * engine.step, prompt, Sampling(4 + 3 * number, ignore_eos=True), seed=number)
        for number, prompt in enumerate(prompts)
    ]
    completions = list(engine.generate(requests).result())
    failed = [completion.error for completion in completions if completion.finish == "error"]
    assert not failed, f"sampling failed: {failed[0]}"
    return completions


def measure(got: RecipeSteps, expected: RecipeSteps) -> RecipeCell:
    """Compare two runs of a recipe. `expected` is the definition."""
    differences = [compare(ours, theirs) for ours, theirs in zip(got.passes, expected.passes, strict=True)]
    losses = [
        relative_difference(np.array(ours), np.array(theirs)) for ours, theirs in zip(got.losses, expected.losses, strict=True)
    ]
    before, after = expected.weights[:2]
    moved = np.sqrt(sum(float(((after[name] - before[name]) ** 2).sum()) for name in after))
    norm = np.sqrt(sum(float((weight**2).sum()) for weight in before.values()))
    for ours, theirs in zip(got.weights, expected.weights, strict=True):
        assert ours.keys() == theirs.keys(), f"other weights: {sorted(ours.keys() ^ theirs.keys())}"
    pairs = list(zip(got.completions, expected.completions, strict=True))
    apart = [
        np.abs(np.asarray(ours.logprobs, np.float64) - theirs.logprobs).max()
        for ours, theirs in pairs
        if np.array_equal(ours.token_ids, theirs.token_ids)
    ]
    return RecipeCell(
        loss=max([difference.loss for difference in differences] or losses),
        gradient=max((difference.gradient for difference in differences), default=None),
        weights=max(
            relative_difference(ours[name], weight)
            for ours, theirs in zip(got.weights, expected.weights, strict=True)
            for name, weight in theirs.items()
        ),
        logprobs=float(max([np.abs(got.logprobs - expected.logprobs).max(), *apart])),
        tokens=sum(not np.array_equal(ours.token_ids, theirs.token_ids) for ours, theirs in pairs),
        moved=float(moved / norm),
    )
