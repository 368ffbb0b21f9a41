"""Export the model of a checkpoint: weights, configuration, tokenizer and processors, as transformers loads them."""

from pathlib import Path
from typing import Any

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.converter import strict_converter
from skyrl_engine.config.schema import DataConfig, ModelConfig
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.data.images.processor import load_vision
from skyrl_engine.engine.model_files import ModelFiles, refuse_occupied
from skyrl_engine.errors import EngineError
from skyrl_engine.run.checkpoint import Checkpoint, CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.session import CONFIG_DOCUMENT, PLUGINS_DOCUMENT
from skyrl_engine.workers.launch import launch_workers
from skyrl_engine.workers.spec import WorkerSpec


def export_checkpoint(run_directory: Path, output: Path, step: int | None = None) -> Checkpoint:
    """Write the model of a run's checkpoint (None: the latest) to `output`, through the backend plugin that made it, on one rank.

    Raises CheckpointError for a missing or damaged checkpoint, ModelError for an `output` that is not empty, and PluginError when the plugins
    the checkpoint was made with are not installed in the same versions.
    """
    run = RunDirectory(run_directory)
    refuse_occupied(output)
    if not run.path.is_dir():
        raise EngineError(f"there is no run directory {run.path}", remedy="Name the directory a run has written")
    checkpoint = CheckpointStore(run.checkpoints).at(step)
    checkpoint.verify()
    locks: dict[str, Any] = checkpoint.document(PLUGINS_DOCUMENT)
    config: dict[str, Any] = checkpoint.document(CONFIG_DOCUMENT)
    model: ModelConfig = strict_converter().structure(config["model"], ModelConfig)
    data: DataConfig = strict_converter().structure(config["data"], DataConfig)
    backend = SelectedPlugin.from_lock(locks["backend"]).on_one_rank()
    files = ModelFiles.of(model)
    files.vision = load_vision(files.facts, data)
    spec = WorkerSpec(
        plugins={**locks, "backend": backend.lock()},
        context=FactoryContext(seed=config["run"]["seed"], pad_token_id=files.pad_token_id),
        model=model,
        optimizer=None,
        topology=backend.loaded.describe_backend(backend.options, 1).topology,
        device="cpu",
    )
    with launch_workers(spec, launch="inline") as group:
        group.load(checkpoint.state)
        files.write(group, output)
    return checkpoint
