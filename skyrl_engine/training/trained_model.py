"""Find what a model's name on a command line means: a model, an adapter, a run or a checkpoint, as a model to load."""

from pathlib import Path

from attrs import evolve, frozen

from skyrl_engine.config import load
from skyrl_engine.config.schema import LoraConfig, ModelConfig
from skyrl_engine.errors import EngineError, ModelError
from skyrl_engine.model_facts.json_file import read_object
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.resume_checks import base_of, refuse_other_base
from skyrl_engine.run.session import BASE_DOCUMENT, CONFIG_DOCUMENT
from skyrl_engine.training.export import ExportChoices, export_checkpoint

_ADAPTER = "adapter_config.json"


@frozen
class NamedModel:
    """A model by its name on a command line. `run` is the run directory that it comes from, None for any other; `step` that of a checkpoint
    (None: the trained model, or else the latest).
    """

    name: str
    run: Path | None = None
    step: int | None = None

    @classmethod
    def of(cls, name: str, step: int | None = None) -> "NamedModel":
        """Tell what a name means. Raises EngineError for a step of what is no run, and for a folder of checkpoints without one."""
        path = Path(name).expanduser()
        if (run := _run_around_checkpoint(path)) is not None:
            if step is not None:
                raise EngineError(f"{name} is a checkpoint, and a step chooses one of a run", remedy="Remove --step")
            saved = next((saved for saved in CheckpointStore(path.parent).all() if saved.path.name == path.name), None)
            if saved is None:
                raise EngineError(f"{name} is no whole checkpoint", remedy=f"Name one of {path.parent}")
            return cls(name, run, saved.step)
        if path.is_dir() and RunDirectory(path).config.is_file():
            return cls(name, path, step)
        if step is not None:
            raise EngineError(f"{name} is no run directory, and a step chooses a checkpoint of one", remedy="Remove --step")
        return cls(name)

    def load(self, scratch: Path, *, base: str | None, trust_remote_code: bool) -> ModelConfig:
        """Return the model to load: its folder or hub id, with `lora.path` where there are adapters; `base` is where their base is (None: where
        they say).

        A checkpoint is written into `scratch` as a model first. Raises CheckpointError for a run without a checkpoint and a model, and
        ModelError for adapters whose base is not there, or is another.
        """
        place = self.name if self.run is None else str(self._export(self.run, scratch, trust_remote_code=trust_remote_code))
        if not (Path(place).expanduser() / _ADAPTER).is_file():
            if base is not None:
                raise ModelError(f"{self.name} has all weights and needs no base", remedy="Remove --base")
            return ModelConfig(path=place)
        adapter = read_object(Path(place).expanduser() / _ADAPTER)
        stated = base or adapter.get("base_model_name_or_path")
        if not isinstance(stated, str) or not stated:
            raise ModelError(f"the adapter {self.name} does not say which model it is for", remedy="Name that model with --base")
        if stated.startswith((".", "/", "~")) and not Path(stated).expanduser().is_dir():
            raise ModelError(f"the base model {stated} of {self.name} is not there", remedy="Say where it is with --base")
        revision = adapter.get("revision") if base is None else None
        # the tokenizer, with its template, is that which was trained with
        own_tokenizer = place if (Path(place).expanduser() / "tokenizer_config.json").is_file() else None
        lora = LoraConfig(path=place) if self.run is None else _read_rounding(self.run).stored_at(place)
        model = ModelConfig(path=stated, tokenizer=own_tokenizer, revision=revision, lora=lora)
        if self.run is not None:
            _refuse_other_base(RunDirectory(self.run), self.step, model)
        return model

    def _export(self, run: Path, scratch: Path, *, trust_remote_code: bool) -> Path:
        """Return the model that the run left, or else that of its checkpoint, written into `scratch`."""
        directory = RunDirectory(run)
        if self.step is None and directory.model.is_dir():
            return directory.model
        if self.step is None and not CheckpointStore(directory.checkpoints).all():
            raise EngineError(
                f"the run {run} has no model yet: it has neither ended nor written a checkpoint",
                remedy="Wait for its first checkpoint (checkpoint.every), or start it with `skyrl-engine run`",
            )
        export_checkpoint(run, scratch / "model", self.step, ExportChoices(trust_remote_code=trust_remote_code))
        return scratch / "model"


def _read_rounding(run: Path) -> LoraConfig:
    """Return what a run's configuration says of the weights under its adapters. Raises ConfigError."""
    lora = load(RunDirectory(run).config).table.get("model", {}).get("lora", {})
    return LoraConfig(load_in_4bit=lora.get("load_in_4bit") is True, double_quantization=lora.get("double_quantization") is True)


def _run_around_checkpoint(path: Path) -> Path | None:
    """Return the run that a folder is a checkpoint of; None where it is none."""
    inside = path.parent
    is_inside = path.is_dir() and RunDirectory(inside.parent).checkpoints == inside and RunDirectory(inside.parent).config.is_file()
    return inside.parent if is_inside else None


def _refuse_other_base(run: RunDirectory, step: int | None, model: ModelConfig) -> None:
    """Raise CheckpointError where a checkpoint of the run says that its adapters are of another base than `model.path`."""
    store = CheckpointStore(run.checkpoints)
    if store.all():
        checkpoint = store.at(step)
        before = checkpoint.document(BASE_DOCUMENT)
        refuse_other_base(checkpoint.document(CONFIG_DOCUMENT)["model"], before, base_of(evolve(model, tokenizer=None)))
