"""Every backend on every layout against one float32 process: losses, log-probabilities, gradients and two steps, measured and written down.

    python tests/proof/parity.py docs/reference/backend-parity.md

The batch and the way through the engine are those of a run; only ranks are plain processes, which serve one layout after another.
"""

import platform
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import attrs
import numpy as np
import torch
from attrs import define, frozen

from skyrl_engine.config import SelectedPlugin, from_dict, resolve
from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.contracts.kinds.needs import TEACHER_MODEL
from skyrl_engine.contracts.values.model import ComputeDtype, ModelConfig
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.capability import check_capabilities, check_scores, collect_required_capabilities
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ConfigError, EngineError, PluginNotFoundError, RunRefusedError
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.proof.comparison import Measurement, compare
from skyrl_engine.proof.layouts import ParallelSizes
from skyrl_engine.proof.ranks import CONTEXT
from skyrl_engine.proof.rollouts import LONGEST, make_rollouts
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.testing.backends.gradient_comparison import norm_of
from skyrl_engine.testing.ranks.world import start_shared_world
from skyrl_engine.testing.ranks.world_transport import group_on
from skyrl_engine.workers.launch import WorkerGroup, launch_workers
from skyrl_engine.workers.messages import GatherWeights, Load, Save, UsePlugins
from skyrl_engine.workers.spec import WorkerSpec

BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "fsdp": {"use": "fsdp"},
    **{f"deepspeed z{stage}": {"use": "deepspeed", "zero_stage": stage} for stage in range(3)},
    "deepspeed z3": {"use": "deepspeed", "zero_stage": 3, "persistence_threshold": 0},
    "megatron": {"use": "megatron"},
}
LAYOUTS = ("dp1", "dp2", "tp2", "pp2", "cp2", "tp2xpp2", "tp2xdp2", "pp2xdp2", "tp2xcp2")
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "cross_entropy": {"loss": {"use": "cross_entropy"}, "reducer": {"use": "token_mean"}},
    "ppo + kl + entropy": {
        "loss": {"use": "ppo", "terms": [{"use": "kl", "coef": 0.1}, {"use": "entropy", "coef": 0.01}]},
        "reducer": {"use": "token_mean"},
    },
    "gspo, sequence_mean": {"loss": {"use": "gspo"}, "reducer": {"use": "sequence_mean"}},
    "dpo + cross_entropy on chosen": {
        "loss": {"use": "dpo", "terms": [{"use": "cross_entropy", "on": "chosen", "coef": 0.2}]},
        "reducer": {"use": "sequence_mean"},
    },
}
_BETA, _TEMPERATURE = 0.3, 0.4
DIVERGENCES: Mapping[str, Mapping[str, Any]] = {
    kind: {
        "loss": {"use": "divergence", "divergence": kind, "beta": _BETA, "temperature": _TEMPERATURE},
        "reducer": {"use": "token_mean"},
    }
    for kind in ("forward", "reverse", "jensen_shannon")
}
"""Losses that compare the model with a teacher on the ranks, over the whole vocabulary. Their temperature makes gradients large against the
rounding of weights.
"""

COLLATORS = ("padded", "packed", "tree")

Key = tuple[str, str]
"""A loss and a collator."""

EVERY: Sequence[Key] = [(loss, collator) for loss in LOSSES for collator in COLLATORS]

TAUGHT: Sequence[Key] = [(loss, collator) for loss in DIVERGENCES for collator in COLLATORS]


def fitting(backend: str, layout: str, keys: Sequence[Key]) -> list[Key]:
    """Leave out rows of trees where megatron's context-parallel ranks would share them: they are refused."""
    refused = backend == "megatron" and ParallelSizes.parse(layout).topology.cp > 1
    return [key for key in keys if key[1] != "tree" or not refused]


CLIPPED: Key = ("cross_entropy", "packed")
"""Key of the clipped step."""

CLIPPED_RATE = 2e7
"""A hundred times the rate of SGD, so that a clipped step is large against the rounding of weights."""

