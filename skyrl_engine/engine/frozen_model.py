"""`FrozenModel`: a model on the engine's ranks that scores and that no step changes, such as a reference."""

from pathlib import Path

from attrs import define, evolve

from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import UnsupportedError


@define
class FrozenModel:
    """A frozen model by its `name` on the ranks, where `Engine.add_frozen` loads it; `Engine.score(plan, model=name)` asks it.

    `model` None is the trained model with its adapters off, which takes no memory.
    """

    name: str
    model: ModelConfig | None

    @classmethod
    def choose(
        cls,
        name: str,
        trained: ModelConfig,
        description: BackendDescription,
        *,
        table: str,
        path: str | None = None,
        revision: str | None = None,
        adapters_off: bool | None = None,
        classifier: bool = False,
    ) -> "FrozenModel":
        """Choose what stands for the model of configuration table `table`: `path`, or the trained model as it was before training.

        `classifier` says that it is a reward model, whose score is "values".

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
        is_trained_model = path is None
        # new adapters change nothing, but what they lie over may be rounded
        has_own_base = trained.lora is not None and trained.lora.load_in_4bit
        lora = trained.lora if is_trained_model and (not fresh or has_own_base) else None
        return cls(
            name,
            evolve(
                trained,
                path=trained.path if path is None else path,
                revision=trained.revision if is_trained_model else revision,
                lora=lora,
                value_head=classifier,
                classifier=classifier,
                right_label=None,
                activation_checkpointing=False,
                neftune_alpha=None,
                freeze=(),
            ),
        )

    def from_export(self, directory: Path) -> "FrozenModel":
        """Return the frozen model of this name in `directory`, an export of the trained one, all of whose weights are trained."""
        assert self.model is not None, "a model without its adapters is never refreshed"
        assert self.model.lora is None, "planning refuses to refresh where adapters are trained"
        return evolve(self, model=evolve(self.model, path=str(directory), revision=None, lora=None))


def _require(capability: str, description: BackendDescription, table: str) -> None:
    if capability not in description.capabilities:
        purpose = "second model on its ranks" if capability == "second_model" else "score of the trained model without its adapters"
        raise UnsupportedError(
            f"a frozen model is asked for, and the backend does not declare {capability!r}: it has no {purpose}",
            remedy=f"Remove what reads its scores, or choose a backend that has it, such as fsdp (table [{table}])",
        )
