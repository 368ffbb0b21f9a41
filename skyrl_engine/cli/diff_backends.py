"""`skyrl-engine diff-backends`: one batch through two backends, side by side."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click
from click.core import ParameterSource

from skyrl_engine.cli.command import EngineCommand
from skyrl_engine.cli.json_output import to_finite_json
from skyrl_engine.cli.options import (
    file_argument,
    flags_of,
    load_config,
    overrides_argument,
    plugin_options,
    refuse_unread,
    table_of,
    trust_option,
)
from skyrl_engine.cli.prove import BROKEN, with_default_loss
from skyrl_engine.cli.read_keys import ReadKeys
from skyrl_engine.cli.terminal import echo
from skyrl_engine.registry.kinds import TABLES
from skyrl_engine.scratch import scratch_folder

if TYPE_CHECKING:
    from skyrl_engine.config import RawConfig, ResolvedConfig
    from skyrl_engine.contracts.kinds.backend import BackendDescription
    from skyrl_engine.contracts.kinds.context import FactoryContext
    from skyrl_engine.contracts.values.columns import SampleColumns
    from skyrl_engine.contracts.values.model import ModelConfig
    from skyrl_engine.proof.backends import BackendDifference, Side
    from skyrl_engine.proof.layouts import ParallelSizes

    _Material = AbstractContextManager[tuple[ResolvedConfig, ModelConfig, SampleColumns, FactoryContext]]


_SIZES = frozenset({"training.micro_batch_rows", "training.micro_batch_tokens"})

READ_OF_TABLES = ReadKeys(frozenset({"plugins", *TABLES, *_SIZES}))
"""Keys of a configuration that a comparison reads, in addition to those that `--a`, `--b` and the layouts decide."""

READ_WITH_MODEL = ReadKeys(
    READ_OF_TABLES.names
    | {"trainer", "model", "data", "run.seed", *(f"training.{key}" for key in ("batch_size", "shuffle", "drop_last"))},
    but=frozenset({"model.dtype"}),
)
"""Keys that it reads where a model and data are named."""


def _number_from_zero(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    """Refuse a tolerance that is NaN or negative, which nothing would meet, or infinite, which everything would."""
    if not 0 <= value < math.inf:
        raise click.BadParameter(f"{value} is not a finite number from 0 up")
    return value


@click.command(cls=EngineCommand, reads=READ_OF_TABLES)
@file_argument(required=False)
@overrides_argument
@click.option(
    "--a",
    "first",
    default="fsdp",
    show_default=True,
    metavar="BACKEND",
    help="A backend: name, distribution:name or ./file.py:name.",
)
@click.option("--b", "second", required=True, metavar="BACKEND", help="The backend it is compared with.")
@click.option("--layout-a", default="dp1", show_default=True, metavar="LAYOUT", help="Parallel sizes of the first, such as dp2.")
@click.option("--layout", default="dp1", show_default=True, metavar="LAYOUT", help="Parallel sizes of the second, such as tp2xpp2.")
@plugin_options("sft", without=("backend",))
@click.option(
    "--micro-batch-tokens", type=click.IntRange(min=1), metavar="TOKENS", help="Tokens of a micro-batch, over what CONFIG says."
)
@click.option(
    "--family", type=click.Choice(["qwen3", "llama"]), default="qwen3", show_default=True, help="Architecture, without CONFIG."
)
@click.option(
    "--tolerance",
    type=float,
    default=1e-5,
    show_default=True,
    metavar="SHARE",
    callback=_number_from_zero,
    help="Largest relative difference to call equal.",
)
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def diff_backends(
    file: Path | None,
    overrides: tuple[str, ...],
    *,
    first: str,
    second: str,
    layout_a: str,
    layout: str,
    micro_batch_tokens: int | None,
    family: str,
    tolerance: float,
    trust_code: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Run one mini-batch through two backends and show logits, log-probabilities, loss, gradient norm and gradients side by side.

    The batch is the first one of CONFIG's run, with its model and plugins; without CONFIG, 16 recorded rollouts through a two-layer model.
    The layouts decide the number of ranks and the parallel sizes; those of CONFIG are ignored.
    Where gradients alone differ, the first layer to diverge is named, counted from the head, and a common factor is explained: world size,
    micro-batches, tokens. A length at which the model changes (sliding window, rotary positions) and that the batch's rows do not lie on
    both sides of is named, since nothing was compared beyond it. Where the forward pass differs, the model is cut short until it agrees,
    which names the layer. The exit code is 1 where the backends do not agree.
    """
    from skyrl_engine.cli import render

    flags = flags_of(options)
    if micro_batch_tokens is not None:
        flags["training.micro_batch_tokens"] = micro_batch_tokens
    raw = load_config(file, overrides, flags, trust_code=trust_code)
    _refuse_unread(raw, (first, second))
    if "model" in raw.table and click.get_current_context().get_parameter_source("family") is not ParameterSource.DEFAULT:
        raise click.UsageError("--family is the architecture of the small model, and a model is named. Leave it out.")
    layouts = {"a": _sizes(layout_a, "--layout-a"), "b": _sizes(layout, "--layout")}
    difference = _compare(raw, {"a": first, "b": second}, layouts, family, tolerance)
    if as_json:
        echo(to_finite_json(_facts(difference)))
    else:
        render.show_backend_difference(difference)
    return 0 if difference.agrees else BROKEN