MICRO_BATCH_TOKENS = 2 * LONGEST

STEPS = 2
SGD = OptimizerConfig(learning_rate=2e5, betas=(0.0, 0.0), epsilon=1e6, max_grad_norm=None)
"""Plain SGD of rate 0.2: without memory AdamW moves a weight by learning_rate * g / (|g| + epsilon), and 1e6 + |g| is 1e6 in float32.

A step of AdamW as it is used would say nothing: it divides gradients by their own size, and a wrong factor is gone.
"""

GRADIENT, LOGPROBS, WEIGHTS = 1e-5, 2e-5, 1e-4
"""Tolerances for float32: relative by parameter, in nats, and relative to how far a parameter moved in two steps."""


@frozen
class Cell:
    """Largest differences of one loss and collator from the reference."""

    loss: float
    logprobs: float
    gradient: float
    parameter: str
    second_gradient: float
    weights: float

    @property
    def agrees(self) -> bool:
        return (
            max(self.loss, self.gradient, self.second_gradient) <= GRADIENT
            and self.logprobs <= LOGPROBS
            and self.weights <= WEIGHTS
        )


@frozen
class Entry:
    """A backend on a layout: cells by loss and collator, or the sentence it is refused with, or what it failed of."""

    backend: str
    layout: str
    cells: Mapping[Key, Cell] = attrs.Factory(dict)
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.layout}"


@frozen(eq=False)
class Trajectory:
    """Two steps of SGD on one batch: a measured pass before each, and how far every weight has moved in the end."""

    passes: tuple[Measurement, ...]
    moved: Mapping[str, np.ndarray]


