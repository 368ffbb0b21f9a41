"""`skyrl-engine data preview`: a dataset as the trainer will see it."""

from pathlib import Path

import click

from skyrl_engine.cli.command import EngineGroup, current_settings
from skyrl_engine.cli.options import (
    columns_by_key,
    file_argument,
    load_config,
    map_option,
    one_or_several,
    overrides_argument,
    resolve_read,
    trust_option,
)
from skyrl_engine.cli.read_keys import ReadKeys
from skyrl_engine.cli.terminal import echo_json

READ = ReadKeys(
    frozenset(
        {
            "trainer",
            *(f"model.{key}" for key in ("path", "tokenizer", "revision", "trust_remote_code", "rotary_length", "chat_template")),
            "data",
            "run.seed",
            *(f"training.{key}" for key in ("batch_size", "micro_batch_rows", "shuffle", "steps")),
            *("plugins", "loss", "reducer"),
            *("teacher.path", "preference.preset", "reward_model.preset"),
        }
    )
)
"""Keys of a configuration that say what samples are, which columns the loss reads of them, and how many are padded together."""


@click.group(cls=EngineGroup)
def data() -> None:
    """Look at data as the trainer will see it."""


@data.command("preview", reads=READ)
@file_argument(required=False)
@overrides_argument
@click.option("--model", metavar="MODEL", help="The model whose tokenizer and chat template are used.")
@click.option(
    "--data",
    "dataset",
    multiple=True,
    callback=one_or_several,
    metavar="DATA",
    help="The dataset: a file, a folder or a hub id. Give it again for more, read one after the other.",
)
@map_option
@click.option(
    "--split", type=click.Choice(["train", "eval"]), default="train", show_default=True, help="Training or held-out data."
)
@click.option(
    "--samples", type=click.IntRange(min=0), metavar="COUNT", default=3, show_default=True, help="Samples to show token by token."
)
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def preview(
    file: Path | None,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    dataset: str | list[str] | None,
    columns: dict[str, str] | None,
    split: str,
    samples: int,
    trust_code: bool,
    as_json: bool,
) -> None:
    """Tokenize the data of CONFIG, or of --model and --data, and show tokens, which of them carry loss, lengths, padding, and
    the columns that the loss reads in addition to the tokens. Of streamed training data, a first part is read.
    """
    from skyrl_engine.cli import render
    from skyrl_engine.cli.training import warnings_to
    from skyrl_engine.data.dataset import Split, load_columns
    from skyrl_engine.data.images.processor import load_vision
    from skyrl_engine.data.preview import preview as look_at
    from skyrl_engine.data.sources.formats import Reading
    from skyrl_engine.data.streaming.stream import StreamedData
    from skyrl_engine.engine.capability import vision_of
    from skyrl_engine.engine.model_files import ModelFiles
    from skyrl_engine.errors import ConfigError, Problem
    from skyrl_engine.training.preference.checks import GIVEN
    from skyrl_engine.training.sft.checks import limit_to_model
    from skyrl_engine.training.sft.prepare import columns_to_read, list_teacher_columns

    flags = {"model.path": model, "data.train": dataset, **columns_by_key(columns)}
    raw = load_config(file, overrides, flags, trust_code=trust_code)
    resolved = resolve_read(raw, lambda key: None if READ.has(key) else "Remove it: samples do not depend on it")
    config = resolved.config
    if not config.has("data"):
        raise ConfigError(
            [
                Problem(
                    f"trainer {config.trainer}",
                    "takes tasks of environments and no [data], and this command shows samples of [data]",
                    "Look at the first prompts with `skyrl-engine run CONFIG --dry-run`, and at tasks with `skyrl-engine env show`",
                )
            ]
        )
    files = ModelFiles.of(config.model)
    tokenizer = files.tokenizer
    limited = limit_to_model(config.data, files.facts)
    part: Split = "eval" if split == "eval" else "train"
    with render.show_progress(quiet=current_settings().quiet) as display, warnings_to(display.warning):
        readings: dict[str, Reading] = {"preference": "preferences", "reward_model": "rewards"}
        if config.trainer == "reward_model" and config.reward_model.labels == "steps":
            readings["reward_model"] = "steps"
        supplied = list_teacher_columns(config) | (GIVEN if config.trainer == "preference" else frozenset())
        needed = {need: asker for need, asker in columns_to_read(resolved, tokenizer).items() if need not in supplied}
        reading = readings.get(config.trainer, "samples")
        separator = config.reward_model.step_separator if config.has("reward_model") else "\n"
        if limited.streaming and part == "train":
            stream = StreamedData.of(
                limited,
                tokenizer,
                batch_size=max(config.training.batch_size, 2 * samples),
                seed=config.run.seed,
                shuffle=config.training.shuffle,
                needed=needed,
                reading=reading,
                step_separator=separator,
            )
            loaded, _ = stream.mini_batch(stream.start())
        else:
            loaded = load_columns(
                limited,
                tokenizer,
                split=part,
                seed=config.run.seed,
                needed=needed,
                vision=vision_of(files.facts, load_vision(files.facts, limited)),
                progress=display.data,
                reading=reading,
                step_separator=separator,
            )
    rows = config.training.micro_batch_rows or config.training.batch_size
    previewed = look_at(loaded, tokenizer, samples=samples, batch_size=rows)
    if as_json:
        import attrs

        echo_json(attrs.asdict(previewed), ensure_ascii=False)
    else:
        render.show_preview(previewed)
