"""Build a rank's pieces of the model: decoder class, layers and rotary positions."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skyrl_engine_megatron.architecture import Architecture
from skyrl_engine_megatron.compiling import Columns, Rows
from skyrl_engine_megatron.decoder import Decoder
from skyrl_engine_megatron.experts import RoutedLayer, mixture_of
from skyrl_engine_megatron.library import (
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    parallel_state,
)
from skyrl_engine_megatron.options import MegatronConfig
from skyrl_engine_megatron.vision import Vision
from skyrl_engine_megatron.vision_decoder import DeepStackLayer, InterleavedRotary, VisionDecoder


class Norm(torch.nn.RMSNorm):
    """RMSNorm of hidden states.

    Under sequence parallelism each rank normalises its share of the tokens only; the mark on the weight makes megatron-core sum gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=_device(config), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] # megatron-core reads it


class HeadNorm(torch.nn.RMSNorm):
    """RMSNorm of this rank's query or key heads; megatron-core sums its gradients over tensor-parallel ranks, by the module's name."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=_device(config), dtype=config.params_dtype)


def _device(config: TransformerConfig) -> torch.device:
    return torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


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
            transformer_layer_spec=_layers(architecture, config, options, attention, number),
            vocab_size=architecture.pad_vocabulary(options.tensor_parallel),
            max_sequence_length=architecture.longest,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope" if vision is None else "mrope",
            vp_stage=number,
        )
        decoder.vocabulary = architecture.vocabulary
        if first and architecture.padding is not None:
            decoder.embedding.register_forward_hook(partial(_drop_padding_gradients, architecture.padding), with_kwargs=True)
        frequencies = architecture.inverse_frequencies.to(_device(config)).clone()
        if vision is None:
            # not a registered buffer, so that a lower precision does not round it
            decoder.rotary_pos_emb.inv_freq = frequencies
        else:
            decoder.rotary_pos_emb = InterleavedRotary(frequencies)
            decoder.visual = _tower(vision, config) if first else None
        pieces.append(decoder)
    return pieces


def _tower(vision: Vision, config: TransformerConfig) -> torch.nn.Module:
    recompute = config.recompute_granularity is not None
    return vision.tower(_device(config), config.params_dtype, recompute=recompute, shared=config.sequence_parallel)


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
    architecture: Architecture, config: TransformerConfig, options: MegatronConfig, core_attention: Any, piece: int | None
) -> TransformerBlockSubmodules:
    """Return megatron-core's own layers, with norms that support sequence parallelism and attention that supports documents."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    if architecture.vision is not None:
        layer.module = DeepStackLayer
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    if architecture.mixture is not None:
        layer.module = RoutedLayer
        layer.submodules.mlp = mixture_of(architecture.mixture, whole_experts=options.whole_experts)
    else:
        # megatron-core warns without it
        layer.submodules.mlp.params = {**layer.submodules.mlp.params, "ffn_hidden_size": config.ffn_hidden_size}
        layer.submodules.mlp.submodules.linear_fc1, layer.submodules.mlp.submodules.linear_fc2 = Columns, Rows
    attention = layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj, attention.core_attention = Columns, Rows, core_attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    count = get_num_layers_to_build(config, vp_stage=piece)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


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
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.query_key_value_bias,
        qk_layernorm=architecture.query_key_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
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
