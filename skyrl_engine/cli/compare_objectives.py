"""`skyrl-engine compare-objectives`: a recorded step's batch through several objectives, from the same weights."""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from skyrl_engine.cli.command import EngineCommand, current_settings
from skyrl_engine.cli.json_output import to_finite_json
from skyrl_engine.cli.options import load_config, trust_option
from skyrl_engine.cli.terminal import echo
from skyrl_engine.scratch import scratch_folder

if TYPE_CHECKING:
    from skyrl_engine.config import ResolvedConfig, SelectedPlugin
    from skyrl_engine.training.replay.objectives import ComparedObjective, Measured
    from skyrl_engine.training.replay.step import RecordedStep

_OF_A_PART = "name, distribution:name or ./file.py:name, with options behind commas: clip,epsilon_high=0.28"
_LEAST_LAYERS = 5


@click.command(cls=EngineCommand)
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "--step", type=click.IntRange(min=1), required=True, metavar="STEP", help="The step whose batch and weights are taken."
)
@click.option("--loss", "losses", multiple=True, metavar="LOSS", help=f"A loss to compare: {_OF_A_PART}. Give it again for more.")
@click.option("--reducer", "reducers", multiple=True, metavar="REDUCER", help="A reducer, written so. Give it again for more.")
@click.option(
    "--advantage", "advantages", multiple=True, metavar="ADVANTAGE", help="An estimator of advantages, written so, of a run of rl."
)
@click.option("--tokens", type=click.IntRange(min=0), default=10, show_default=True, metavar="N", help="Tokens to name of each.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@trust_option
def compare_objectives(
    run: Path,
    *,
    step: int,
    losses: tuple[str, ...],
    reducers: tuple[str, ...],
    advantages: tuple[str, ...],
    tokens: int,
    as_json: bool,
    trust_code: bool,
) -> int:
    """Compute the recorded batch of a step of the run directory RUN under several objectives, from the weights that the step began with.

    The first is the run's own. Every combination of the given losses, reducers and advantages follows; what is not given is the run's. Weights
    are those of the newest checkpoint before the step, with the recorded batches after it trained on again, held against what the run recorded.
    Nothing is written to RUN.
    """
    from skyrl_engine.cli.own_process import run_under_watch
    from skyrl_engine.cli.render import show_progress
    from skyrl_engine.cli.training import warnings_to
    from skyrl_engine.config import resolve
    from skyrl_engine.config.find_trainer import get_trainer
    from skyrl_engine.training.replay import objectives as measuring
    from skyrl_engine.training.replay.step import Past, refuse_trainer

    if not (losses or reducers or advantages):
        raise click.UsageError("There is nothing to compare the run's objective with. Give --loss, --reducer or --advantage.")
    past = Past.of(run, step)
    raw = load_config(past.directory.config, (), trust_code=trust_code)
    resolved = resolve(raw)
    compared = list_objectives(resolved, losses, reducers, advantages)
    replay = get_trainer(resolved.config.trainer).load_replay()
    if replay is None:
        raise refuse_trainer(resolved.config.trainer)
    settings, chosen = current_settings(), resolved.config.run
    if chosen.launch == "ray":
        run_under_watch(settings, ranks=chosen.ranks, joined=chosen.ray_address is not None)
    with (
        scratch_folder("compare") as scratch,
        show_progress(quiet=settings.quiet or as_json) as display,
        warnings_to(display.warning),
        replay(
            resolved,
            past,
            scratch,
            progress=display.data,
            check=lambda engine: measuring.check_objectives(engine, compared),
        ) as recorded,
    ):
        measured = measuring.compare_objectives(recorded, compared, scratch, tokens=tokens, progress=display.data)
    if as_json:
        echo(to_finite_json(_collect(recorded, measured)))
        return 0
    _show(recorded, measured, _load_decoder(resolved))
    return 0


def list_objectives(
    resolved: "ResolvedConfig", losses: Sequence[str], reducers: Sequence[str], advantages: Sequence[str]
) -> "list[ComparedObjective]":
    """Return the run's own objective, and every combination of the parts that are named. Raises PluginError and ConfigError for one that
    cannot be used.
    """
    from skyrl_engine.training.replay.objectives import ComparedObjective

    own = {kind: resolved.as_dict()[kind] for kind in ("loss", "reducer")}
    of_run = resolved.plugins.get("advantage")
    found = [ComparedObjective(f"the run's: {own['loss']['use']}", own["loss"], own["reducer"], of_run)]
    for loss, reducer, advantage in itertools.product(losses or (None,), reducers or (None,), advantages or (None,)):
        parts = {name: text for name, text in (("loss", loss), ("reducer", reducer), ("advantage", advantage)) if text is not None}
        read = {name: read_part(f"--{name}", text) for name, text in parts.items()}
        # all are looked up before a model is loaded
        selected = {name: _select(resolved, name, table) for name, table in read.items()}
        label = ", ".join(text if name == "loss" or len(parts) == 1 else f"{name} {text}" for name, text in parts.items())
        tables = {**own, **read}
        found.append(ComparedObjective(label, tables["loss"], tables["reducer"], selected.get("advantage", of_run)))
    return found


def _select(resolved: "ResolvedConfig", kind: str, table: Mapping[str, Any]) -> "SelectedPlugin":
    from skyrl_engine.config import SelectedPlugin

    options = {name: value for name, value in table.items() if name != "use"}
    return SelectedPlugin.of(resolved.registry.resolve(kind, table["use"]), options, f"--{kind}")


def read_part(option: str, text: str) -> dict[str, Any]:
    """Return a plugin's table, `use` among its keys, from "name,key=value,..."; values are TOML. Raises UsageError."""
    name, _, options = text.partition(",")
    try:
        table = tomllib.loads(f"options = {{{options}}}")["options"] if "\n" not in options else None
    except tomllib.TOMLDecodeError:
        table = None
    if not isinstance(table, dict) or "use" in table or not name.strip():
        raise click.UsageError(f"{option} {text} is not of the form NAME,key=value,key=value. Quote text: key='text'.")
    return {"use": name.strip(), **table}


def _load_decoder(resolved: "ResolvedConfig") -> Any:
    from skyrl_engine.model_facts.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolved.config.model)
    return lambda token: repr(str(tokenizer.decode([token])))


