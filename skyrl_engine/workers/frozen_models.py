"""Frozen models on a rank: they score tokens next to the trained model, and no step changes them."""

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, cast

import numpy as np
import torch

from skyrl_engine.cleanup import finally_close
from skyrl_engine.contracts.kinds.backend import Backend, Objective, RankBatch, SwitchesAdapters, Teaches
from skyrl_engine.contracts.kinds.needs import TEACHER_MODEL
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.outputs import RankOutput
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.workers.aligned_teacher import AlignedTeacher


class ScoringModel(Protocol):
    """A model on this rank that is asked for scores alone; a backend that was set up without an optimizer is one."""

    def forward(self, batch: RankBatch, objective: Objective) -> RankOutput: ...

    def close(self) -> None: ...


class WithoutAdapters:
    """The trained model with its adapters off."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def forward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score without gradients, with the base model alone."""
        with cast("SwitchesAdapters", self._backend).without_adapters():
            return self._backend.forward(batch, objective)

    def close(self) -> None:
        """Leave the backend to its owner."""


class FrozenModels:
    """The frozen models of a rank by name. `trained` is the backend of the trained model, and `load` sets up a backend for a further one."""

    def __init__(self, trained: Backend, load: Callable[[ModelConfig], Backend]) -> None:
        self._trained, self._load = trained, load
        self._models: dict[str, ScoringModel] = {}
        self._configs: dict[str, ModelConfig] = {}
        self._aligned: AlignedTeacher | None = None

    def add(self, name: str, model: ModelConfig | None) -> None:
        """Load a model, in the place of one of its name; None is the trained model without its adapters.

        The random states of the process stay as they are. Raises what loading raises.
        """
        if (before := self._models.pop(name, None)) is not None:
            before.close()
        if name == TEACHER_MODEL:
            self._aligned = None
        if model is None:
            self._models[name] = WithoutAdapters(self._trained)
            return
        self._configs[name] = model
        states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
        self._models[name] = self._load(model)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])

    def scorer(self, name: str | None) -> ScoringModel:
        """Return the model of this name; None is the trained one."""
        return self._trained if name is None else self._models[name]

    @property
    def teacher(self) -> Teaches:
        """The frozen model that a student is distilled from."""
        return cast("Teaches", self._models[TEACHER_MODEL])

    def aligned_teacher(self, student: ModelConfig) -> AlignedTeacher:
        """Return the teacher as one that reads the texts of a student with this model's tokenizer. Raises ModelError for tokenizers that
        cannot be loaded.
        """
        if self._aligned is None:
            model = self._configs[TEACHER_MODEL]
            positions = ModelFacts(model).extended_length
            self._aligned = AlignedTeacher.of(self.teacher, load_tokenizer(student), load_tokenizer(model), positions)
        return self._aligned

    @property
    def whole_models(self) -> list[ScoringModel]:
        """The models that have weights of their own."""
        return [model for model in self._models.values() if not isinstance(model, WithoutAdapters)]

    def close(self) -> None:
        """Free all of them, whichever fails. Raises the first failure."""
        with ExitStack() as ends:
            for model in self._models.values():
                ends.enter_context(finally_close(model.close))
