"""The Hugging Face tensors that each Megatron parameter is made of, its part of the model and its pipeline stage."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final

from attrs import evolve, frozen
from torch import nn

from skyrl_engine.model_facts.pipeline_layers import place_layers
from skyrl_engine.modeling.freezing import choose_frozen, report_frozen
from skyrl_engine_megatron.architecture import Architecture, Latent
from skyrl_engine_megatron.decoder import Decoder
from skyrl_engine_megatron.division import Along, Division, Fused, Stacked, VocabularyRows, Whole
from skyrl_engine_megatron.options import MegatronConfig
from skyrl_engine_megatron.vision import Vision

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
_HEAD_SOURCE = "lm_head.weight"


@frozen
class MegatronParameter:
    """One Megatron parameter of the whole model.

    `name` is megatron-core's, with layers counted over all stages; `sources` are Hugging Face's names with their shapes; `part` groups
    entries (a layer, the embedding, the end) and `stage` is the pipeline stage that holds them. A `buffer` is one in transformers. `frozen` are
    the names of those sources that `ModelConfig.freeze` leaves as they are. What is `spread` is divided among expert-parallel ranks, of which
    there are more than tensor-parallel ones.
    """

    name: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    division: Division
    part: str
    stage: int
    buffer: bool = False
    frozen: frozenset[str] = frozenset()
    spread: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources."""
        return tuple(name for name, _ in self.sources)

    @property
    def trainable_names(self) -> tuple[str, ...]:
        """The names of the sources that learn, if the model does."""
        return () if self.buffer else tuple(name for name in self.names if name not in self.frozen)

    @property
    def divided(self) -> bool:
        """True if tensor-parallel ranks hold different shares."""
        return not isinstance(self.division, Whole)


_OF_EXPERTS: Final = ("mlp.gate_up", "mlp.gate_up_bias", "mlp.down", "mlp.down_bias")


