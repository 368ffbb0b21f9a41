"""`skyrl-engine chat`: talk to a model, a run or a checkpoint."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl_engine.cli.command import EngineCommand, current_settings
from skyrl_engine.cli.key_values import key_values
from skyrl_engine.cli.options import load_config, resolve_read, select_given_options, values_by_key
from skyrl_engine.cli.read_keys import ReadKeys
from skyrl_engine.cli.run_config import find_config, keep_model_tables
from skyrl_engine.scratch import scratch_folder

if TYPE_CHECKING:
    from skyrl_engine.config import ResolvedConfig
    from skyrl_engine.contracts import Sampling
    from skyrl_engine.environments.tools import Tool
    from skyrl_engine.rollout.dialogue import Dialogue
    from skyrl_engine.rollout.speaker import Speaker
    from skyrl_engine.training.trained_model import NamedModel

READ = ReadKeys(
    frozenset(
        {
            "trainer",
            *(f"model.{key}" for key in ("tokenizer", "revision", "dtype", "trust_remote_code", "rotary_length", "chat_template")),
            *(f"rl.{key}" for key in ("template", "stop_strings")),
            *(f"run.{key}" for key in ("seed", "device")),
            "plugins",
            "generator",
        }
    ),
    but=frozenset(
        {"generator.placement", "generator.replicas", "generator.devices", "generator.launch", "generator.share_devices"}
    ),
)
"""Keys of a configuration that a chat reads; any other is refused on its command line."""

_INSTEAD = {
    "model.path": "Remove it: the model is the command's first word",
    "model.lora": "Name the folder of the adapter in the place of MODEL",
    "rl.max_tokens": "Use --max-tokens",
    "rl.temperature": "Use --temperature",
    "evaluation.temperature": "Use --temperature",
    "generator": "Remove it: a chat samples in its own process",
}
"""Remedies for keys that are not read, by key or table; for all others: nothing is trained."""

_KEYS = {"seed": "run.seed"}


@click.command(cls=EngineCommand, keys=_KEYS, trainer="rl", reads=READ)
@click.argument("model", metavar="MODEL")
@key_values("[section.key=value ...]", "Any other key of the configuration; the same as section.key=value.")
@click.option("--prompt", metavar="TEXT", help="Say this, print the answer and end.")
@click.option("--system", metavar="TEXT", help="The system prompt.")
@click.option("--compare", metavar="MODEL", help="A second model, run or checkpoint, which answers the same beside the first.")
@click.option("--step", type=click.IntRange(min=0), metavar="STEP", help="The run's checkpoint of this step, instead of its model.")
@click.option("--base", metavar="MODEL", help="Where the base model of adapters is, if not where they say: a directory or hub id.")
@click.option(
    "--template",
    metavar="FILE",
    help='A Jinja chat template in the place of the tokenizer\'s; "none": every line is a text that the model goes on from.',
)
@click.option("--tool", multiple=True, metavar="FUNCTION", help="A function that the model may call, ./file.py:name.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.7,
    show_default=True,
    metavar="TEMPERATURE",
    help="Temperature to sample with; 0 takes the most likely token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    metavar="SHARE",
    help="Sample from the fewest tokens that hold this share.",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="K",
    help="Sample from the K most likely tokens; 0: from all.",
)
@click.option(
    "--min-p",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    metavar="SHARE",
    help="Sample from tokens at least this share as likely as the most likely one.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End an answer after this text. Give it again for more.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=1024, show_default=True, metavar="TOKENS", help="Most tokens of an answer."
)
@click.option("--seed", type=int, metavar="SEED", help="Seed of the answers: the same words have the same ones.")
@click.option("--json", "as_json", is_flag=True, help="With --prompt, print a JSON object.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that came with the model. Only for code you have read.")
def chat(
    model: str,
    *,
    prompt: str | None,
    system: str | None,
    compare: str | None,
    step: int | None,
    base: str | None,
    template: str | None,
    tool: tuple[str, ...],
    as_json: bool,
    trust_remote_code: bool,
    overrides: tuple[str, ...],
    **options: Any,
) -> int:
    """Talk to MODEL: a directory, a hub id, a folder of adapters, a run directory or one of its checkpoints.

    Answers appear as they are sampled. /help lists what else can be said. Lines are read from stdin where it is no terminal. Answers go to
    stdout, all else to stderr.
    """
    from skyrl_engine.cli.chat_lines import answer_once, converse
    from skyrl_engine.cli.render import show_progress
    from skyrl_engine.cli.training import warnings_to
    from skyrl_engine.config import Option
    from skyrl_engine.environments import function_of
    from skyrl_engine.environments.tools import Tool
    from skyrl_engine.run.progress import LOADING
    from skyrl_engine.training.trained_model import NamedModel

    if as_json and prompt is None:
        raise click.UsageError("--json prints one answer. Give --prompt TEXT too.")
    settings = current_settings()
    flags: dict[str, Any] = {"trainer": "rl", **values_by_key(_KEYS, select_given_options({"seed": options["seed"]}))}
    if template is not None:
        flags["rl.template" if template in ("none", "auto") else "model.chat_template"] = Option("--template", template)
    if trust_remote_code:
        flags["model.trust_remote_code"] = Option("--trust-remote-code", value=True)
    named = [NamedModel.of(model, step), *([] if compare is None else [NamedModel.of(compare)])]
    tools = [Tool.of(function_of(reference)) for reference in tool]
    chosen = [_configure(each, overrides, flags) for each in named]
    with ExitStack() as ends:
        with show_progress(quiet=settings.quiet or as_json) as display, warnings_to(display.warning):
            display.data(LOADING, 0, 0)
            dialogues = []
            for number, (each, resolved) in enumerate(zip(named, chosen, strict=True)):
                scratch = ends.enter_context(scratch_folder("chat"))
                speaker = _open_speaker(each, resolved, scratch, base if number == 0 else None, options)
                ends.callback(speaker.close)
                dialogues.append(_begin(speaker, tools, resolved.config.run.seed, system))
        if prompt is not None:
            answer_once(dialogues, prompt, as_json=as_json)
        else:
            converse(dialogues)
    return 0


def _configure(named: "NamedModel", overrides: Sequence[str], flags: Mapping[str, Any]) -> "ResolvedConfig":
    """Return the configuration of a chat, with what the model's run says of it. Raises ConfigError."""
    from skyrl_engine.engine.automatic import Choices

    file, part = (None, None) if named.run is None else (find_config(named.run), _keep_chat_tables)
    choices = Choices(resolve_read(load_config(file, overrides, {**flags, "model.path": named.name}, part=part), _remedy))
    choices.choose_dtype()
    return choices.resolved