@define(eq=False)
class Matrix:
    """A context manager; all backends and layouts follow one another on the ranks that this process keeps.

    The model is a tiny one of this `family`, with these `settings` in its configuration; `keys` are the losses and collators of the reference.
    """

    family: str = "qwen3"
    settings: Mapping[str, Any] = attrs.Factory(dict)
    rotary_length: int | None = None
    keys: Sequence[Key] = (*EVERY, *TAUGHT)
    _stack: ExitStack = attrs.field(factory=ExitStack, init=False)
    _reference: dict[Key, Trajectory] = attrs.field(factory=dict, init=False)
    _directory: Path = attrs.field(init=False)

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-engine-parity-")))
        with quiet_progress():
            write_model(self._directory / "model", self.family, **self.settings)
            write_model(self._directory / "teacher", self.family, **{**self.settings, "initializer_range": 0.3})
        make_parts_differ(self._directory / "model")
        with launch_workers(self._spec("fsdp", "dp1", SGD), launch="inline") as group:
            self._reference = dict(self._cells(group, self.keys))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def entries(self, keys: Sequence[Key]) -> Iterator[Entry]:
        """Every backend on every layout, one after the other."""
        for backend in BACKENDS:
            for layout in LAYOUTS:
                yield self.entry(backend, layout, fitting(backend, layout, keys))

    def entry(self, backend: str, layout: str, keys: Collection[Key] = EVERY) -> Entry:
        """Cells of these losses and collators. Raises PluginNotFoundError where the backend is not installed."""
        try:
            self._plan(backend, layout, keys)
        except PluginNotFoundError:
            raise
        except EngineError as error:
            return Entry(backend, layout, refused=describe_refusal(error))
        started = time.monotonic()
        try:
            with self.group(backend, layout) as group:
                cells = {key: difference(got, self._reference[key]) for key, got in self._cells(group, keys)}
        except (EngineError, AssertionError) as error:  # a rank's traceback comes as an AssertionError
            return Entry(backend, layout, failed=str(error).strip().splitlines()[-1])
        return Entry(backend, layout, cells, seconds=time.monotonic() - started)

    def group(
        self, backend: str, layout: str, optimizer: OptimizerConfig | None = None, dtype: ComputeDtype = "float32"
    ) -> WorkerGroup:
        """The backend on ranks of the matrix; SGD where no optimizer is given. A context manager that leaves the ranks running."""
        spec = self._spec(backend, layout, optimizer or SGD, dtype)
        return group_on(start_shared_world(spec.topology.world_size), spec)

    def engine(
        self,
        group: WorkerGroup,
        plugins: Mapping[str, SelectedPlugin],
        optimizer: OptimizerConfig,
        total_steps: int | None = None,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    ) -> Engine:
        """Return an engine over ranks that have their model, with these plugins from now on."""
        group.ask(UsePlugins(_locks(plugins)))
        assembly = Assembly.of(plugins, CONTEXT, 1)
        assembly = attrs.evolve(assembly, description=attrs.evolve(assembly.description, topology=group.topology))
        return Engine(
            assembly,
            group,
            layout=assembly.layout(micro_batch_tokens=micro_batch_tokens),
            optimizer=optimizer,
            total_steps=total_steps,
            files=ModelFiles.of(self.model()),
            registry=Registry.discover(),
            generator=None,
        )

    def reference(self, key: Key) -> "Trajectory":
        """Return the steps of the one process."""
        return self._reference[key]

    def clipped_step(self, backend: str, layout: str) -> tuple[float, float, Mapping[str, np.ndarray]]:
        """Return the norm that a step reports, that of its gradients in float64, and how far weights moved in a step clipped to 1/7 of it.

        Raises PluginNotFoundError where the backend is not installed.
        """
        with self.group(backend, layout) as group:
            start = group.ask(GatherWeights())[0]
            engine = self.engine(group, resolve_plugins(*CLIPPED), SGD)
            engine.forward_backward(engine.plan(make_rollouts(engine.assembly.objective.reads))).result()
            own = norm_of(engine.gradients())
            limit = self.clipped_definition()[0] / 7
            reported = engine.optim_step(max_grad_norm=limit, learning_rate=CLIPPED_RATE).result().grad_norm
            after = group.ask(GatherWeights())[0]
        return reported, own, {name: after[name] - weight for name, weight in start.items()}

    def clipped_definition(self) -> tuple[float, Mapping[str, np.ndarray]]:
        """Return the norm of the one process's gradient, and how far SGD moves weights along it, scaled to 1/7."""
        gradients = self._reference[CLIPPED].passes[0].gradients
        norm = norm_of(gradients)
        factor = norm / 7 / (norm + 1e-6)
        # AdamW without memory: see SGD
        return norm, {
            name: -CLIPPED_RATE * factor * gradient / (factor * abs(gradient) + SGD.epsilon) for name, gradient in gradients.items()
        }

    def _plan(self, backend: str, layout: str, keys: Collection[Key]) -> None:
        """Check what a run checks while planning."""
        sizes = ParallelSizes.parse(layout)
        selected = resolve_plugins("cross_entropy", "packed", {**BACKENDS[backend], **sizes.options})["backend"]
        described = selected.loaded.describe_backend(selected.options, sizes.ranks)
        for collator in {collator for _, collator in keys}:
            made = resolve_plugins("cross_entropy", collator)["collator"].make(CONTEXT)
            check_capabilities(backend, described.capabilities, collect_required_capabilities(described.topology, made, ()))
        for loss, collator in set(keys) & set(TAUGHT):
            scores = Assembly.of(resolve_plugins(loss, collator), CONTEXT, 1).objective.scores
            check_scores("loss divergence", scores, value_head=False, backend=backend, declared=described.capabilities)
        assert described.topology == sizes.topology, f"{backend} lays out {layout} as {described.topology}"

    def _spec(self, backend: str, layout: str, optimizer: OptimizerConfig, dtype: ComputeDtype = "float32") -> WorkerSpec:
        sizes = ParallelSizes.parse(layout)
        plugins = resolve_plugins("cross_entropy", "packed", {**BACKENDS[backend], **sizes.options})
        model = self.model(dtype)
        return WorkerSpec(_locks(plugins), CONTEXT, model, optimizer.settings(), sizes.topology, "cpu", rows="packed")

    def model(self, dtype: ComputeDtype = "float32") -> ModelConfig:
        """Return the model of the matrix, computing in `dtype`."""
        return ModelConfig(str(self._directory / "model"), rotary_length=self.rotary_length, dtype=dtype)

    def _cells(self, group: WorkerGroup, keys: Collection[Key]) -> Iterator[tuple[Key, Trajectory]]:
        """Losses and collators on ranks that keep their model; weights go back to where they were after each."""
        if any(loss in DIVERGENCES for loss, _ in keys):
            group.add_frozen(TEACHER_MODEL, ModelConfig(str(self._directory / "teacher"), rotary_length=self.rotary_length))
        with tempfile.TemporaryDirectory(dir=self._directory) as name:
            group.ask(Save(Path(name)))
            start = group.ask(GatherWeights())[0]
            for key in keys:
                yield key, _trajectory(self.engine(group, resolve_plugins(*key), SGD), group, start)
                group.ask(Load(Path(name)))


