"""`FrozenModel`: a model on the engine's ranks that scores and that no step changes, such as a reference."""

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, evolve

from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import UnsupportedError

if TYPE_CHECKING:
    from skyrl_engine.engine.engine import Engine


@define
class FrozenModel:
    """A frozen model by its `name` on the ranks, loaded with `Engine.add_frozen`. `Engine.score(plan, model=name)` asks it.

    `model` None is the trained model with its adapters off, which takes no memory.
    """

    name: str
    model: ModelConfig | None

    @classmethod
    def planned(
        cls,
        name: str,
        trained: ModelConfig,
        description: BackendDescription,
        *,
        table: str,
        path: str | None = None,
        revision: str | None = None,
        adapters_off: bool | None = None,
    ) -> "FrozenModel":
        """Choose what stands for the model of configuration table `table`: `path`, or the trained model as it was before training.

        `adapters_off` None takes the trained model without adapters where that is the same model and the backend can. Raises UnsupportedError
        for what the backend does not declare, and for switches that contradict each other.
        """
        fresh = trained.lora is not None and trained.lora.path is None
        if adapters_off is None:
            adapters_off = fresh and path is None and "reference_by_adapters" in description.capabilities
        if adapters_off:
            if trained.lora is None:
                raise UnsupportedError(
                    f"{table}.adapters_off is true, and the run trains no adapters", remedy=f"Remove {table}.adapters_off"
                )
            if path is not None:
                raise UnsupportedError(
                    f"{table}.adapters_off takes the trained model's own base, and {table}.path names another model",
                    remedy="Give one of them",
                )
            _require("reference_by_adapters", description, table)
            return cls(name, None)
        _require("second_model", description, table)
        own = path is None
        lora = trained.lora if own and not fresh else None
        return cls(
            name,
            evolve(
                trained,
                path=trained.path if path is None else path,
                revision=trained.revision if own else revision,
                lora=lora,
                value_head=False,
                activation_checkpointing=False,
            ),
        )

    def refreshed(self, engine: "Engine", directory: Path) -> "FrozenModel":
        """Make the trained model of this moment the frozen one: it is exported into `directory` and loaded from there.

        A run that is resumed finds it there. All weights must be trained. Raises ModelError.
        """
        assert self.model is not None, "a model without its adapters is never refreshed"
        assert self.model.lora is None, "planning refuses to refresh where adapters are trained"
        engine.export(directory)
        made = evolve(self, model=evolve(self.model, path=str(directory), revision=None, lora=None))
        made.load(engine)
        return made

    def load(self, engine: "Engine") -> None:
        """Load the model onto every rank, in the place of one of that name. Raises ModelError."""
        engine.add_frozen(self)


def _require(capability: str, description: BackendDescription, table: str) -> None:
    if capability not in description.capabilities:
        what = "second model on its ranks" if capability == "second_model" else "score of the trained model without its adapters"
        raise UnsupportedError(
            f"a frozen model is asked for, and the backend does not declare {capability!r}: it has no {what}",
            remedy=f"Remove what reads its scores, or choose a backend that has it, such as fsdp (table [{table}])",
        )
