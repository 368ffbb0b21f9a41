"""The files of a model other than its weights, and an export of all of them."""

import json
import logging
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import define, evolve, field

from skyrl_engine.config.schema import LoraConfig, ModelConfig
from skyrl_engine.data.images.processor import NoVision, Vision
from skyrl_engine.engine.processor_files import write_processors
from skyrl_engine.errors import EngineError, ModelError
from skyrl_engine.model_facts.dropout import restore_shares
from skyrl_engine.model_facts.facts import ModelFacts, find_file
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.run.durable import sync, sync_tree
from skyrl_engine.scratch import scratch_folder

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SOURCE_NAMES: Final = "source_tensors.json"
"""The names of all tensors in the files of the model that training started from, in a checkpoint's `model`."""


@define(eq=False, slots=False)
class ModelFiles:
    """The files of a model other than its weights: facts of its configuration, its tokenizer, and its image inputs or why it has none."""

    facts: ModelFacts
    source: ModelConfig
    """The model that training started from, with all its weights: what an export keeps of it is there."""
    vision: Vision = field(factory=lambda: NoVision("the engine was opened without data"))

    @classmethod
    def of(cls, model: ModelConfig) -> "ModelFiles":
        """The files of a model, each read when it is first asked for."""
        return cls(ModelFacts(model), model)

    def with_adapters(self, lora: LoraConfig) -> "ModelFiles":
        """The files of the same model with other adapters."""
        return ModelFiles(ModelFacts(evolve(self.facts.model, lora=lora)), self.source, self.vision)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer, with a padding token. Raises ModelError."""
        return load_tokenizer(self.facts.model)

    @property
    def pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int), "load_tokenizer sees to a padding token"
        return pad

    @cached_property
    def source_names(self) -> tuple[str, ...]:
        """The names of all tensors in the source's files; none where no file is here."""
        from skyrl_engine.modeling.unused_weights import source_tensors

        return tuple(sorted(source_tensors(self.source)))

    def remember_source(self) -> None:
        """Read what an export asks of the source while it is there: the names of its tensors, and its dropout where that is switched off."""
        _ = self.source_names, self.facts.switched_off

    def recall_source(self, directory: Path) -> None:
        """Take these names from what `keep` wrote into a directory; without them, as before 0.3, the source's files are asked."""
        if (directory / SOURCE_NAMES).is_file():
            self.__dict__["source_names"] = tuple(json.loads((directory / SOURCE_NAMES).read_text(encoding="utf-8")))
        elif not self.source_names:
            logger.warning(
                "the checkpoint does not say which tensors %s holds, and it is not there: tensors that training does not use, such as those of "
                "a vision tower, are not exported; --model PATH says where it is",
                self.source.path,
            )

    def keep(self, directory: Path) -> None:
        """Write into `directory` what an export needs of the model in addition to its weights, so that the model need not be there then.

        That is its configuration, its tokenizer with the chat template, its processors, an initial adapter's configuration, the names of all
        tensors in its files, and the code that came with a model whose code is trusted. Weights that training does not use are not kept: an
        export of a model that has some reads them from the model itself.
        """
        (directory / SOURCE_NAMES).write_text(json.dumps(self.source_names) + "\n", encoding="utf-8")
        model = self.facts.model
        for name in ("config.json", "generation_config.json"):
            if (file := find_file(model, name)) is not None:
                shutil.copyfile(file, directory / name)
                if model.trust_remote_code and name == "config.json":
                    for code in sorted(Path(file).parent.glob("*.py")):
                        shutil.copyfile(code, directory / code.name)
        if model.lora is not None and model.lora.path is not None:
            file = find_file(ModelConfig(model.lora.path), "adapter_config.json")
            assert file is not None, f"{model.lora.path} was loaded and has no adapter_config.json"
            shutil.copyfile(file, directory / "adapter_config.json")
        self._write_text_and_images(directory)

    def _write_text_and_images(self, directory: Path) -> None:
        self.tokenizer.save_pretrained(directory)
        write_processors(self.facts, self.vision, directory)

    def write(self, write_weights: Callable[[Path], object], output: Path) -> None:
        """Export weights, the tokenizer, and the processors of a model that sees, to `output`, which appears only when it is whole.

        `write_weights` fills a directory, as the message `Export` does. A reward model becomes a sequence classifier, its adapters merged.
        What a server must know that no file says is logged. Raises ModelError when `output` is not empty or cannot be written.
        """
        refuse_occupied(output)
        aside = output.with_name(f".{output.name}.partial")
        try:
            if aside.exists():
                shutil.rmtree(aside)
            aside.mkdir(parents=True)
            self._write_weights(write_weights, aside)
            self._restore_dropout(aside)
            self._write_text_and_images(aside)
            self._complete(aside)
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
        if (note := self.facts.serving_note) is not None:
            logger.warning("%s: %s", output, note)

    def _restore_dropout(self, directory: Path) -> None:
        """Write the model's own dropout into the configuration of an export whose training switched it off."""
        path = directory / "config.json"
        if self.facts.switched_off and path.is_file():
            stated = json.loads(path.read_text(encoding="utf-8"))
            restore_shares(stated, self.facts.switched_off)
            path.write_text(json.dumps(stated, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _complete(self, directory: Path) -> None:
        """Copy into an export the tensors of the source that training does not use."""
        if self.source_names:
            from skyrl_engine.modeling.unused_weights import complete_export

            complete_export(directory, self.source, self.source_names)

    def _write_weights(self, write_weights: Callable[[Path], object], directory: Path) -> None:
        model = self.facts.model
        if not model.classifier:
            write_weights(directory)
            return
        from skyrl_engine.modeling.classifier import become_classifier
        from skyrl_engine.modeling.exporting import write_merged

        if model.lora is None:
            write_weights(directory)
        else:
            with scratch_folder("export") as adapters:
                write_weights(adapters)
                write_merged(evolve(model, lora=model.lora.stored_at(str(adapters))), directory, model.dtype)
        become_classifier(directory, model, self.pad_token_id)


def refuse_occupied(output: Path) -> None:
    """Raises ModelError for a path that holds something."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        raise ModelError(f"{output} exists and is not an empty directory", remedy="Name a new directory")