def describe_refusal(error: EngineError) -> str:
    """Return its sentences; those of all mistakes, without their places in the configuration."""
    several = error if isinstance(error, RunRefusedError) else error.__cause__
    if isinstance(several, RunRefusedError):
        sentences = [describe_refusal(each) for each in several.errors]
    else:
        problems = error.problems if isinstance(error, ConfigError) else [error]
        sentences = [f"{problem.cause}. {problem.remedy}." for problem in problems]
    return " ".join(dict.fromkeys(sentences))


def _library(backend: str) -> str:
    return str(BACKENDS[backend]["use"])


def resolve_plugins(loss: str, collator: str, backend: Mapping[str, Any] | None = None) -> Mapping[str, SelectedPlugin]:
    tables = {**{**LOSSES, **DIVERGENCES}[loss], "collator": {"use": collator}, "backend": dict(backend or {"use": "fsdp"})}
    return resolve(from_dict(tables, "parity"), need=()).plugins


def _locks(plugins: Mapping[str, SelectedPlugin]) -> dict[str, dict[str, Any]]:
    return {place: selected.to_lock_entry() for place, selected in plugins.items()}


def _trajectory(engine: Engine, group: WorkerGroup, start: Mapping[str, np.ndarray]) -> Trajectory:
    plan = engine.plan(make_rollouts(engine.assembly.objective.reads))
    passes = []
    for _ in range(STEPS):
        output = engine.forward_backward(plan).result().output
        magnitude = float(np.abs(output.fields["token_loss"].values).mean())
        passes.append(Measurement(output.metrics["loss"].result, magnitude, engine.gradients(), output))
        engine.optim_step().result()
    after = group.ask(GatherWeights())[0]
    return Trajectory(tuple(passes), {name: after[name] - weight for name, weight in start.items()})


def difference(got: Trajectory, expected: Trajectory) -> Cell:
    """Compare the steps of two."""
    first, second = (compare(mine, theirs) for mine, theirs in zip(got.passes, expected.passes, strict=True))
    ours, theirs = (trajectory.passes[0].output.fields["logprobs"].values for trajectory in (got, expected))
    assert got.moved.keys() == expected.moved.keys(), "other weights"
    moved = max(
        float(np.linalg.norm(got.moved[name] - movement)) / max(float(np.linalg.norm(movement)), 1e-12)
        for name, movement in expected.moved.items()
    )
    return Cell(
        loss=max(first.loss, second.loss),
        logprobs=float(np.abs(ours - theirs).max()),
        gradient=first.gradient,
        parameter=first.parameter,
        second_gradient=second.gradient,
        weights=moved,
    )


