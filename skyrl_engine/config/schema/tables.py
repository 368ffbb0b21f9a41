"""Tables that select a plugin: `use`, and the plugin's own options."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import Factory, field, frozen
from attrs.validators import deep_iterable, ge, gt, in_, le, min_len, optional

from skyrl_engine.config.schema.metadata import KIND, READ_BY
from skyrl_engine.contracts.kinds.observer import OnError
from skyrl_engine.contracts.values.model import PLACE
from skyrl_engine.contracts.values.roles import ROLES, Role


@frozen
class PluginTable:
    """A table that selects a plugin by `use`; every other key is an option of that plugin."""

    use: str = field(validator=min_len(1), metadata={PLACE: "reference"})
    """The plugin: `name`, `distribution:name`, or `./file.py:name`."""

    options: Mapping[str, Any] = Factory(dict)


@frozen
class ObserverTable:
    """The engine's own keys of an observer's table `[observers.NAME]`, in which every other key is an option of that observer."""

    on_error: OnError | None = field(default=None, validator=optional(in_(("stop", "warn"))))
    """A failure of the observer stops the run (`stop`), or is warned of and what is missing there is told at the end (`warn`); none: as the
    observer says, which is `warn` for trackers and `stop` for all others."""


@frozen
class TermTable(PluginTable):
    """A loss that is added to the objective, and its coefficient."""

    coef: float = field(kw_only=True)
    """Coefficient that multiplies the term's values."""

    on: Role | None = field(default=None, validator=optional(in_(tuple(ROLES))), kw_only=True)
    """Samples that the term is limited to: the `chosen` or the `rejected` ones of preferences; none: all. Weights stay those of all samples."""


@frozen
class LossTable(PluginTable):
    """The main loss, the terms added to it, and the corrections that multiply it."""

    terms: tuple[TermTable, ...] = field(default=(), metadata={KIND: "loss"})
    """Losses added to the main one, each multiplied by its `coef`: `[[loss.terms]]` with `use`, `coef` and the options of that loss."""

    corrections: tuple[PluginTable, ...] = field(default=(), metadata={KIND: "correction"})
    """Corrections that multiply the main loss, in this order: `[[loss.corrections]]` with `use` and the options of that correction."""


GeneratorPlacement = Literal["auto", "rank", "process"]


@frozen
class GeneratorTable(PluginTable):
    """The generator that samples, and the processes that it lives in."""

    placement: GeneratorPlacement = field(default="auto", validator=in_(("auto", "rank", "process")), kw_only=True)
    """Place of a generator that holds the model itself: `rank` in the processes of the ranks, which sample while nothing is trained; `process`
    in processes of its own, which sample beside the ranks. `auto`: `process` where `rl.staleness` is above 0, else `rank`. A generator that
    drives servers, such as vllm, has a place of its own."""

    replicas: int = field(default=1, validator=ge(1), kw_only=True)
    """Processes of the placement `process`, each with a whole copy of the model; a session stays in one."""

    launch: Literal["local", "ray"] = field(default="local", validator=in_(("local", "ray")), kw_only=True)
    """Machines of these processes: `local` is the controller's; with `ray` they are actors on the cluster of `run.launch = "ray"`, on any of
    its nodes, which must see the run's directory at the same path."""

    devices: tuple[str, ...] = field(
        default=(), validator=deep_iterable(min_len(1)), kw_only=True, metadata={READ_BY: ("launch", ("local",))}
    )
    """Devices of these processes, one each, such as `["cuda:4", "cuda:5"]`, which the ranks must not use unless `share_devices` is set; none:
    the CPU for all."""

    cpus: float = field(default=1.0, validator=ge(0), kw_only=True, metadata={READ_BY: ("launch", ("ray",))})
    """CPUs of the Ray cluster that each of these processes takes."""

    gpus: float | None = field(
        default=None, validator=optional([ge(0), le(1)]), kw_only=True, metadata={READ_BY: ("launch", ("ray",))}
    )
    """GPUs that each takes: 1, 0, or the part of one that several share; none: 1 where the ranks compute on GPUs, else 0."""

    silent_seconds: float = field(default=600.0, validator=gt(0), kw_only=True)
    """Longest time for which a process that samples may give no sign of life: it counts as hanging then, is ended, and is started again with
    its requests."""

    weights_seconds: float = field(default=3600.0, validator=gt(0), kw_only=True)
    """As `silent_seconds`, for the time in which a process loads the model or takes weights."""

    share_devices: bool = field(default=False, kw_only=True, metadata={READ_BY: ("launch", ("local",))})
    """Let ranks and generators work on the same devices in turns: each leaves the devices' memory while the other works. The ranks' weights and
    optimizer wait in host memory, the generators' weights are given to them again. Not with `rl.staleness` above 0."""
