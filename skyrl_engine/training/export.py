"""Export the model of a checkpoint: weights, configuration, tokenizer and processors, as transformers loads them.

A checkpoint is data. Nothing that it holds is run: of its plugins the backend alone is loaded, from an installed distribution or from a file
that the caller names, and code that came with a model only where the caller says so.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import evolve, frozen

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.converter import strict_converter
from skyrl_engine.config.schema import DataConfig, ModelConfig
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.values.model import ComputeDtype, EmptyModelConfig
from skyrl_engine.data.images.processor import load_vision
from skyrl_engine.engine.model_files import ModelFiles, refuse_occupied
from skyrl_engine.errors import CheckpointError, EngineError, ModelError, PluginIncompatibleError, PluginNotFoundError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.run.checkpoint import Checkpoint, CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.resume_checks import base_of, refuse_other_base
from skyrl_engine.run.session import BASE_DOCUMENT, CONFIG_DOCUMENT, PLUGINS_DOCUMENT
from skyrl_engine.scratch import scratch_folder
from skyrl_engine.workers.launch import launch_workers
from skyrl_engine.workers.messages import Export, Load, LoadAverages
from skyrl_engine.workers.spec import WorkerSpec


@frozen
class ExportChoices:
    """The caller of an export decides these in addition to its places.

    `model` is where the base model is, in place of what the run names; `merge` writes adapters merged into it. `precision` is that of the
    written weights (None: the run's). `ema` writes the average of the weights that `optimizer.ema_decay` keeps. `backend` is a reference to the
    backend plugin, which one from a local file needs.
    """

    model: str | None = None
    merge: bool = False
    ema: bool = False
    precision: ComputeDtype | None = None
    backend: str | None = None
    trust_remote_code: bool = False


@frozen
class _Recorded:
    """The part of a checkpoint's documents that an export reads. Only trainers that read images from files have `data`."""

    model: ModelConfig
    data: DataConfig | None
    seed: int
    backend: dict[str, Any]
    base: dict[str, Any]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "_Recorded":
        config, locks = checkpoint.document(CONFIG_DOCUMENT), checkpoint.document(PLUGINS_DOCUMENT)
        try:
            return cls(
                model=strict_converter().structure(config["model"], ModelConfig),
                data=strict_converter().structure(config["data"], DataConfig) if "data" in config else None,
                seed=int(config["run"]["seed"]),
                backend={"record": dict(locks["backend"]["record"]), "options": dict(locks["backend"]["options"])},
                base=checkpoint.document(BASE_DOCUMENT),
            )
        except CheckpointError:
            raise
        except Exception as error:
            raise checkpoint.damage_error(f"its documents are not as they were written ({type(error).__name__})") from error


def export_checkpoint(
    run_directory: Path, output: Path, step: int | Literal["best"] | None = None, choices: ExportChoices | None = None
) -> Checkpoint:
    """Write the model of a run's checkpoint to `output`, through the backend plugin that made it, on one rank.

    `step` None is the latest checkpoint, "best" the best one by `evaluation.best`.

    Raises CheckpointError for a missing or damaged checkpoint, ModelError for an `output` that is not empty or a base model that is needed
    and missing, and PluginError when the backend is not here in the same version.
    """
    choices = choices or ExportChoices()
    run = RunDirectory(run_directory)
    refuse_occupied(output)
    if not run.path.is_dir():
        raise EngineError(f"there is no run directory {run.path}", remedy="Name the directory a run has written")
    store = CheckpointStore(run.checkpoints)
    checkpoint = store.best() if step == "best" else store.at(step)
    checkpoint.verify()
    if not (checkpoint.model / "config.json").is_file():
        raise checkpoint.damage_error("model/config.json is missing")
    recorded = _Recorded.of(checkpoint)
    model = _base(recorded, choices)
    # a classifier has no place for adapters next to it
    merges = (choices.merge or model.classifier) and model.lora is not None
    if merges:
        refuse_other_base(attrs.asdict(recorded.model), recorded.base, base_of(_require_weights(model)))
    backend = _backend(recorded.backend, choices.backend).on_one_rank()
    exported = evolve(model, path=str(checkpoint.model), tokenizer=None, chat_template=None, revision=None, lora=None)
    files = ModelFiles(ModelFacts(exported), evolve(model, lora=None))
    files.recall_source(checkpoint.model)
    if recorded.data is not None:
        files.vision = load_vision(files.facts, recorded.data)
    spec = WorkerSpec(
        plugins={"backend": backend.to_lock_entry()},
        context=FactoryContext(seed=recorded.seed, pad_token_id=files.pad_token_id),
        model=_fill_model_config(model, checkpoint, precision=choices.precision, reads=choices.model is not None),
        optimizer=None,
        topology=backend.loaded.describe_backend(backend.options, 1).topology,
        device="cpu",
    )
    with ExitStack() as stack:
        adapters = stack.enter_context(scratch_folder("export")) / "adapters"
        with launch_workers(spec, launch="inline") as group:
            group.ask(LoadAverages(checkpoint.state) if choices.ema else Load(checkpoint.state))
            if not merges:
                files.write(lambda folder: group.ask(Export(folder)), output)
                return checkpoint
            adapters.mkdir()
            group.ask(Export(adapters))
        from skyrl_engine.modeling.exporting import write_merged

        assert model.lora is not None
        adapted = evolve(model, lora=model.lora.stored_at(str(adapters)))
        files.write(lambda folder: write_merged(adapted, folder, choices.precision or model.dtype), output)
    return checkpoint


def _base(recorded: _Recorded, choices: ExportChoices) -> ModelConfig:
    """Return the run's model, where the caller says it is, allowed to run code if the caller says so."""
    model = evolve(recorded.model, trust_remote_code=choices.trust_remote_code)
    if choices.model is None:
        return model
    place = Path(choices.model).expanduser()
    return evolve(model, path=str(place.absolute()) if place.exists() else choices.model, revision=None)


def _require_weights(model: ModelConfig) -> ModelConfig:
    """Return the model, whose weights must be there. Raises ModelError."""
    if model.path.startswith((".", "/", "~")) and not Path(model.path).expanduser().is_dir():
        raise ModelError(
            f"the base model {model.path}, into which adapters are merged, is not there", remedy="Say where it is with --model PATH"
        )
    return model


def _fill_model_config(model: ModelConfig, checkpoint: Checkpoint, *, precision: ComputeDtype | None, reads: bool) -> ModelConfig:
    """Return the model for the backend: made from the checkpoint's configuration or, where the caller named a model of all weights, read."""
    lora = model.lora
    if lora is not None and lora.path is not None:
        lora = lora.stored_at(str(checkpoint.model))
    filled = evolve(model, lora=lora, dtype=precision or model.dtype)
    if reads and lora is None:
        return filled
    fields = {field.name: getattr(filled, field.name) for field in attrs.fields(ModelConfig)}
    return EmptyModelConfig(**fields, configuration=str(checkpoint.model))


def _backend(lock: dict[str, Any], reference: str | None) -> SelectedPlugin:
    """Return the checkpoint's backend, never from text that the checkpoint holds or from a file that only the checkpoint names.

    Raises PluginError when it is not here, or is another.
    """
    record = PluginRecord.from_lock(lock["record"])
    if record.kind != "backend":
        raise CheckpointError(f"the checkpoint's backend is a {record.kind}", remedy="Export another checkpoint")
    if reference is None:
        if record.source == "file":
            raise PluginNotFoundError(
                f"the checkpoint was made by a backend in the local file {record.path}, and a checkpoint does not say which file is run",
                remedy=f"Add --backend {record.reference}, if you trust that file",
            )
        return SelectedPlugin.from_lock(lock)
    chosen = Registry.discover().resolve("backend", reference)
    if (chosen.distribution, chosen.version, chosen.name, chosen.sha256) != (
        record.distribution,
        record.version,
        record.name,
        record.sha256,
    ):
        raise PluginIncompatibleError(
            f"the checkpoint was made by {record}, and --backend names {chosen}", remedy="Name the backend that made it, unchanged"
        )
    return SelectedPlugin.of(chosen, lock["options"], "the checkpoint")
