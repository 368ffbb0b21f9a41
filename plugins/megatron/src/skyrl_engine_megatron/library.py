"""The parts of megatron-core that this plugin uses, imported without warnings that Apex and Transformer Engine are missing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer import attention as attention_layers
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer

__all__ = [
    "AttnMaskType",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "IdentityOp",
    "MegatronModule",
    "ModuleSpec",
    "PackedSeqParams",
    "RotaryEmbedding",
    "RowParallelLinear",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "attention_layers",
    "copy_to_tensor_model_parallel_region",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "ignore_own_deprecations",
    "parallel_random",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "schedules",
]


@contextmanager
def ignore_own_deprecations() -> Iterator[None]:
    """Ignore deprecation warnings about megatron-core's own calls, which its users cannot change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.")
        warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")
        yield