def _keep_chat_tables(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat takes over from a run's configuration; the tokenizer that the run left has its chat template."""
    tables = keep_model_tables(table)
    return {**tables, "model": {key: value for key, value in tables["model"].items() if key != "chat_template"}}


def _remedy(key: str) -> str | None:
    if READ.has(key):
        return None
    names = (key.rsplit(".", count)[0] for count in range(key.count(".") + 1))
    return next((_INSTEAD[name] for name in names if name in _INSTEAD), "Remove it: a chat trains nothing")


def _open_speaker(
    named: "NamedModel", resolved: "ResolvedConfig", scratch: Path, base: str | None, options: Mapping[str, Any]
) -> "Speaker":
    from attrs import evolve

    from skyrl_engine.errors import ModelError
    from skyrl_engine.rollout.speaker import Speaker
    from skyrl_engine.workers.process_group import pick_device

    config = resolved.config
    loaded = named.load(scratch, base=base, trust_remote_code=config.model.trust_remote_code)
    tokenizer, revision = config.model.tokenizer or loaded.tokenizer, config.model.revision or loaded.revision
    model = evolve(config.model, path=loaded.path, tokenizer=tokenizer, revision=revision, lora=loaded.lora)
    try:
        return Speaker.open(
            model,
            resolved.plugins["generator"],
            _sampling(options, config.rl.stop_strings),
            device=pick_device(config.run.device, 0),
            raw=config.rl.template == "none",
            name=named.name,
        )
    except ModelError as error:
        if Path(loaded.path).expanduser().exists():
            raise
        raise ModelError(
            f"{loaded.path} is no directory here, and cannot be loaded from the hub",
            remedy="Name a directory, a run or a hub id, and check the network (HF_HUB_OFFLINE forbids downloads)",
            details=(error.cause, *error.details),
        ) from error


def _sampling(options: Mapping[str, Any], stop_strings: Sequence[str]) -> "Sampling":
    """Return how answers are sampled; without --stop, they end where the attempts of the model's run did."""
    from skyrl_engine.contracts import Sampling

    return Sampling(
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        top_p=options["top_p"],
        top_k=options["top_k"],
        min_p=options["min_p"],
        stop_strings=tuple(options["stop"] or stop_strings),
    )


def _begin(speaker: "Speaker", tools: "Sequence[Tool]", seed: int, system: str | None) -> "Dialogue":
    """Return a dialogue without messages. Raises UnsupportedError for a template that does not tell the model of its tools."""
    from skyrl_engine.rollout.dialogue import Dialogue

    speaker.renderer.require_tools([tool.schema for tool in tools])
    return Dialogue(speaker, tools, seed, system)
