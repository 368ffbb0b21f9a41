"""Bytes of tensors that one rank holds while it trains, part by part, from shapes alone. No torch.

A rank holds the largest sum in the backward pass of the micro-batch with most tokens: the copies of the state that `StateLayout` declares,
activations of all micro-batches on their way through its stage, and the logits of one chunk.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Final

from attrs import field, frozen

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.state_layout import Holding, StateLayout
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.model_facts.memory import EIGHT_BIT_BLOCK, ELEMENT_BYTES, FEWEST_IN_EIGHT_BITS, CacheShape
from skyrl_engine.model_facts.parameter_shapes import ParameterShape
from skyrl_engine.model_facts.pipeline_layers import divide_layers, place_layers

_CHUNKS_KEPT: Final = 2
"""Chunks of logits up to which they are kept from the forward pass to the backward pass (`modeling.chunked_head`)."""


WORKING_PARTS: Final = ("gradients", "gathered weights", "activations", "logits")
"""Parts that are there while a step trains."""
STAGED_CHECKPOINT: Final = "checkpoint being written"
"""The part of the copies that a rank makes of its state, to write them while training goes on."""
CACHES: Final = "caches"
"""The part of keys and values that a generator on the rank holds while it samples."""

ACTIVATION_SHARE: Final = 0.5
"""Share of a device's memory beside a model and its optimizer that activations may take; the rest is for caches, logits and fragments."""


@frozen
class ModelShape:
    """A model and what its numbers are: its configuration, how it is used, and its parameters."""

    config: Any = field(repr=False)
    model: ModelConfig
    parameters: Sequence[ParameterShape] = field(repr=False)

    @property
    def master_bytes(self) -> int:
        """Bytes of a number of the weights that are trained."""
        return ELEMENT_BYTES["float64" if self.model.dtype == "float64" else "float32"]

    @property
    def computed_bytes(self) -> int:
        """Bytes of a number in the precision of the computation."""
        return ELEMENT_BYTES[self.model.dtype]

    @property
    def layers(self) -> int:
        return 1 + max((each.layer for each in self.parameters if each.place == "layer"), default=0)

    @property
    def first_trained_layer(self) -> int:
        """The number of the first layer that gradients reach, or that of all layers: those before it keep nothing for a backward pass."""
        trained = [each for each in self.parameters if each.is_trained]
        if any(each.place in ("embedding", "before") for each in trained):
            return 0
        return min((each.layer for each in trained if each.place == "layer"), default=self.layers)

    @property
    def vocabulary(self) -> int:
        return max((each.rows for each in self.parameters if each.place == "head"), default=1)


@frozen
class RankWork:
    """The micro-batches of one rank: how many a step has, the dense tokens of the largest, and the positions that are scored in it."""

    micro_batches: int
    tokens: int
    positions: int


@frozen
class RankMemory:
    """Bytes of tensors on one rank of pipeline stage `stage`, by part; those in host memory apart, by the same names."""

    stage: int
    parts: Mapping[str, int]
    host: Mapping[str, int] = field(factory=dict)

    @property
    def total(self) -> int:
        """Bytes on the device at most: caches of a generator and what a training step adds to the state are not there together."""
        working = sum(self.parts.get(name, 0) for name in WORKING_PARTS)
        return sum(self.parts.values()) - min(working, self.parts.get(CACHES, 0))


def list_of_stage(
    parameters: Iterable[ParameterShape], layers: int, topology: Topology, pieces: int, stage: int
) -> list[ParameterShape]:
    """Return the parameters of a pipeline stage. The first one has the embedding, the last one norm and head; a tied head there is a copy."""
    last = topology.pp - 1
    piece_of = place_layers(layers, topology.pp * pieces)
    outside = {"embedding": 0, "before": 0, "after": last, "head": last}
    chosen = []
    for each in parameters:
        owner = outside[each.place] if each.place in outside else piece_of[each.layer] % topology.pp
        if owner == stage and not (each.is_tied and topology.pp == 1):
            chosen.append(each)
    return chosen


