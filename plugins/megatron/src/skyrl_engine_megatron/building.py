"""Build a rank's pieces of the model: decoder class, layers and rotary positions."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from skyrl_engine.model_facts.pipeline_layers import divide_layers, place_layers
from skyrl_engine_megatron.architecture import Architecture
from skyrl_engine_megatron.compiling import BiasedColumns, BiasedRows, Columns, Rows
from skyrl_engine_megatron.decoder import Decoder
from skyrl_engine_megatron.experts import RoutedLayer, mixture_of
from skyrl_engine_megatron.latent import LatentAttention
from skyrl_engine_megatron.layers import (
    FamilyLayer,
    HeadNorm,
    Norm,
    SeveralRotaryEmbeddings,
    WholeKeyNorm,
    WholeQueryNorm,
    device_of,
)
from skyrl_engine_megatron.library import (
    IdentityOp,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    parallel_state,
)
from skyrl_engine_megatron.options import MegatronConfig
from skyrl_engine_megatron.vision import Vision
from skyrl_engine_megatron.vision_decoder import (
    DeepStackLayer,
    InterleavedRotary,
    RoutedDeepStackLayer,
    SectionedRotary,
    VisionDecoder,
)

_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu2": lambda hidden: torch.nn.functional.relu(hidden).square(),
}
"""Activations by transformers' names, those of `families.ACTIVATIONS`."""


def build(architecture: Architecture, config: TransformerConfig, options: MegatronConfig, attention: Any) -> list[Decoder]:
    """Return this rank's pieces of the model with uninitialised weights: one, or `virtual_pipeline` of them.

    `attention` is the class of the layers' `core_attention`.
    """
    pieces, vision = [], architecture.vision
    for piece in range(options.virtual_pipeline):
        number = piece if options.virtual_pipeline > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number)
        decoder = (Decoder if vision is None else VisionDecoder)(
            config=config,
            transformer_layer_spec=_layers(architecture, config, options, attention, piece),
            vocab_size=architecture.pad_vocabulary(options.tensor_parallel),
            max_sequence_length=architecture.longest,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope" if vision is None else "mrope",
            vp_stage=number,
        )
        decoder.value_head = None
        decoder.vocabulary, decoder.logits = architecture.vocabulary, architecture.logits
        decoder.scales_embedding = architecture.family.scales_embedding
        if first and architecture.padding is not None:
            decoder.embedding.register_forward_hook(partial(_drop_padding_gradients, architecture.padding), with_kwargs=True)
        if first and architecture.embedding_scale != 1.0:
            scale = _embedding_scale(architecture, config.params_dtype)
            decoder.embedding.register_forward_hook(lambda _module, _args, output_T1H, scale=scale: output_T1H * scale)
        frequencies = [kind.inverse_frequencies.to(device_of(config)).clone() for kind in architecture.rotary]
        if vision is None:
            # not a registered buffer, so that a lower precision does not round it
            decoder.rotary_pos_emb.inv_freq = frequencies[0]
            if len(frequencies) > 1:
                decoder.rotary_pos_emb = SeveralRotaryEmbeddings(decoder.rotary_pos_emb, frequencies)
        else:
            decoder.rotary_pos_emb = (InterleavedRotary if vision.interleaved else SectionedRotary)(frequencies[0])
            decoder.visual = _tower(vision, config) if first else None
        pieces.append(decoder)
    return pieces


def let_first_layer_differentiate(decoders: Sequence[Decoder]) -> None:
    """Let what frozen embeddings give take part in the backward pass, where layers are computed again or stages wait for gradients.

    Layers that are computed again learn only if their input takes part, and a stage of which nothing learns is differentiated all the same.
    """
    for decoder in decoders:
        config = decoder.config
        if decoder.pre_process and (config.recompute_granularity is not None or config.pipeline_model_parallel_size > 1):
            decoder.embedding.register_forward_hook(lambda _module, _inputs, output: _require_gradient(output))


def _require_gradient(output_T1H: Tensor) -> Tensor:
    return output_T1H.requires_grad_() if torch.is_grad_enabled() and output_T1H.is_leaf else output_T1H


def _tower(vision: Vision, config: TransformerConfig) -> torch.nn.Module:
    recompute = config.recompute_granularity is not None
    return vision.tower(device_of(config), config.params_dtype, recompute=recompute, shared=config.sequence_parallel)


def _embedding_scale(architecture: Architecture, dtype: torch.dtype) -> float:
    """Return the factor of embeddings, rounded to their precision where transformers rounds it."""
    scale = architecture.embedding_scale
    return torch.tensor(scale, dtype=dtype).item() if architecture.family.scales_embedding else scale


def _drop_padding_gradients(
    padding: int, _embedding: torch.nn.Module, _args: tuple[()], arguments: Mapping[str, Any], output_T1H: Tensor
) -> Tensor:
    """Return the embedding's output without a gradient at padding tokens, as `padding_idx` does in transformers' models.

    It matters if the padding token occurs in the data too, such as an end-of-text token. Under sequence parallelism the output covers this
    rank's share of the tokens.
    """
    learns_T11 = (arguments["input_ids"] != padding).T[..., None]
    if len(learns_T11) != len(output_T1H):
        ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
        learns_T11 = learns_T11.chunk(ranks)[rank]
    return torch.where(learns_T11, output_T1H, output_T1H.detach())


