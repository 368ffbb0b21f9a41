"""The bytes that a backend's ranks hold of a model, as its description declares them for the arithmetic of `model_facts.rank_memory`."""

from collections.abc import Callable
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import ge, in_

StatePart = Literal["weights", "gradients", "optimizer"]
STATE_PARTS: tuple[StatePart, ...] = ("weights", "gradients", "optimizer")


@frozen
class Holding:
    """One copy of a part of a model's state: `ranks` ranks divide it, besides tensor-parallel ranks and pipeline stages.

    `master` copies have the precision of the weights that are trained (float32, or float64 of a float64 model), others that of the computation.
    A copy is of the parameters that are `trained`, or of all. `on_host` copies lie in host memory. How many numbers an "optimizer" copy has
    for each parameter is the optimizer's own.
    """

    part: StatePart = field(validator=in_(STATE_PARTS))
    ranks: int = field(default=1, validator=ge(1))
    master: bool = True
    trained: bool = True
    on_host: bool = False


@frozen
class Traffic:
    """Numbers that each rank sends over all `ranks` that divide a part of the state: all trained gradients, or all weights, `times` times.

    They go once per micro-batch, or once per `step`, in the precision of the masters or of the computation. A gather or a scattered sum sends
    (ranks - 1) / ranks of them; a sum that all ranks have is both, `times` = 2. Copies of the model sum the part that each of their ranks has,
    one of `divided`.
    """

    part: Literal["weights", "gradients"]
    ranks: int = field(validator=ge(1))
    times: int = field(default=1, validator=ge(0))
    master: bool = True
    per_step: bool = False
    divided: int = field(default=1, validator=ge(1))


@frozen
class StateLayout:
    """The copies of a model's state on one rank that trains it, and what is held beside them while it computes.

    `scoring` are the copies of a model that is set up without an optimizer, such as a reference; `staged` those that a rank makes in host
    memory of what it writes, while a checkpoint is written beside training. `gathered` says which weights are whole on a
    rank while it computes, in the precision of the computation, besides the copies: "nothing"; "layer", those of one layer after the other and,
    until the backward pass ends, those outside of layers, with their gradients; "model", all, but no more than `most_gathered` numbers.
    `buffers` counts numbers in the precision of the masters that are taken whatever the model. `sequence_parallel` says that tensor-parallel
    ranks divide the tokens between regions. `layers` says whose layers compute, which keep more or less for the backward pass. Each pipeline
    stage has `pieces` pieces of the model. `traffic` goes over data-parallel ranks. `divided` takes the model's
    configuration and returns `fnmatch` patterns for the names of the parameters of layers that tensor-parallel ranks divide, beside embedding
    and head, if they can divide its rows; None: all matrices. A mixture's experts are divided among `spread_experts` times as many ranks as
    other matrices: among ranks with different tokens, which hold experts for each other. `expert_rows` says how tokens reach them: "gathered",
    all tokens of those ranks on each of them, or "sent", each token to the ranks of its experts alone.
    `loading` says whether rank 0 reads a model whole, or every rank its part of safetensors files in a local directory.
    """

    holdings: tuple[Holding, ...] = (
        Holding("weights", trained=False),
        Holding("gradients"),
        Holding("optimizer"),
    )
    scoring: tuple[Holding, ...] = (Holding("weights", trained=False),)
    staged: tuple[Holding, ...] = (Holding("weights", trained=False, on_host=True), Holding("optimizer", on_host=True))
    gathered: Literal["nothing", "layer", "model"] = field(default="nothing", validator=in_(("nothing", "layer", "model")))
    most_gathered: int | None = None
    buffers: int = field(default=0, validator=ge(0))
    sequence_parallel: bool = False
    layers: Literal["transformers", "megatron-core"] = field(
        default="transformers", validator=in_(("transformers", "megatron-core"))
    )
    pieces: int = field(default=1, validator=ge(1))
    traffic: tuple[Traffic, ...] = ()
    divided: Callable[[Any], tuple[str, ...]] | None = None
    spread_experts: int = field(default=1, validator=ge(1))
    expert_rows: Literal["gathered", "sent"] = field(default="gathered", validator=in_(("gathered", "sent")))
    loading: Literal["whole", "parts"] = field(default="whole", validator=in_(("whole", "parts")))
