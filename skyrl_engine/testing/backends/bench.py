"""The bench that backends are checked on: models that are written once, and their right results by definition."""

import json
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import attrs
from attrs import define

from skyrl_engine.errors import WorkerError
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.modeling.tiny import VOCABULARY, make_parts_differ, write_model, write_vision_model
from skyrl_engine.testing.adapters import write_adapter, write_rounded_model
from skyrl_engine.testing.backends.batches import DefinedResult, definition, documents, many_documents, picture_documents
from skyrl_engine.testing.backends.held_backend import Answer, Opening, on_rank
from skyrl_engine.testing.backends.ranks import BackendRanks, RankFailed
from skyrl_engine.testing.pictures import Variant
from skyrl_engine.testing.ranks.world import start_shared_world

Model = Literal["qwen3", "llama", "dropout", "critic", "vision", "outside meta"]
"""A tied Qwen3, an untied Llama, a Qwen3 that draws random numbers in training, one with a value head, a Qwen3-VL, which takes pictures, and a
DiffLlama, whose code makes some parameters on the CPU inside of `torch.device("meta")`.
"""

FAMILIES: Mapping[Model, str] = {"llama": "llama", "outside meta": "diffllama"}
"""Models by their type in transformers where it is not qwen3."""


@define(eq=False)
class Bench:
    """Models for one backend after the other, on the ranks that this process keeps. A context manager; leaving it removes the models."""

    _stack: ExitStack = attrs.field(factory=ExitStack, init=False)
    _models: dict[str, str] = attrs.field(factory=dict, init=False)
    _adapters: dict[str, str] = attrs.field(factory=dict, init=False)
    _rounded: dict[str, str] = attrs.field(factory=dict, init=False)
    _definitions: dict[Any, DefinedResult] = attrs.field(factory=dict, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        on_rank("close")
        self._models.clear()
        self._adapters.clear()
        self._rounded.clear()
        self._stack.close()

    def ranks(self, opening: Opening) -> BackendRanks:
        """Set the backend up on every rank of the layout."""
        size = opening.topology.world_size
        return BackendRanks(lambda *call: [on_rank(*call)] if size == 1 else self._everywhere(size, *call), opening)

    def _everywhere(self, size: int, *call: Any) -> list[Answer]:
        try:
            return start_shared_world(size).run(on_rank, *call)
        except WorkerError as error:  # dead, or waiting for something that never comes
            raise RankFailed(error.cause) from error

    def model(self, name: Model) -> str:
        """Return the model's directory, written once."""
        if name not in self._models:
            directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-engine-bench-")))
            if name == "vision":
                write_vision_model(directory)
                return self._models.setdefault(name, str(directory))
            with quiet_progress():
                write_model(directory, FAMILIES.get(name, "qwen3"), value_head=name == "critic")
            make_parts_differ(directory)
            if name == "dropout":
                config = json.loads((directory / "config.json").read_text())
                (directory / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.3}))
            self._models[name] = str(directory)
        return self._models[name]

    def definition(
        self,
        model: Model,
        numbers: Iterable[int],
        *,
        temperature: float = 1.0,
        needs: tuple[str, ...] = ("logprobs", "entropy"),
        pictures: Variant | None = None,
        adapted: bool = False,
        many: bool = False,
        teacher: Model | None = None,
        noise: bool = False,
        rounded: bool = False,
    ) -> DefinedResult:
        """Return loss, gradients and scores of these documents in float64, computed one at a time in this process.

        With `adapted` the model has the adapters of `adapter`; with `many` the documents are those of `many_documents`; scores may compare with
        a `teacher`, and input embeddings have `noise`. With `rounded` the model is that of `rounded_model`.
        """
        key = (model, tuple(numbers), temperature, needs, pictures, adapted, many, teacher, noise, rounded)
        if key not in self._definitions:
            available = many_documents() if many else documents() if pictures is None else picture_documents(VOCABULARY, pictures)
            chosen = [document for document in available if document.number in key[1]]
            adapter = self.adapter(model) if adapted else None
            self._definitions[key] = definition(
                self.rounded_model(model) if rounded else self.model(model),
                chosen,
                temperature=temperature,
                needs=needs,
                adapter=adapter,
                teacher=None if teacher is None else self.model(teacher),
                noise=noise,
            )
        return self._definitions[key]

    def rounded_model(self, model: Model) -> str:
        """Return the directory of the model whose linear layers are as 4 bits hold them, written once."""
        if model not in self._rounded:
            directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-engine-bench-")))
            with quiet_progress():
                self._rounded[model] = write_rounded_model(self.model(model), directory)
        return self._rounded[model]

    def adapter(self, model: Model) -> str:
        """Return a directory of adapters for the model, written once."""
        if model not in self._adapters:
            directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-engine-bench-")))
            with quiet_progress():
                self._adapters[model] = write_adapter(self.model(model), directory)
        return self._adapters[model]
