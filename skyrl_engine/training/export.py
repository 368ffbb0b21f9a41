"""Trained weights as a Hugging Face directory that transformers loads: model, configuration, tokenizer and processors."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.converter import strict_converter
from skyrl_engine.config.schema import DataConfig, ModelConfig
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.data.images.processor import Vision, load_vision
from skyrl_engine.errors import EngineError, ModelError
from skyrl_engine.run.checkpoint import Checkpoint, CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.durable import sync, sync_tree
from skyrl_engine.run.session import CONFIG_DOCUMENT, PLUGINS_DOCUMENT
from skyrl_engine.training.processor_files import write_processors
from skyrl_engine.workers.launch import WorkerGroup, launch_workers
from skyrl_engine.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export_checkpoint(run_directory: Path, output: Path, step: int | None = None) -> Checkpoint:
    """Write the model of a run's checkpoint (None: the latest) to `output`, through the backend plugin that made it, on one rank.

    Raises CheckpointError for a missing or damaged checkpoint, ModelError for an `output` that is not empty, and PluginError when the plugins
    the checkpoint was made with are not installed in the same versions.
    """
    from skyrl_engine.model_facts.tokenizer import load_tokenizer

    run = RunDirectory(run_directory)
    _refuse_occupied(output)
    if not run.path.is_dir():
        raise EngineError(f"there is no run directory {run.path}", remedy="Name the directory a run has written")
    checkpoint = CheckpointStore(run.checkpoints).at(step)
    checkpoint.verify()
    locks: dict[str, Any] = checkpoint.document(PLUGINS_DOCUMENT)
    config: dict[str, Any] = checkpoint.document(CONFIG_DOCUMENT)
    model: ModelConfig = strict_converter().structure(config["model"], ModelConfig)
    data: DataConfig = strict_converter().structure(config["data"], DataConfig)
    backend = SelectedPlugin.from_lock(locks["backend"]).on_one_rank()
    tokenizer = load_tokenizer(model)
    spec = WorkerSpec(
        plugins={**locks, "backend": backend.lock()},
        context=FactoryContext(seed=config["run"]["seed"], pad_token_id=int(tokenizer.pad_token_id)),
        model=model.spec(config["run"]["seed"]),
        optimizer=None,
        topology=backend.loaded.describe_backend(backend.options, 1).topology,
        device="cpu",
    )
    with launch_workers(spec, launch="inline") as group:
        group.load(checkpoint.state)
        write_model(group, model, tokenizer, load_vision(model, data), output)
    return checkpoint


def write_model(group: WorkerGroup, model: ModelConfig, tokenizer: "PreTrainedTokenizerBase", vision: Vision, output: Path) -> None:
    """Export the ranks' weights, the tokenizer, and the processors of a model that sees, to `output`, which appears only when it is whole.

    Raises ModelError when `output` is not empty or cannot be written.
    """
    _refuse_occupied(output)
    aside = output.with_name(f".{output.name}.partial")
    try:
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        group.export(aside)
        tokenizer.save_pretrained(aside)
        write_processors(model, vision, aside)
        sync_tree(aside)
        aside.replace(output)  # onto nothing, or onto an empty directory
        sync(output.parent)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        cause = error.cause if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        raise ModelError(
            f"the model could not be written to {output} ({cause})",
            remedy="Free space there or make it writable; a run's checkpoints are whole, so `skyrl-engine export` can write it again",
            details=error.details if isinstance(error, EngineError) else (),
        ) from error


def _refuse_occupied(output: Path) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        raise ModelError(f"{output} exists and is not an empty directory", remedy="Name a new directory")
