"""Promises of a backend about its memory: what it declares for plans is what it holds."""

from typing import Any, Final

from attrs import fields

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.engine.model_shape import read_model_shape
from skyrl_engine.errors import EngineError
from skyrl_engine.model_facts.memory import format_bytes
from skyrl_engine.model_facts.rank_memory import count_state_bytes, list_of_stage
from skyrl_engine.testing.backends.step_promises import SPEC
from skyrl_engine.testing.backends.subject import BackendCase, BackendSubject, backend_promise, require_words
from skyrl_engine.testing.promise import Broken, Promise, promise

TOLERANCE: Final = 0.15
"""Share by which planned bytes may differ from held ones."""
_MODEL_BUFFERS: Final = 48 * 2**10
"""Bytes for masks and frequencies of the bench's models, which are no state and vanish beside that of a model that people train."""


@backend_promise("Between a backward pass and its step, a rank holds the bytes of state that describe_state declares, within 15 %")
def declared_state(subject: BackendSubject, case: BackendCase) -> None:
    model = ModelConfig(subject.bench.model(case.model))
    shape = read_model_shape(model)
    assert shape is not None, "the bench's models are made from their configurations"
    described = subject.describe(case.sizes.options, case.sizes.ranks)
    layout, topology = described.describe_state(model), described.topology
    with subject.open_ranks(case, optimizer=SPEC, counts_bytes=True) as ranks:
        ranks.forward_backward(case.whole())
        ranks.optim_step()
        ranks.forward_backward(case.whole())
        held_by_rank = ranks.count_bytes()
    for rank, held in enumerate(held_by_rank):
        own = list_of_stage(shape.parameters, shape.layers, topology, layout.pieces, topology.coords(rank).pp)
        device, host = count_state_bytes(shape, layout, layout.holdings, own, topology, "adamw")
        declared = sum(device.values()) + sum(host.values())
        # buffers may come and go
        most = (declared + layout.buffers * shape.master_bytes) * (1 + TOLERANCE) + _MODEL_BUFFERS
        if not declared * (1 - TOLERANCE) <= held <= most:
            raise Broken(
                f"rank {rank} holds {format_bytes(held)} of tensors, and describe_state declares {format_bytes(declared)} of weights, "
                "gradients and optimizer state",
                "Declare every copy that a rank holds, with the ranks that divide it, and no other",
            )


def _offers_nothing(subject: BackendSubject) -> str | None:
    return None if subject.describe({}, 1).layout_choices else "it offers no layouts"


@promise(
    "The options of layouts that it offers are its own, and it lays out every value or refuses it in words", exempt=_offers_nothing
)
def offered_layouts(subject: BackendSubject, _case: None) -> None:
    schema = subject.plugin.loaded.schema
    own = set() if schema is None else {each.name for each in fields(schema)}
    for ranks in (1, 2, 6):
        for name, values in subject.describe({}, ranks).layout_choices.items():
            if name not in own:
                raise Broken(
                    f"offers layouts by the option {name!r}, which it does not have", "Name options of its configuration schema"
                )
            for value in values:
                try:
                    chosen = subject.with_options({name: value})
                except EngineError as error:
                    raise Broken(
                        f"offers {name} = {value!r}, which its schema refuses", "Offer values that its option takes"
                    ) from error
                try:
                    chosen.loaded.describe_backend(chosen.options, ranks)
                except EngineError as error:
                    require_words(error)


MEMORY_PROMISES: tuple[Promise[BackendSubject, Any], ...] = (declared_state, offered_layouts)
