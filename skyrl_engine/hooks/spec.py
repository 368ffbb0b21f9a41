"""Every hook of the engine, with its full signature. A plugin may take fewer arguments than a hook offers, by name.

Factory hooks are addressed to exactly one plugin, once per run. Observer hooks are broadcast to every observer.
"""

# mypy: disable-error-code="empty-body"
# A hook specification is a signature; its body is never called.

from typing import Any

from skyrl_engine.contracts.kinds.advantage import Advantage
from skyrl_engine.contracts.kinds.backend import Backend, BackendDescription
from skyrl_engine.contracts.kinds.collator import Collator
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.correction import Correction
from skyrl_engine.contracts.kinds.environment import Environment
from skyrl_engine.contracts.kinds.generator import Generator, GeneratorDescription
from skyrl_engine.contracts.kinds.group_filter import GroupFilter
from skyrl_engine.contracts.kinds.loss import Loss
from skyrl_engine.contracts.kinds.merger import Merger
from skyrl_engine.contracts.kinds.observer import (
    CheckpointSaved,
    EvaluationFinished,
    RolloutsFinished,
    SessionFinished,
    SessionStarted,
    StepFinished,
)
from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.hooks.markers import hookspec


@hookspec(firstresult=True)
def skyrl_engine_config_schema() -> type[Any] | None:
    """The attrs class of this plugin's own config table. A plugin without it takes no options. versionadded: 0.1"""


@hookspec(firstresult=True)
def skyrl_engine_make_collator(config: Any, context: FactoryContext) -> Collator:
    """Make the collator. versionadded: 0.1"""


@hookspec(firstresult=True)
def skyrl_engine_make_loss(config: Any, context: FactoryContext) -> Loss:
    """Make the loss. versionadded: 0.1"""


@hookspec(firstresult=True)
def skyrl_engine_make_correction(config: Any, context: FactoryContext) -> Correction:
    """Make the correction. versionadded: 0.1"""


@hookspec(firstresult=True)
def skyrl_engine_make_reducer(config: Any, context: FactoryContext) -> Reducer:
    """Make the reducer. versionadded: 0.1"""


@hookspec(firstresult=True)
def skyrl_engine_make_backend(config: Any, context: FactoryContext) -> Backend:
    """Make the backend on a rank; torch may be imported here. versionadded: 0.1"""


@hookspec(firstresult=True)
def skyrl_engine_describe_backend(config: Any, world_size: int) -> BackendDescription:
    """Lay out `world_size` ranks and declare capabilities; called on the controller, without torch. versionadded: 0.1

    Raises UnsupportedError when the configured parallel sizes do not divide the world.
    """


@hookspec(firstresult=True)
def skyrl_engine_make_merger(config: Any, context: FactoryContext) -> Merger:
    """Make the merger. versionadded: 0.1"""


@hookspec(firstresult=True)
def skyrl_engine_make_advantage(config: Any, context: FactoryContext) -> Advantage:
    """Make the estimator of advantages. versionadded: 0.2"""


@hookspec(firstresult=True)
def skyrl_engine_make_environment(config: Any, context: FactoryContext) -> Environment:
    """Make the environment, on the controller for its tasks and in every process that runs its episodes. versionadded: 0.2"""


@hookspec(firstresult=True)
def skyrl_engine_make_group_filter(config: Any, context: FactoryContext) -> GroupFilter:
    """Make the filter of groups. versionadded: 0.2"""


@hookspec(firstresult=True)
def skyrl_engine_make_generator(config: Any, context: FactoryContext) -> Generator:
    """Make the generator where its description places it; torch may be imported here. versionadded: 0.2"""


@hookspec(firstresult=True)
def skyrl_engine_describe_generator(config: Any) -> GeneratorDescription:
    """Declare capabilities, forms of weights and placement; called on the controller, without torch. versionadded: 0.2"""


@hookspec(firstresult=True)
def skyrl_engine_make_observer(config: Any, context: FactoryContext) -> object:
    """Make an observer: an object that implements any of the observer hooks below. versionadded: 0.1"""


@hookspec(historic=True)
def skyrl_engine_session_started(event: SessionStarted) -> None:
    """A session is ready to train; observers registered later are told too. versionadded: 0.1"""


@hookspec
def skyrl_engine_rollouts_finished(event: RolloutsFinished) -> None:
    """The rollouts of an optimizer step are there, and are not yet trained on. versionadded: 0.2"""


@hookspec
def skyrl_engine_step_finished(event: StepFinished) -> None:
    """An optimizer step is done. versionadded: 0.1"""


@hookspec
def skyrl_engine_evaluation_finished(event: EvaluationFinished) -> None:
    """An evaluation pass is done. versionadded: 0.1"""


@hookspec
def skyrl_engine_checkpoint_saved(event: CheckpointSaved) -> None:
    """A checkpoint is complete on disk. versionadded: 0.1"""


@hookspec
def skyrl_engine_session_finished(event: SessionFinished) -> None:
    """The session ends, well or not. versionadded: 0.1"""


@hookspec
def skyrl_engine_manifest_extra() -> dict[str, Any]:
    """JSON-serialisable facts to add to the run manifest under "extra". versionadded: 0.1"""
