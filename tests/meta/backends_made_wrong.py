"""FSDP with one mistake: a plugin of it. A function or two is what such a mistake takes."""

from collections.abc import Callable
from typing import Any

import attrs

from skyrl_engine import hookimpl
from skyrl_engine.contracts import BackendDescription, Objective
from skyrl_engine_fsdp.plugin import FsdpConfig, fsdp

Make = Callable[[type[Any]], type[Any]]


@attrs.frozen
class Wrong:
    """A plugin whose backend is what `change` makes of FSDP's class, with `more` capabilities declared or fewer, and `offers` as layouts."""

    change: Make
    more: frozenset[str] = frozenset()
    fewer: frozenset[str] = frozenset()
    rehearse: Callable[[Any, bool], None] | None = None
    offers: Any = None

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return FsdpConfig

    @hookimpl
    def skyrl_engine_describe_backend(self, config: Any, world_size: int) -> BackendDescription:
        described = as_fsdp_describes(config, world_size)
        rehearse = self.rehearse or described.rehearse
        offered = self.offers or described.layout_choices
        capabilities = (described.capabilities | self.more) - self.fewer
        return attrs.evolve(described, capabilities=capabilities, rehearse=rehearse, layout_choices=offered)

    @hookimpl
    def skyrl_engine_make_backend(self, config: Any) -> Any:
        from skyrl_engine_fsdp.backend import FsdpBackend

        return self.change(FsdpBackend)(config or FsdpConfig())


def as_fsdp_describes(config: Any, world_size: int) -> BackendDescription:
    import inspect

    offered = {"config": config or FsdpConfig(), "world_size": world_size}
    taken = inspect.signature(fsdp.skyrl_engine_describe_backend).parameters
    return fsdp.skyrl_engine_describe_backend(**{name: offered[name] for name in taken})


def scale(factor: Callable[[Any, Any], float]) -> Make:
    """The differentiated sum times `factor(backend, batch)`; what is reported stays."""

    def change(fsdp_backend: type[Any]) -> type[Any]:
        class Backend(fsdp_backend):
            def forward_backward(self, batch: Any, objective: Objective) -> Any:
                by = factor(self, batch)

                class Scaled:
                    needs, temperature = objective.needs, objective.temperature

                    def __call__(self, scores: Any, micro_batch: Any) -> Any:
                        total, output = objective(scores, micro_batch)
                        return total * by, output

                return super().forward_backward(batch, Scaled())

        return Backend

    return change


def overriding(**methods: Callable[..., Any]) -> Make:
    """Methods in place of FSDP's; each is given the original one before its own arguments."""

    def change(fsdp_backend: type[Any]) -> type[Any]:
        def bound(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, *arguments: Any) -> Any:
                def original(*others: Any) -> Any:
                    return getattr(fsdp_backend, name)(self, *others)

                return method(self, original, *arguments)

            return call

        return type("Backend", (fsdp_backend,), {name: bound(name, method) for name, method in methods.items()})

    return change


def world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size()