def table(entries: Sequence[Entry], keys: Sequence[Key] = EVERY) -> str:
    """Markdown: a row per backend and layout that runs, then what is refused and why."""
    heads = [f"{loss}, {collator}" for loss, collator in keys]
    lines = [
        f"| backend | layout | {' | '.join(heads)} | loss | log-probability | weights after {STEPS} steps |",
        f"|---|---|{'---|' * (len(heads) + 3)}",
    ]
    for entry in entries:
        cells = {key: cell for key, cell in entry.cells.items() if key in keys}
        if not cells:
            continue
        worst = {key: f"{max(cell.gradient, cell.second_gradient):.1e}" for key, cell in cells.items()}
        gradients = " | ".join(worst.get(key, "") for key in keys)
        others = " | ".join(f"{max(values):.1e}" for values in _columns(list(cells.values())))
        lines.append(f"| {entry.backend} | {ParallelSizes.parse(entry.layout)} | {gradients} | {others} |")
    refused: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        if entry.refused:
            refused.setdefault((_library(entry.backend), entry.refused), []).append(str(ParallelSizes.parse(entry.layout)))
    words = [f"- {library}, {'; '.join(dict.fromkeys(layouts))}: {reason}" for (library, reason), layouts in refused.items()]
    return "\n".join([*lines, "", "Refused while planning, in these words:", "", *words])


def _columns(cells: list[Cell]) -> tuple[list[float], ...]:
    return [cell.loss for cell in cells], [cell.logprobs for cell in cells], [cell.weights for cell in cells]


def page(entries: Sequence[Entry], taught: Sequence[Entry]) -> str:
    """The page of the reference."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed", "megatron-core"))
    return f"""# Backend parity

Every backend on every layout, against one process that computes the same in float32 (FSDP on one rank). Written by `nox -s parity`, which
runs each of them in real processes; `nox -s nightly` holds them to the limits below, `nox -s proofs` two columns of every row. Bfloat16, speed
and memory are [another page](backends-side-by-side.md).

The batch: 16 rollouts of {LONGEST} tokens at most, with an empty response, masked tokens and fractional weights, in micro-batches of
{MICRO_BATCH_TOKENS} tokens. The model: a tied two-layer Qwen3 whose norms and matrices are far from their first values.

Numbers are the largest difference found. Columns named after a loss are gradients: ||g - g'|| / ||g'|| of the worst parameter, in both of
two steps; at most {GRADIENT:.0e}. *loss* is relative, at most {GRADIENT:.0e}; *log-probability* is in nats, at most {LOGPROBS:.0e};
*weights* is how far the worst parameter ends from where it is due, relative to how far it moved, at most {WEIGHTS:.0e}. The steps are plain
SGD (AdamW without memory and with an epsilon of 1e6), because a step of AdamW hides a wrong factor.

{table(entries)}

## A teacher on the ranks

The same for the loss `divergence`, which compares the model with a frozen teacher over the whole vocabulary (`beta` {_BETA:g}, temperature
{_TEMPERATURE:g}): the teacher reads every micro-batch on the ranks that train it.

{table(taught, TAUGHT)}

## A loss curve

Thirty steps of AdamW with weight decay, clipping and a cosine schedule over the same four batches, on several backends and layouts: the
lines of the upper panel lie on each other, the lower one shows how far they are apart, at most 1e-5 of the loss. A curve alone would not
show a gradient with a wrong factor, which AdamW divides out again.

![Losses of thirty steps on all backends, and their differences](backend-parity.svg)

Measured with {versions}, on CPU ({platform.machine()}) over gloo.
"""


def main(target: str) -> None:
    """Measure everything and write the page. Ends with an error where something does not agree."""
    with Matrix() as matrix:
        entries, taught = ([_report(entry) for entry in matrix.entries(keys)] for keys in (EVERY, TAUGHT))
    wrong = [each.name for each in (*entries, *taught) if each.failed or not all(cell.agrees for cell in each.cells.values())]
    if wrong:
        sys.exit(f"not written: {', '.join(wrong)}")
    Path(target).write_text(page(entries, taught))


def _report(entry: Entry) -> Entry:
    worst = max((cell.gradient for cell in entry.cells.values()), default=0.0)
    print(f"{entry.name}: {entry.refused or entry.failed or f'{worst:.1e}, {entry.seconds:.0f} s'}", flush=True)
    return entry


if __name__ == "__main__":
    main(sys.argv[1])