def entries(architecture: Architecture, options: MegatronConfig) -> tuple[MegatronParameter, ...]:
    """Return every parameter once, in the order of Hugging Face's models; a tied head has no entry of its own, only its embedding's."""
    last = options.pipeline_parallel - 1
    vocabulary = (architecture.vocabulary, architecture.hidden)
    prefix = architecture.prefix
    names = [] if architecture.vision is None else [*_tower(architecture.vision)]
    names.append(
        MegatronParameter(EMBEDDING, ((prefix + "embed_tokens.weight", vocabulary),), VocabularyRows(vocabulary[0]), "embedding", 0)
    )
    pieces = options.pipeline_parallel * options.virtual_pipeline
    for layer, piece in enumerate(place_layers(architecture.layers, pieces)):
        names += _layer(architecture, options, layer, stage=piece % options.pipeline_parallel)
    names.append(
        MegatronParameter(
            "decoder.final_layernorm.weight", ((prefix + "norm.weight", (architecture.hidden,)),), Whole(), "end", last
        )
    )
    if not architecture.tied:
        names.append(MegatronParameter(HEAD, ((_HEAD_SOURCE, vocabulary),), VocabularyRows(vocabulary[0]), "end", last))
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
        named_sources = tuple((source_prefix + source, shape) for source, shape in sources)
        spread = options.spread_experts > 1 and name in _OF_EXPERTS
        return MegatronParameter(own_prefix + name, named_sources, division, part, stage, spread=spread)

    def projections(kinds: Sequence[str], rows: Sequence[int], fused_name: str | None, *, divided: Stacked, bias: bool) -> Any:
        """Return division and sources of the weights, or biases, of projections that lie in one parameter."""
        kind, shape = ("bias", ()) if bias else ("weight", (hidden,))
        if fused_name is not None:
            return Fused(divided), ((f"{fused_name}.{kind}", (sum(rows), *shape)),)
        return divided, tuple((f"{name}.{kind}", (count, *shape)) for name, count in zip(kinds, rows, strict=True))

    family, biases = architecture.family, architecture.biases
    if architecture.latent is not None:
        for name, division, source, shape in _latent_attention(architecture, architecture.latent):
            yield entry(f"self_attention.{name}", division, (f"self_attn.{source}", shape))
    else:
        attention, heads = "self_attention.", (queries, keys, keys)
        for bias in (False, True) if biases.query_key_value else (False,):
            division, sources = projections(
                [f"self_attn.{kind}_proj" for kind in "qkv"],
                heads,
                "self_attn.qkv_proj" if family.fused_projections else None,
                divided=Stacked(heads, architecture.key_heads),
                bias=bias,
            )
            yield entry(attention + f"linear_qkv.{'bias' if bias else 'weight'}", division, *sources)
        yield entry(attention + "linear_proj.weight", Along(1), ("self_attn.o_proj.weight", (hidden, queries)))
        if biases.output:
            yield entry(attention + "linear_proj.bias", Whole(), ("self_attn.o_proj.bias", (hidden,)))
        if architecture.query_key_norms != "none":
            for kind, width in (("q", queries), ("k", keys)):
                norm_width = width if architecture.query_key_norms == "whole" else size
                yield entry(f"{attention}{kind}_layernorm.weight", Whole(), (f"self_attn.{kind}_norm.weight", (norm_width,)))
    if family.sinks:
        yield entry("self_attention.core_attention.sinks", Along(0), ("self_attn.sinks", (architecture.heads,)))
    if (mixture := architecture.mixture) is not None and mixture.layers[layer]:
        names = family.mixture
        assert names is not None
        router, width = f"mlp.{names.router}", mixture.feed_forward
        if mixture.clamped is None:
            gate_up, down = (Along(0), Along(0)) if options.whole_experts else (Along(1, blocks=2), Along(2))
            yield entry("mlp.gate_up", gate_up, ("mlp.experts.gate_up_proj", (mixture.count, 2 * width, hidden)))
            yield entry("mlp.down", down, ("mlp.experts.down_proj", (mixture.count, hidden, width)))
        else:
            gate_up, down = (Along(0), Along(0)) if options.whole_experts else (Along(2), Along(1))
            before = Along(0) if options.whole_experts else Along(1)
            after: Division = Along(0) if options.whole_experts else Whole()
            yield entry("mlp.gate_up", gate_up, ("mlp.experts.gate_up_proj", (mixture.count, hidden, 2 * width)))
            yield entry("mlp.gate_up_bias", before, ("mlp.experts.gate_up_proj_bias", (mixture.count, 2 * width)))
            yield entry("mlp.down", down, ("mlp.experts.down_proj", (mixture.count, width, hidden)))
            yield entry("mlp.down_bias", after, ("mlp.experts.down_proj_bias", (mixture.count, hidden)))
            yield entry("mlp.router_bias", Whole(), (f"{router}.bias", (mixture.count,)))
        yield entry("mlp.router", Whole(), (f"{router}.weight", (mixture.count, hidden)))
        if mixture.corrected:
            yield evolve(
                entry("mlp.correction", Whole(), ("mlp.gate.e_score_correction_bias", (mixture.count,))),
                buffer=True,
            )
        shared = f"mlp.{names.shared}"
        if mixture.shared:
            both = tuple((f"{shared}.{kind}_proj.weight", (mixture.shared, hidden)) for kind in ("gate", "up"))
            yield entry("mlp.shared_gate_up", Stacked((mixture.shared, mixture.shared)), *both)
            yield entry("mlp.shared_down", Along(1), (f"{shared}.down_proj.weight", (hidden, mixture.shared)))
        if mixture.shared_gate:
            yield entry("mlp.shared_weight", Whole(), (f"{shared}_gate.weight", (1, hidden)))
    else:
        kinds = ("gate", "up") if family.gated else ("up",)
        for bias in (False, True) if biases.feed_forward else (False,):
            division, sources = projections(
                [f"mlp.{kind}_proj" for kind in kinds],
                (feed,) * len(kinds),
                "mlp.gate_up_proj" if family.fused_gate_up else None,
                divided=Stacked((feed,) * len(kinds)),
                bias=bias,
            )
            yield entry(f"mlp.linear_fc1.{'bias' if bias else 'weight'}", division, *sources)
        yield entry("mlp.linear_fc2.weight", Along(1), ("mlp.down_proj.weight", (hidden, feed)))
        if biases.feed_forward:
            yield entry("mlp.linear_fc2.bias", Whole(), ("mlp.down_proj.bias", (hidden,)))
    norms = family.norms
    for own_name, source_name in (
        ("input_layernorm", norms.before_attention),
        ("post_attention_layernorm", norms.after_attention),
        ("pre_mlp_layernorm", norms.before_feed_forward),
        ("post_mlp_layernorm", norms.after_feed_forward),
    ):
        if source_name is not None:
            yield entry(f"{own_name}.weight", Whole(), (f"{source_name}.weight", (hidden,)))


def _latent_attention(architecture: Architecture, latent: Latent) -> Iterator[tuple[str, Division, str, tuple[int, ...]]]:
    """Yield, for each parameter of latent attention, its name, its division, and its name and shape in Hugging Face's layer."""
    hidden, heads, biased = architecture.hidden, architecture.heads, architecture.biases.output
    if latent.query_rank is None:
        yield "query.weight", Along(0), "q_proj.weight", (heads * latent.query_size, hidden)
    else:
        yield "query_down.weight", Whole(), "q_a_proj.weight", (latent.query_rank, hidden)
        if biased:
            yield "query_down.bias", Whole(), "q_a_proj.bias", (latent.query_rank,)
        yield "query_norm.weight", Whole(), "q_a_layernorm.weight", (latent.query_rank,)
        yield "query.weight", Along(0), "q_b_proj.weight", (heads * latent.query_size, latent.query_rank)
    compressed = latent.key_value_rank + latent.rotated
    yield "key_value_down.weight", Whole(), "kv_a_proj_with_mqa.weight", (compressed, hidden)
    if biased:
        yield "key_value_down.bias", Whole(), "kv_a_proj_with_mqa.bias", (compressed,)
    yield "key_value_norm.weight", Whole(), "kv_a_layernorm.weight", (latent.key_value_rank,)
    outputs = heads * (latent.plain + latent.value_size)
    yield "key_value.weight", Along(0), "kv_b_proj.weight", (outputs, latent.key_value_rank)
    yield "linear_proj.weight", Along(1), "o_proj.weight", (hidden, heads * latent.value_size)
    if biased:
        yield "linear_proj.bias", Whole(), "o_proj.bias", (hidden,)


def freeze_entries(entries: Sequence[MegatronParameter], patterns: Sequence[str], *, tied: bool) -> tuple[MegatronParameter, ...]:
    """Return the entries with the sources that patterns name as `frozen`. Raises ConfigError as `modeling.freezing.choose_frozen` does.

    `tied` says that the embedding is the head too, whose name then freezes both.
    """
    if not patterns:
        return tuple(entries)
    named = [name for entry in entries if not entry.buffer for name in entry.names]
    embedding = next(entry.names[0] for entry in entries if entry.name == EMBEDDING)
    aliases = [[name, _HEAD_SOURCE] if tied and name == embedding else [name] for name in named]
    chosen = choose_frozen(aliases, patterns)
    frozen = {name for name, is_frozen in zip(named, chosen, strict=True) if is_frozen}
    sizes = [(name in frozen, prod(shape)) for entry in entries if not entry.buffer for name, shape in entry.sources]
    report_frozen(sum(size for is_frozen, size in sizes if not is_frozen), sum(size for _, size in sizes))
    return tuple(evolve(entry, frozen=frozenset(frozen & set(entry.names))) for entry in entries)


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