def _refuse_unread(raw: "RawConfig", backends: Sequence[str]) -> None:
    """Refuse what the command line says and another option decides, or nothing reads. Raises ConfigError."""
    from skyrl_engine.contracts.kinds.backend import PARALLEL_SIZES

    decided = ("run.ranks", "run.launch", "run.ray_address", *(f"backend.{size}" for size in PARALLEL_SIZES))
    backend = raw.table.get("backend", {})
    of_neither = not isinstance(backend, Mapping) or backend.get("use", "fsdp") not in backends

    def remedy(key: str) -> str | None:
        if key == "backend.use":
            return "Remove it: --a and --b name the backends"
        if key in decided:
            return "Remove it: --layout-a and --layout decide ranks and parallel sizes"
        if table_of(key) == "backend" and of_neither:
            return "Remove it: it is an option of another backend than --a and --b"
        if READ_OF_TABLES.has(key) or ("model" in raw.table and READ_WITH_MODEL.has(key)):
            return None
        if "model" not in raw.table and READ_WITH_MODEL.has(key):
            return "Remove it, or name a model and data: without them, recorded rollouts go through a small model"
        if key == "model.dtype":
            return "Remove it: backends are compared in float32"
        return "Remove it: one mini-batch goes through two backends, and nothing is trained"

    refuse_unread(raw, remedy)


def _sizes(text: str, option: str) -> "ParallelSizes":
    from skyrl_engine.proof.layouts import ParallelSizes

    try:
        return ParallelSizes.parse(text)
    except ValueError as error:
        raise click.UsageError(f"{option} {error}.") from error


def _compare(
    raw: "RawConfig", names: Mapping[str, str], layouts: "Mapping[str, ParallelSizes]", family: str, tolerance: float
) -> "BackendDifference":
    from skyrl_engine.errors import EngineError
    from skyrl_engine.proof.depth import depth_of_agreement

    compare = _Comparison(raw, names, layouts, family, tolerance)
    difference = compare.whole()
    if not difference.forward_differs:
        return difference
    try:
        layers, cuts = compare.layers()

        def differs(count: int) -> bool:
            echo(f"Forward passes differ: comparing them with the first {count} of {len(layers)} layers.", err=True)
            return compare.cut(count).forward_differs

        return attrs.evolve(difference, depth=depth_of_agreement(differs, layers, cuts))
    except EngineError as error:
        echo(f"The layer is not named, the model cannot be cut short here: {error.cause}", err=True)
        return difference