@cache
def _matches_a_pattern(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def read_divided_patterns(shape: ModelShape, layout: StateLayout) -> tuple[str, ...] | None:
    """Return the patterns of names by which `count_share` knows what tensor-parallel ranks divide; None: all matrices."""
    return None if layout.divided is None else layout.divided(shape.config)


def count_share(parameter: ParameterShape, divided: tuple[str, ...] | None, topology: Topology) -> int:
    """Count the numbers of a parameter that a tensor-parallel rank has."""
    if topology.tp == 1:
        return parameter.count
    if divided is None:
        is_divided = parameter.is_matrix
    elif parameter.place in ("embedding", "head"):
        is_divided = (parameter.rows if parameter.is_matrix else parameter.columns) % topology.tp == 0
    else:
        is_divided = _matches_a_pattern(parameter.name, divided)
    return parameter.count // topology.tp if is_divided else parameter.count


def is_of_experts(parameter: ParameterShape) -> bool:
    """Say whether a parameter belongs to the routed experts of a layer; shared experts and routers do not."""
    return ".experts." in parameter.name


def count_spread(parameter: ParameterShape, layout: StateLayout) -> int:
    """Count the ranks with different tokens that divide a parameter among themselves, because they hold experts for each other."""
    return layout.spread_experts if is_of_experts(parameter) else 1


def count_state_bytes(
    shape: ModelShape,
    layout: StateLayout,
    holdings: Sequence[Holding],
    parameters: Sequence[ParameterShape],
    topology: Topology,
    optimizer: str | None,
    *,
    ema: bool = False,
    stochastic_rounding: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:
    """Count the bytes of `holdings` of a layout on one rank by part: those on the device, and those in host memory.

    With `ema` the optimizer's part has the average of every trained weight; with `stochastic_rounding` weights have no masters.
    """
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    divided = read_divided_patterns(shape, layout)
    for holding in holdings:
        # of those that every rank holds whole
        taken, whole = 0, 0
        for each in parameters:
            if holding.trained and not each.is_trained:
                continue
            if each.held_bytes is not None:
                whole += each.held_bytes
                continue
            count = count_share(each, divided, topology)
            if holding.ranks == 1:
                # ranks that divide a copy hold as much of it, whichever of them have the same experts
                count //= count_spread(each, layout)
            # what is frozen has the precision of the computation
            is_rounded = not holding.master or not each.is_trained or (stochastic_rounding and holding.part == "weights")
            element = shape.computed_bytes if is_rounded else shape.master_bytes
            if holding.part == "optimizer":
                taken += count_optimizer_bytes(each, count, optimizer or "adamw", element) + (count * element if ema else 0)
            else:
                taken += count * element
        place = host if holding.on_host else device
        place[holding.part] = place.get(holding.part, 0) + -(-taken // holding.ranks) + whole
    return device, host


def count_optimizer_bytes(parameter: ParameterShape, count: int, optimizer: str, element: int) -> int:
    """Count the bytes that an optimizer keeps of `count` numbers of a parameter, in numbers of `element` bytes but for those in 8 bits
    (`modeling.optimizer.make_zero_state`).
    """
    if optimizer == "adamw_8bit" and _has_eight_bit_moments(parameter):
        return 2 * (count + count // EIGHT_BIT_BLOCK * ELEMENT_BYTES["float32"])
    return element * _count_optimizer_numbers(parameter, count, optimizer)


def _has_eight_bit_moments(parameter: ParameterShape) -> bool:
    whole_blocks = parameter.is_matrix and parameter.columns % EIGHT_BIT_BLOCK == 0
    return parameter.place == "layer" and whole_blocks and parameter.count >= FEWEST_IN_EIGHT_BITS


def _count_optimizer_numbers(parameter: ParameterShape, count: int, optimizer: str) -> int:
    if optimizer == "sgd":
        return 0
    if optimizer == "lion":
        return count
    if optimizer == "muon":
        return count if parameter.is_matrix and parameter.place == "layer" else 2 * count
    if optimizer == "adafactor":
        return count // parameter.columns + count // max(parameter.rows, 1) if parameter.is_matrix else count
    return 2 * count


def count_rank_memory(
    shape: ModelShape,
    layout: StateLayout,
    topology: Topology,
    work: RankWork,
    *,
    optimizer: str | None,
    stage: int = 0,
    ema: bool = False,
    stochastic_rounding: bool = False,
    stages_saves: bool = False,
) -> RankMemory:
    """Count what a rank of pipeline stage `stage` holds of the model that it trains, at most, by part.

    With `stages_saves` it has a copy of what it writes in host memory.
    """
    parameters = list_of_stage(shape.parameters, shape.layers, topology, layout.pieces, stage)
    kept = {"ema": ema, "stochastic_rounding": stochastic_rounding}
    device, host = count_state_bytes(shape, layout, layout.holdings, parameters, topology, optimizer, **kept)
    parts = {name: device.get(name, 0) for name in ("weights", "gradients", "optimizer")}
    parts["gathered weights"] = count_gathered_bytes(shape, layout, parameters, topology)
    parts["activations"] = count_stage_activation_bytes(shape, layout, topology, work, stage)
    parts["logits"] = count_logit_bytes(shape, layout, topology, work) if stage == topology.pp - 1 else 0
    if shape.model.activation_checkpointing and (sizes := ActivationShape.of(shape.config)) is not None:
        # a layer is computed again after the head's logits are gone
        own = -(-work.tokens // topology.cp)
        again = sizes.count_layer(shape.computed_bytes, layout, tp=topology.tp) * own
        again += sizes.count_keys(shape.computed_bytes, tp=topology.tp) * (work.tokens - own)
        parts["activations"] += max(0, again - parts["logits"])
    parts["buffers"] = layout.buffers * shape.master_bytes
    if stages_saves:
        _, copied = count_state_bytes(shape, layout, layout.staged, parameters, topology, optimizer, **kept)
        host[STAGED_CHECKPOINT] = sum(copied.values())
    return RankMemory(stage, parts, host)


def plan_micro_batch_tokens(
    shape: ModelShape, layout: StateLayout, topology: Topology, *, memory: int, optimizer: str | None, **kept: bool
) -> int | None:
    """Count the tokens of a micro-batch whose activations fit devices of `memory` bytes on every stage: a multiple of 1,024, not 0.

    `kept` says what else the optimizer keeps, as `count_rank_memory` takes it. None where the configuration does not say the model's shape.
    """
    if ActivationShape.of(shape.config) is None:
        return None
    room = []
    for stage in range(topology.pp):
        # as many micro-batches as stages, so that every stage has as many on their way as it may have
        held = count_rank_memory(shape, layout, topology, RankWork(topology.pp, 1024, 0), optimizer=optimizer, stage=stage, **kept)
        states = held.total - held.parts["activations"]
        room.append(int(max(0, memory - states) * ACTIVATION_SHARE) / max(held.parts["activations"], 1))
    return max(1, int(min(room))) * 1024


def count_gathered_bytes(shape: ModelShape, layout: StateLayout, parameters: Sequence[ParameterShape], topology: Topology) -> int:
    """Count the bytes of weights that are whole on a rank while it computes, besides its own part, and of their gradients.

    Of those that are held in a form of their own, one matrix at a time is whole.
    """
    made = max((each.count for each in parameters if each.held_bytes is not None), default=0) * shape.computed_bytes
    if layout.gathered == "nothing":
        return made
    divided = read_divided_patterns(shape, layout)
    layers: dict[int, int] = {}
    outside = outside_trained = 0
    for each in parameters:
        if each.held_bytes is not None:
            continue
        count = count_share(each, divided, topology) // count_spread(each, layout)
        if each.place == "layer":
            layers[each.layer] = layers.get(each.layer, 0) + count
        else:
            outside += count
            # the head's gradient is counted with its logits
            outside_trained += count if each.is_trained and each.place != "head" else 0
    inside = sum(layers.values()) if layout.gathered == "model" else max(layers.values(), default=0)
    whole = outside + outside_trained + inside
    return made + (whole if layout.most_gathered is None else min(whole, layout.most_gathered)) * shape.computed_bytes


def count_stage_activation_bytes(shape: ModelShape, layout: StateLayout, topology: Topology, work: RankWork, stage: int) -> int:
    """Count the bytes of activations that wait for their backward pass on a stage: of the micro-batches that 1F1B lets it have begun.

    Interleaved stages begin more (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): 2 (pp - stage - 1) + (pieces - 1) pp + 1 pieces.
    """
    sizes = ActivationShape.of(shape.config)
    if sizes is None:
        return 0
    pieces, stages = layout.pieces, topology.pp
    if pieces == 1:
        begun = min(work.micro_batches, stages - stage)
    else:
        begun = min(work.micro_batches * pieces, 2 * (stages - stage - 1) + (pieces - 1) * stages + 1)
    layers = max(divide_layers(shape.layers, stages * pieces)[stage::stages])
    if stages == 1:
        layers = min(layers, shape.layers - shape.first_trained_layer)
    tokens = -(-work.tokens // topology.cp)
    held = sizes.count_layers(layers, tokens, shape.model, layout, tp=topology.tp)
    if not shape.model.activation_checkpointing:
        # context-parallel ranks keep the keys and values that they gather from each other
        held += layers * sizes.count_keys(shape.computed_bytes, tp=topology.tp) * (work.tokens - tokens)
    return begun * held


def count_logit_bytes(shape: ModelShape, layout: StateLayout, topology: Topology, work: RankWork) -> int:
    """Count the bytes at the head in its backward pass: kept logits, a chunk's softmax, and the sum of the head's gradient.

    Where the computation is in bfloat16, the chunk's logits are there in float32 as well, and their gradient in bfloat16; a head that ranks
    divide takes their differences from the largest logit as well.
    """
    vocabulary = -(-shape.vocabulary // topology.tp)
    chunk = max(1, shape.model.logits_per_chunk // vocabulary)
    positions = -(-work.positions // topology.cp)
    at_once = min(positions, chunk)
    kept = positions if positions <= _CHUNKS_KEPT * chunk else at_once
    exact = max(ELEMENT_BYTES["float32"], shape.computed_bytes)
    per_logit = exact * (2 if layout.layers == "megatron-core" or topology.tp > 1 else 1)
    if exact > shape.computed_bytes:
        per_logit += exact + shape.computed_bytes
    head = sum(each.count for each in shape.parameters if each.place == "head" and each.is_trained) // topology.tp
    return vocabulary * (kept * shape.computed_bytes + at_once * per_logit) + head * exact


_NORMALIZING: Final = ("qwen3", "gemma3", "olmo2", "olmo3")
"""Beginnings of the `model_type` of models that normalise queries and keys."""

_FOUR_NORMS: Final = ("gemma2", "gemma3_text", "glm4")
"""`model_type` of models that normalise what attention and feed-forward layers read, and what they give."""


@frozen
class ActivationShape:
    """Numbers of a decoder layer that its backward pass reads, per token: of the width of the model, of attention, and of experts or the
    feed-forward network that a token passes through; the number of its norms of hidden states, and of the experts of a token.
    """

    hidden: int
    queries: int
    keys: int
    inner: int
    normalized: int
    norms: int = 2
    choices: int = 1

    @classmethod
    def of(cls, config: Any) -> "ActivationShape | None":
        """Read the widths from a transformers configuration; None where it does not say them."""
        text = config.get_text_config(decoder=True)
        shape, hidden = CacheShape.of(config), getattr(text, "hidden_size", None)
        inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
        if shape is None or not isinstance(hidden, int) or not isinstance(inner, int):
            return None
        experts = getattr(text, "num_experts_per_tok", None) or 1
        queries = text.num_attention_heads * shape.key_width
        keys = shape.heads * (shape.key_width + shape.value_width)
        shared = getattr(text, "shared_expert_intermediate_size", None) or inner * (getattr(text, "n_shared_experts", None) or 0)
        normalized = queries + shape.heads * shape.key_width if _has_head_norms(text) else 0
        norms = 4 if getattr(text, "model_type", "") in _FOUR_NORMS else 2
        return cls(hidden, queries, keys, inner * experts + shared, normalized, norms, experts)

    def count_layer(self, element: int, layout: StateLayout, *, tp: int = 1) -> int:
        """Count the bytes of one token in one layer.

        A norm keeps its input and, before and after its weight, its output; in bfloat16 transformers' norms keep the input in float32 alone,
        megatron-core's its normalized value too. Attention keeps queries, keys, values and its output, which megatron-core keeps once more for
        the projection after it; a gated network its two projections, the activation of one, and their product. Megatron-core projects queries,
        keys and values at once, and keeps all of that for the sake of the values; and it copies one of a gated network's projections.
        """
        rounds, megatron = element == ELEMENT_BYTES["bfloat16"], layout.layers == "megatron-core"
        norm = self.hidden * ((10 if megatron else 8) if rounds else 3 * element)
        head_norms = self.normalized * (6 if rounds else 2 * element)
        whole = self.norms * norm
        divided = (2 * self.queries + self.keys + 4 * self.inner) * element + head_norms
        if megatron:
            divided += (2 * self.queries + self.keys // 2 + self.inner) * element
        return -(-whole // (tp if layout.sequence_parallel else 1)) + -(-divided // tp)

    def count_keys(self, element: int, *, tp: int = 1) -> int:
        """Count the bytes of one token's keys and values in one layer."""
        return -(-self.keys * element // tp)

    def count_layers(self, layers: int, tokens: int, model: ModelConfig, layout: StateLayout, *, tp: int) -> int:
        """Count the bytes of `layers` layers of one stage for one micro-batch of `tokens` tokens; of layers computed again, their inputs."""
        element = ELEMENT_BYTES[model.dtype]
        if model.activation_checkpointing:
            return tokens * layers * -(-self.hidden * element // (tp if layout.sequence_parallel else 1))
        return tokens * layers * self.count_layer(element, layout, tp=tp)


def _has_head_norms(text: Any) -> bool:
    return getattr(text, "model_type", "").startswith(_NORMALIZING) or bool(getattr(text, "use_qk_norm", False))


def count_sent_bytes(
    shape: ModelShape, layout: StateLayout, topology: Topology, *, micro_batches: int, tokens: int, stage: int = 0
) -> int:
    """Count the bytes that a rank of a stage sends in one optimizer step of `micro_batches` micro-batches with `tokens` dense tokens together.

    They are those of a ring: its gather of n parts sends (n - 1) / n of the whole (Thakur et al. 2005). Tensor-parallel ranks sum four times a
    layer (Shoeybi et al. 2019, arXiv 1909.08053, section 3), context-parallel ranks gather keys and values, once more where layers are
    computed again, and scatter their gradients, and stages send hidden states and their gradients. Ranks that hold experts for each other
    gather their tokens and scatter the sums, or send each token to the ranks of its experts and back, in the forward and the backward pass, and
    in the former once more where layers are computed again.
    """
    parameters = list_of_stage(shape.parameters, shape.layers, topology, layout.pieces, stage)
    divided = read_divided_patterns(shape, layout)
    sent = 0.0
    for flow in layout.traffic:
        element = (shape.master_bytes if flow.master else shape.computed_bytes) * (1 if flow.per_step else micro_batches)
        for each in parameters:
            if each.held_bytes is None and (each.is_trained or flow.part == "weights"):
                # a part is divided over all ranks of a copy already, whichever of them have the same experts
                spread = min(count_spread(each, layout), flow.ranks) if flow.divided == 1 else 1
                count, ranks = count_share(each, divided, topology) // (spread * flow.divided), flow.ranks // spread
                sent += count * element * (ranks - 1) / ranks * flow.times
    sizes = ActivationShape.of(shape.config)
    if sizes is None:
        return int(sent)
    layers = sum(divide_layers(shape.layers, topology.pp * layout.pieces)[stage :: topology.pp])
    own = tokens / topology.cp
    element = shape.computed_bytes
    sent += 4 * layers * own * sizes.hidden * element * 2 * (topology.tp - 1) / topology.tp
    sent += (
        (3 if shape.model.activation_checkpointing else 2) * layers * own * (topology.cp - 1) * sizes.keys / topology.tp * element
    )
    with_experts = len({each.layer for each in parameters if is_of_experts(each)})
    passes = 6 if shape.model.activation_checkpointing else 4
    copies = layout.spread_experts - 1
    rows = copies * sizes.choices / layout.spread_experts / topology.tp if layout.expert_rows == "sent" else copies
    sent += passes * with_experts * own * rows * sizes.hidden * element
    if topology.pp > 1:
        neighbours = 1 if stage in (0, topology.pp - 1) and layout.pieces == 1 else 2
        share = topology.tp if layout.sequence_parallel else 1
        sent += neighbours * layout.pieces * own * sizes.hidden / share * element
    return int(sent)


def compute_bubble_share(stages: int, pieces: int, micro_batches: int) -> float:
    """Return the share of a step in which a stage of the 1F1B schedule waits (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    return (stages - 1) / (pieces * micro_batches + stages - 1)


def count_frozen_bytes(shape: ModelShape, layout: StateLayout, topology: Topology, stage: int) -> int:
    """Count the bytes on a device of a model that is set up for scoring alone, on a rank of this stage."""
    parameters = list_of_stage(shape.parameters, shape.layers, topology, layout.pieces, stage)
    device, _ = count_state_bytes(shape, layout, layout.scoring, parameters, topology, None)
    return sum(device.values())