def _layers(
    architecture: Architecture, config: TransformerConfig, options: MegatronConfig, core_attention: Any, piece: int
) -> TransformerBlockSubmodules:
    """Return the layers of this rank's piece number `piece`."""
    stages = options.pipeline_parallel
    place = piece * stages + parallel_state.get_pipeline_model_parallel_rank()
    held = [
        layer for layer, owner in enumerate(place_layers(architecture.layers, stages * options.virtual_pipeline)) if owner == place
    ]
    mixture = architecture.mixture
    with_experts = [mixture is not None and mixture.layers[layer] for layer in held]
    kinds = {kind: _layer(architecture, config, options, core_attention, experts=kind) for kind in set(with_experts)}
    return TransformerBlockSubmodules(layer_specs=[kinds[kind] for kind in with_experts], layer_norm=Norm)


def _layer(
    architecture: Architecture, config: TransformerConfig, options: MegatronConfig, core_attention: Any, *, experts: bool
) -> Any:
    """Return megatron-core's own layer, with norms that support sequence parallelism and attention that supports documents."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.module = FamilyLayer if architecture.vision is None else DeepStackLayer
    layer.params = {**layer.params, "architecture": architecture}
    norms, biases = architecture.family.norms, architecture.biases
    layer.submodules.input_layernorm = IdentityOp if norms.before_attention is None else Norm
    layer.submodules.pre_mlp_layernorm = IdentityOp if norms.before_feed_forward is None else Norm
    if experts:
        assert architecture.mixture is not None
        layer.module = RoutedLayer if architecture.vision is None else RoutedDeepStackLayer
        layer.submodules.mlp = mixture_of(architecture.mixture, whole_experts=options.whole_experts)
    else:
        # megatron-core warns without it
        layer.submodules.mlp.params = {**layer.submodules.mlp.params, "ffn_hidden_size": config.ffn_hidden_size}
        feed_forward = layer.submodules.mlp.submodules
        feed_forward.linear_fc1, feed_forward.linear_fc2 = (BiasedColumns, BiasedRows) if biases.feed_forward else (Columns, Rows)
    if architecture.latent is not None:
        facts = {"architecture": architecture, "core": core_attention}
        layer.submodules.self_attention = ModuleSpec(module=LatentAttention, params=facts)
        return layer
    attention = layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.core_attention = Columns, core_attention
    attention.linear_proj = BiasedRows if biases.output else Rows
    if architecture.query_key_norms == "heads":
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    elif architecture.query_key_norms == "whole":
        attention.q_layernorm, attention.k_layernorm = WholeQueryNorm, WholeKeyNorm
    return layer


def transformer_config(
    architecture: Architecture, options: MegatronConfig, dtype: torch.dtype, *, recompute: bool, cpu: bool
) -> TransformerConfig:
    """Return megatron-core's configuration. Losses and gradients are sums: `calculate_per_token_loss` turns its averages off."""
    interleaved = options.virtual_pipeline > 1
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.key_heads,
        kv_channels=architecture.head_size,
        ffn_hidden_size=architecture.feed_forward,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.epsilon,
        layernorm_zero_centered_gamma=architecture.family.zero_centered,
        gated_linear_unit=architecture.family.gated,
        activation_func=_ACTIVATIONS[architecture.activation],
        rotary_interleaved=architecture.family.interleaved_rotary,
        add_bias_linear=False,
        add_qkv_bias=architecture.biases.query_key_value,
        qk_layernorm=architecture.query_key_norms != "none",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        pipeline_model_parallel_layout=_pipeline_layout(architecture.layers, options),
        virtual_pipeline_model_parallel_size=options.virtual_pipeline if interleaved else None,
        context_parallel_size=options.context_parallel,
        sequence_parallel=options.sequence_parallel and options.tensor_parallel > 1,
        pipeline_dtype=dtype,
        mrope_section=None if architecture.vision is None else list(architecture.vision.sections),
        # In the interleaved schedule each of two stages is both the next and the previous stage of the other, so their messages need two
        # process groups. The exchange of row lengths would use one, so lengths must be known beforehand.
        variable_seq_lengths=options.pipeline_parallel > 1 and not interleaved,
        # the default refuses rows of different lengths, even without experts
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - no password
        batch_p2p_comm=not cpu and not interleaved,
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=True,
        use_cpu_initialization=cpu,
        perform_initialization=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        cuda_graph_scope=[],
    )


def _pipeline_layout(layers: int, options: MegatronConfig) -> list[list[str]] | None:
    """Return megatron-core's description of pieces with unequal numbers of layers; None where they are equal."""
    pieces = options.pipeline_parallel * options.virtual_pipeline
    if layers % pieces == 0:
        return None
    layout = [["decoder"] * count for count in divide_layers(layers, pieces)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout
