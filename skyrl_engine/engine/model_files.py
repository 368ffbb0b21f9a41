"""The files of a model beside its weights, and an export of all of them."""

import shutil
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from skyrl_engine.config.schema import LoraConfig, ModelConfig
from skyrl_engine.data.images.processor import NoVision, Vision
from skyrl_engine.engine.processor_files import write_processors
from skyrl_engine.errors import EngineError, ModelError
from skyrl_engine.model_facts.facts import ModelFacts, find_file
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.run.durable import sync, sync_tree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@define(eq=False, slots=False)
class ModelFiles:
    """The files of a model beside its weights: facts of its configuration, its tokenizer, and its image inputs or why it has none."""

    facts: ModelFacts
    vision: Vision = field(factory=lambda: NoVision("the engine was opened without data"))

    @classmethod
    def of(cls, model: ModelConfig) -> "ModelFiles":
        """The files of a model, each read when it is first asked for."""
        return cls(ModelFacts(model))

    def with_adapters(self, lora: LoraConfig) -> "ModelFiles":
        """The files of the same model with other adapters."""
        return ModelFiles(ModelFacts(evolve(self.facts.model, lora=lora)), self.vision)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer, with a padding token. Raises ModelError."""
        return load_tokenizer(self.facts.model)

    @property
    def pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int), "load_tokenizer sees to a padding token"
        return pad

    def keep(self, directory: Path) -> None:
        """Write into `directory` what an export needs of the model beside its weights, so that the model need not be there then.

        That is its configuration, its tokenizer with the chat template, its processors, an initial adapter's configuration, and the code that
        came with a model whose code is trusted.
        """
        model = self.facts.model
        for name in ("config.json", "generation_config.json"):
            if (found := find_file(model, name)) is not None:
                shutil.copyfile(found, directory / name)
                if model.trust_remote_code and name == "config.json":
                    for code in sorted(Path(found).parent.glob("*.py")):
                        shutil.copyfile(code, directory / code.name)
        if model.lora is not None and model.lora.path is not None:
            found = find_file(ModelConfig(model.lora.path), "adapter_config.json")
            assert found is not None, f"{model.lora.path} was loaded and has no adapter_config.json"
            shutil.copyfile(found, directory / "adapter_config.json")
        self._write_text_and_images(directory)

    def _write_text_and_images(self, directory: Path) -> None:
        self.tokenizer.save_pretrained(directory)
        write_processors(self.facts, self.vision, directory)

    def write(self, write_weights: Callable[[Path], None], output: Path) -> None:
        """Export weights, the tokenizer, and the processors of a model that sees, to `output`, which appears only when it is whole.

        `write_weights` fills a directory, such as `WorkerGroup.export`. A reward model becomes a sequence classifier, its adapters merged.
        Raises ModelError when `output` is not empty or cannot be written.
        """
        refuse_occupied(output)
        aside = output.with_name(f".{output.name}.partial")
        try:
            if aside.exists():
                shutil.rmtree(aside)
            aside.mkdir(parents=True)
            self._write_weights(write_weights, aside)
            self._write_text_and_images(aside)
            sync_tree(aside)
            aside.replace(output)  # onto nothing, or onto an empty directory
            sync(output.parent)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            cause = error.cause if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            raise ModelError(
                f"the model could not be written to {output} ({cause})",
                remedy=error.remedy
                if isinstance(error, EngineError)
                else "Free space there or make it writable; a run's checkpoints are whole, so `skyrl-engine export` can write it again",
                details=error.details if isinstance(error, EngineError) else (),
            ) from error

    def _write_weights(self, write_weights: Callable[[Path], None], directory: Path) -> None:
        model = self.facts.model
        if not model.classifier:
            write_weights(directory)
            return
        from skyrl_engine.modeling.classifier import become_classifier
        from skyrl_engine.modeling.exporting import write_merged

        if model.lora is None:
            write_weights(directory)
        else:
            with tempfile.TemporaryDirectory(prefix="skyrl-engine-export-") as adapters:
                write_weights(Path(adapters))
                write_merged(evolve(model, lora=evolve(model.lora, path=adapters)), directory, model.dtype)
        become_classifier(directory, model, self.pad_token_id)


def refuse_occupied(output: Path) -> None:
    """Raises ModelError for a path that holds something."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        raise ModelError(f"{output} exists and is not an empty directory", remedy="Name a new directory")
