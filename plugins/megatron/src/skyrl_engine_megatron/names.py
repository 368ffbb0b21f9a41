"""The Hugging Face tensors that each Megatron parameter is made of, its part of the model and its pipeline stage."""

from collections.abc import Iterator, Sequence

from attrs import frozen
from torch import nn

from skyrl_engine_megatron.architecture import Architecture
from skyrl_engine_megatron.decoder import Decoder
from skyrl_engine_megatron.division import Along, Division, Stacked, VocabularyRows, Whole
from skyrl_engine_megatron.options import MegatronConfig
from skyrl_engine_megatron.vision import Vision

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"


@frozen
class MegatronParameter:
    """One Megatron parameter of the whole model.

    `name` is megatron-core's, with layers counted over all stages; `sources` are Hugging Face's names with their shapes; `part` groups
    entries (a layer, the embedding, the end) and `stage` is the pipeline stage that holds them.
    """

    name: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    division: Division
    part: str
    stage: int

    @property
    def divided(self) -> bool:
        """True if tensor-parallel ranks hold different shares."""
        return not isinstance(self.division, Whole)


def entries(architecture: Architecture, options: MegatronConfig) -> tuple[MegatronParameter, ...]:
    """Return every parameter once, in the order of Hugging Face's models; a tied head has no entry of its own, only its embedding's."""
    last = options.pipeline_parallel - 1
    vocabulary = (architecture.vocabulary, architecture.hidden)
    prefix = architecture.prefix
    names = [] if architecture.vision is None else [*_tower(architecture.vision)]
    names.append(
        MegatronParameter(EMBEDDING, ((prefix + "embed_tokens.weight", vocabulary),), VocabularyRows(vocabulary[0]), "embedding", 0)
    )
    per_piece = architecture.layers // (options.pipeline_parallel * options.virtual_pipeline)
    for layer in range(architecture.layers):
        names += _layer(architecture, options, layer, stage=layer // per_piece % options.pipeline_parallel)
    names.append(
        MegatronParameter(
            "decoder.final_layernorm.weight", ((prefix + "norm.weight", (architecture.hidden,)),), Whole(), "end", last
        )
    )
    if not architecture.tied:
        names.append(MegatronParameter(HEAD, (("lm_head.weight", vocabulary),), VocabularyRows(vocabulary[0]), "end", last))
    return tuple(names)


def _tower(vision: Vision) -> Iterator[MegatronParameter]:
    """Yield the vision tower's parameters, which every rank of the first stage holds whole."""
    for part, name, shape in vision.parts():
        yield MegatronParameter(f"visual.{name}", ((f"model.visual.{name}", shape),), Whole(), part, 0)


def _layer(architecture: Architecture, options: MegatronConfig, layer: int, *, stage: int) -> Iterator[MegatronParameter]:
    own_prefix, source_prefix, part = f"decoder.layers.{layer}.", f"{architecture.prefix}layers.{layer}.", f"layer-{layer}"
    hidden, size, feed = architecture.hidden, architecture.head_size, architecture.feed_forward
    queries, keys = architecture.heads * size, architecture.key_heads * size

    def entry(name: str, division: Division, *sources: tuple[str, tuple[int, ...]]) -> MegatronParameter:
        return MegatronParameter(
            own_prefix + name, tuple((source_prefix + source, shape) for source, shape in sources), division, part, stage
        )

    grouped = Stacked((queries, keys, keys), architecture.key_heads)
    projections = tuple((f"self_attn.{kind}_proj", rows) for kind, rows in (("q", queries), ("k", keys), ("v", keys)))
    attention = "self_attention."
    yield entry(attention + "linear_qkv.weight", grouped, *((f"{name}.weight", (rows, hidden)) for name, rows in projections))
    if architecture.query_key_value_bias:
        yield entry(attention + "linear_qkv.bias", grouped, *((f"{name}.bias", (rows,)) for name, rows in projections))
    yield entry(attention + "linear_proj.weight", Along(1), ("self_attn.o_proj.weight", (hidden, queries)))
    if architecture.query_key_norms:
        yield entry(attention + "q_layernorm.weight", Whole(), ("self_attn.q_norm.weight", (size,)))
        yield entry(attention + "k_layernorm.weight", Whole(), ("self_attn.k_norm.weight", (size,)))
    if (mixture := architecture.mixture) is not None:
        gate_up, down = (Along(0), Along(0)) if options.whole_experts else (Along(1, blocks=2), Along(2))
        yield entry("mlp.gate_up", gate_up, ("mlp.experts.gate_up_proj", (mixture.count, 2 * mixture.feed_forward, hidden)))
        yield entry("mlp.down", down, ("mlp.experts.down_proj", (mixture.count, hidden, mixture.feed_forward)))
        yield entry("mlp.router", Whole(), ("mlp.gate.weight", (mixture.count, hidden)))
    else:
        both = tuple((f"mlp.{kind}_proj.weight", (feed, hidden)) for kind in ("gate", "up"))
        yield entry("mlp.linear_fc1.weight", Stacked((feed, feed)), *both)
        yield entry("mlp.linear_fc2.weight", Along(1), ("mlp.down_proj.weight", (hidden, feed)))
    yield entry("input_layernorm.weight", Whole(), ("input_layernorm.weight", (hidden,)))
    yield entry("pre_mlp_layernorm.weight", Whole(), ("post_attention_layernorm.weight", (hidden,)))


def own_parameters(pieces: Sequence[Decoder]) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by the names of `MegatronParameter`; a tied head's copy on the last of several stages is named `HEAD`."""
    named = {}
    for piece in pieces:
        numbers = {str(place): layer.layer_number - 1 for place, layer in enumerate(piece.decoder.layers)}
        for name, parameter in piece.named_parameters():
            module, kind, rest = name.partition("decoder.layers.")
            if kind:
                place, _, rest = rest.partition(".")
                name = f"{module}{kind}{numbers[place]}.{rest}"  # noqa: PLW2901 - the same name with the layer's number in the whole model
            named[name] = parameter
    return named