@attrs.define
class _Comparison:
    """Two backends, each on its layout, over one batch. `described` holds their descriptions once they were compared."""

    raw: "RawConfig"
    names: Mapping[str, str]
    layouts: "Mapping[str, ParallelSizes]"
    family: str
    tolerance: float
    described: "dict[str, BackendDescription]" = attrs.field(factory=dict)

    def whole(self) -> "BackendDifference":
        return self._difference(lambda model: model)

    def cut(self, layers: int) -> "BackendDifference":
        """Return the comparison with only the first `layers` layers of the model's decoder."""
        from skyrl_engine.modeling.first_layers import write_first_layers

        with scratch_folder("diff") as folder:

            def cut_short(model: "ModelConfig") -> "ModelConfig":
                if not any(folder.iterdir()):
                    write_first_layers(model, layers, folder)
                return attrs.evolve(model, path=str(folder), revision=None, lora=None)

            return self._difference(cut_short)

    def layers(self) -> tuple[list[str], list[int]]:
        """Return the decoder's layers by name, and the numbers of them that both layouts can cut the model to. Raises ModelError."""
        from skyrl_engine.errors import UnsupportedError
        from skyrl_engine.model_facts.configuration import load_config
        from skyrl_engine.modeling.first_layers import layer_names
        from skyrl_engine.modeling.layer_kinds import shorten

        def can_be_cut(count: int) -> bool:
            config = load_config(model, images=True)
            shorten(config, count)
            try:
                for description in self.described.values():
                    description.refuse_model(config, model)
            except UnsupportedError:
                return False
            return True

        with self._material("b") as (_, model, _, _):
            if model.lora is not None and model.lora.path is not None:
                raise UnsupportedError(
                    "its adapters belong to all of its layers", remedy="Compare the model without model.lora.path"
                )
            names = layer_names(model)
            return names, [count for count in range(1, len(names)) if can_be_cut(count)]

    def _material(self, side: str) -> "_Material":
        return _material(_with_backend(self.raw, side, self.names[side], self.layouts[side]), self.family)

    def _difference(self, changed: "Callable[[ModelConfig], ModelConfig]") -> "BackendDifference":
        import numpy as np

        from skyrl_engine.model_facts.facts import ModelFacts
        from skyrl_engine.model_facts.thresholds import find_untested_thresholds
        from skyrl_engine.proof.backends import difference, facts_of

        sides, counts = {}, {}
        tokens, missed = 0, {}
        for key in ("a", "b"):
            with self._material(key) as (resolved, model, columns, context):
                if (config := ModelFacts(model).config) is not None:
                    lengths = np.diff(columns.token_offsets)
                    missed = find_untested_thresholds(config, int(lengths.min()), int(lengths.max()))
                passed = _side(resolved, changed(model), columns, context, self.layouts[key])
            sides[key], counts[key], self.described[key] = passed.side, passed.micro_batches, passed.described
            tokens = int((columns.loss_weight != 0).sum())
        facts = facts_of(*(self.described[key].topology for key in ("a", "b")), micro_batches=counts, tokens=tokens)
        return difference(sides["a"], sides["b"], facts=facts, tolerance=self.tolerance, untried=missed)


@attrs.frozen
class _Pass:
    """The result of one side, its number of micro-batches, and its backend's description."""

    side: "Side"
    micro_batches: int
    described: "BackendDescription"


def _side(
    resolved: "ResolvedConfig", model: "ModelConfig", columns: "SampleColumns", context: "FactoryContext", layout: "ParallelSizes"
) -> _Pass:
    from skyrl_engine.config.automatic import budget_of
    from skyrl_engine.engine.assembly import Assembly
    from skyrl_engine.proof.backends import Side
    from skyrl_engine.proof.passes import measure
    from skyrl_engine.proof.ranks import RankPool
    from skyrl_engine.workers.dispatch import plan_batch

    plugins, training = resolved.plugins, resolved.config.training
    backend = plugins["backend"]
    assembly = Assembly.of(plugins, context, layout.ranks)
    shown = frozenset({"logits"} & assembly.description.capabilities)
    with RankPool(model, plugins, context=context, rows=assembly.collator.product.rows, shown=shown) as pool:
        cut = assembly.layout(micro_batch_rows=training.micro_batch_rows, micro_batch_tokens=budget_of(training))
        measured = measure(pool.group(layout.ranks, "float32"), assembly, columns, cut)
        micro_batches = len(plan_batch(assembly.collator, columns, cut).mini_batches[0].ranks[0])
    return _Pass(Side(f"{backend.loaded.record.name}, {layout}", measured), micro_batches, assembly.description)