def _collect(recorded: "RecordedStep", measured: "Sequence[Measured]") -> dict[str, Any]:
    return {
        "step": recorded.step,
        "from_step": recorded.from_step,
        "differences": [attrs.asdict(difference) for difference in recorded.differences],
        "recorded": dict(recorded.recorded),
        "samples": len(recorded.plan.columns),
        "objectives": [attrs.asdict(each) for each in measured],
    }


def _show(recorded: "RecordedStep", measured: "Sequence[Measured]", decode: Any) -> None:
    from skyrl_engine.cli.render import show_facts, show_heading, show_table

    loss_tokens = int((recorded.plan.columns.loss_weight != 0).sum())
    then = {name: recorded.recorded[name] for name in ("loss", "grad_norm") if recorded.recorded.get(name) is not None}
    show_facts(
        {
            "batch": _describe_batch(recorded, loss_tokens),
            "weights": _describe_weights(recorded),
            "recorded": ", ".join(f"{name} {value:.6g}" for name, value in then.items()),
        }
    )
    numbers = [f"[{number}]" for number in range(1, len(measured) + 1)]
    show_heading("objectives")
    rows = [
        [
            number,
            each.label,
            f"{each.loss:.6g}",
            f"{each.grad_norm:.6g}",
            _cell(each.cosine, ".4f"),
            _cell(each.kl, ".3g"),
            _cell(each.change, ".3g"),
        ]
        for number, each in zip(numbers, measured, strict=True)
    ]
    show_table(["", "objective", "loss", "gradient norm", "cosine with [1]", "KL after a step", "change of log-probability"], rows)
    names = sorted({name for each in measured for name in (*each.metrics, *each.after)})
    if names:
        show_heading("metrics of the losses: at the step's weights, and on the same batch after one optimizer step")
        show_table(["metric", *numbers], [[name, *(_pair(each, name) for each in measured)] for name in names])
    for number, each in zip(numbers[1:], measured[1:], strict=True):
        _show_differences(number, each, decode, show_heading, show_table)


def _show_differences(number: str, each: "Measured", decode: Any, show_heading: Any, show_table: Any) -> None:
    known = {layer: cosine for layer, cosine in each.cosines.items() if cosine is not None}
    if known:
        least = sorted(known, key=lambda layer: known[layer])[:_LEAST_LAYERS]
        show_heading(f"layers where the gradients of [1] and {number} agree least, of {len(known)}")
        show_table(["layer", "cosine"], [[layer, f"{known[layer]:.4f}"] for layer in least])
    if each.pushes is None:
        show_heading(f"{number} reads more than numbers per token: tokens are not compared")
    elif each.pushes:
        show_heading(f"tokens that {number} treats most differently: share of the objective's push, up (+) or down (-)")
        rows = [
            [push.sample, push.token, decode(push.token_id), f"{push.other:+.4f}", f"{push.share:+.4f}"] for push in each.pushes
        ]
        show_table(["sample", "token", "text", "[1]", number], rows)


def _describe_batch(recorded: "RecordedStep", loss_tokens: int) -> str:
    return f"step {recorded.step:,}: {len(recorded.plan.columns):,} samples, {loss_tokens:,} tokens with loss, as one mini-batch"


def _describe_weights(recorded: "RecordedStep") -> str:
    again = recorded.step - 1 - recorded.from_step
    came = f"the checkpoint of step {recorded.from_step:,}" if recorded.from_step else "the model that the run began with"
    if not again:
        return came
    steps = "1 step" if again == 1 else f"{again:,} steps"
    if not recorded.differences:
        return f"{came}, and {steps} taken again, with the bits that the run recorded"
    worst = max(recorded.differences, key=lambda difference: difference.relative)
    return (
        f"{came}, and {steps} taken again; they are not those that were recorded, by up to {worst.relative:.1e} of {worst.metric}, "
        f"from step {min(difference.step for difference in recorded.differences):,} on"
    )


def _pair(each: "Measured", name: str) -> str:
    values: Sequence[Mapping[str, float]] = (each.metrics, each.after)
    return " > ".join(_cell(metrics.get(name), ".4g") for metrics in values)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
