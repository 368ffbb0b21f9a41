"""The files of a model beside its weights, and an export of all of them."""

import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.data.images.processor import NoVision, Vision
from skyrl_engine.engine.processor_files import write_processors
from skyrl_engine.errors import EngineError, ModelError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.run.durable import sync, sync_tree
from skyrl_engine.workers.launch import WorkerGroup

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

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer, with a padding token. Raises ModelError."""
        return load_tokenizer(self.facts.model)

    @property
    def pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int), "load_tokenizer sees to a padding token"
        return pad

    def write(self, group: WorkerGroup, output: Path) -> None:
        """Export the ranks' weights, the tokenizer, and the processors of a model that sees, to `output`, which appears only when it is whole.

        Raises ModelError when `output` is not empty or cannot be written.
        """
        refuse_occupied(output)
        aside = output.with_name(f".{output.name}.partial")
        try:
            if aside.exists():
                shutil.rmtree(aside)
            aside.mkdir(parents=True)
            group.export(aside)
            self.tokenizer.save_pretrained(aside)
            write_processors(self.facts, self.vision, aside)
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


def refuse_occupied(output: Path) -> None:
    """Raises ModelError for a path that holds something."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        raise ModelError(f"{output} exists and is not an empty directory", remedy="Name a new directory")