def _with_backend(raw: "RawConfig", side: str, backend: str, layout: "ParallelSizes") -> "RawConfig":
    """Return the configuration with this backend on this layout: its options in the file, if it has any, and the parallel sizes."""
    from skyrl_engine.config.reading.origins import Origin
    from skyrl_engine.contracts.kinds.backend import PARALLEL_SIZES
    from skyrl_engine.proof.layouts import OPTIONS

    own, run = (raw.table.get(name, {}) for name in ("backend", "run"))
    if not isinstance(own, Mapping) or not isinstance(run, Mapping):
        return raw  # resolving it says what is wrong
    options = {key: value for key, value in own.items() if key != "use"} if own.get("use", "fsdp") == backend else {}
    decided_by_layout = PARALLEL_SIZES if layout.ranks == 1 else tuple(OPTIONS.values())
    own_options = {key: value for key, value in options.items() if key not in decided_by_layout}
    run_options = {key: value for key, value in run.items() if key != "ray_address"}
    ranks = {"ranks": layout.ranks, "launch": "inline" if layout.ranks == 1 else "ray"}
    sizes = Origin("option", "--layout-a" if side == "a" else "--layout")
    decided = ("run.ranks", "run.launch", *(f"backend.{name}" for name in layout.options))
    return attrs.evolve(
        raw,
        table={**raw.table, "backend": {"use": backend, **own_options, **layout.options}, "run": {**run_options, **ranks}},
        origins={**raw.origins, "backend.use": Origin("option", f"--{side}"), **dict.fromkeys(decided, sizes)},
    )


@contextmanager
def _material(raw: "RawConfig", family: str) -> "Iterator[tuple[ResolvedConfig, ModelConfig, SampleColumns, FactoryContext]]":
    """Give the model and batch of a pass: those of the run that the file describes, or a small model and rollouts made here."""
    from skyrl_engine.config import resolve

    if "model" in raw.table:
        from skyrl_engine.training.sft.prepare import prepare

        prepared = prepare(resolve(raw))
        config = prepared.resolved.config
        chosen, _ = prepared.order.mini_batch(prepared.order.start())
        yield prepared.resolved, config.model, prepared.train.batch(chosen), prepared.assembly.context
        return

    from skyrl_engine.contracts.values.model import ModelConfig
    from skyrl_engine.modeling.tiny import write_model
    from skyrl_engine.objective.parts import ObjectiveParts
    from skyrl_engine.proof.ranks import CONTEXT
    from skyrl_engine.proof.rollouts import make_rollouts

    with ExitStack() as stack:
        directory = str(stack.enter_context(scratch_folder("diff")))
        resolved = resolve(_with_plain_layout(with_default_loss(raw)), need=())
        parts = ObjectiveParts.make(resolved.plugins, CONTEXT)
        value_head = "values" in parts.scores
        reducer = resolved.plugins["reducer"].make(CONTEXT)
        columns = make_rollouts((*parts.reads, *getattr(reducer, "needs", ())))
        write_model(Path(directory), "llama" if family == "llama" else "qwen3", value_head=value_head)
        yield resolved, ModelConfig(directory, value_head=value_head), columns, CONTEXT


def _with_plain_layout(raw: "RawConfig") -> "RawConfig":
    """Return the configuration with one sample per row, in one micro-batch, where it leaves these to the engine."""
    collator, training = ({**raw.table.get(name, {})} for name in ("collator", "training"))
    collator.setdefault("use", "padded")
    training.setdefault("micro_batch_tokens", "none")
    return attrs.evolve(raw, table={**raw.table, "collator": collator, "training": training})


def _facts(difference: "BackendDifference") -> dict[str, Any]:
    return {
        "agrees": difference.agrees,
        "explanation": difference.explanation,
        "first_layer": difference.first_layer,
        "loss": {"a": difference.a.measured.loss, "b": difference.b.measured.loss, "relative": difference.loss},
        "gradient_norm": {"a": difference.a.gradient_norm, "b": difference.b.gradient_norm},
        "outputs": [attrs.asdict(field) for field in difference.fields],
        "parameters": [attrs.asdict(parameter) for parameter in difference.parameters],
        "only_a": list(difference.only_a),
        "only_b": list(difference.only_b),
        "untried": dict(difference.untried),
    }
