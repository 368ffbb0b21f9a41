"""The reference of a run on its ranks, and how it follows the trained model (TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656)."""

import shutil
from pathlib import Path
from typing import Self

from attrs import define

from skyrl_engine.config.schema import ReferenceConfig
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.run.durable import sync_tree

_START = "start"
"""The weights of the reference that a run began with, under the names of an export; only what mixes with them needs them."""


@define(eq=False)
class MovingReference:
    """The frozen model that is the reference, and the folder of the models that become it.

    `copied` names the one in `directory` that it is, None while it is the model that the run began with, `original`. A checkpoint keeps the
    name: the run directory may move.
    """

    engine: Engine
    directory: Path
    table: ReferenceConfig
    original: FrozenModel
    copied: str | None = None

    @classmethod
    def load(
        cls, engine: Engine, directory: Path, table: ReferenceConfig, original: FrozenModel, copied: str | None = None
    ) -> Self:
        """Load the reference onto the ranks: the model that the run began with, or the one that a checkpoint names. Raises ModelError."""
        name = None if copied is None else Path(copied).name
        engine.add_frozen(original if name is None else original.from_export(directory / name))
        return cls(engine, directory, table, original, name)

    def refresh(self, step: int) -> None:
        """Mix the trained weights into the reference, where step number `step` is one after which that is due. Raises ModelError."""
        every = self.table.refresh_every
        if every is None or step % every:
            return
        directory = self.directory / f"step-{step}"
        if not directory.exists():
            self._write(directory)
        self.engine.add_frozen(self.original.from_export(directory))
        self.copied = directory.name

    def _write(self, directory: Path) -> None:
        if self.table.mixup == 1:
            self.engine.export(directory)
            return
        from skyrl_engine.modeling.mixing import mix_weights

        aside = directory.with_name(f".{directory.name}.unmixed")
        shutil.rmtree(aside, ignore_errors=True)
        self.engine.export(aside)
        mix_weights(aside, self._write_start() if self.copied is None else self.directory / self.copied, share=self.table.mixup)
        sync_tree(aside)
        aside.replace(directory)

    def _write_start(self) -> Path:
        """Write the weights that the run began with, where an earlier part of the run has not."""
        from skyrl_engine.modeling.exporting import write_pretrained
        from skyrl_engine.modeling.loading import load_causal_lm

        start = self.directory / _START
        if not start.exists():
            aside = start.with_name(f".{_START}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            assert isinstance(self.original.model, ModelConfig), "planning refuses to refresh where adapters are trained"
            write_pretrained(load_causal_lm(self.original.model, images=True), aside)
            sync_tree(aside)
            aside.replace(start)
        return start
