"""Attention by Transformer Engine's kernels: rows of documents in its `thd` layout, and context parallelism by its ring.

It runs on CUDA devices only, which tests on a machine without one cannot reach. So before a model is built with it, the ranks that will train
compare its output and gradients on random documents with those of `DocumentAttention`, which is tested on the CPU for every layout.
"""

import logging
from copy import copy
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_engine import ModelError, UnsupportedError
from skyrl_engine.modeling.compiling import outside
from skyrl_engine_megatron.attention import DocumentAttention
from skyrl_engine_megatron.context import alignment, order_after_gather
from skyrl_engine_megatron.documents import Boundaries
from skyrl_engine_megatron.library import AttnMaskType, TransformerConfig, parallel_state
from skyrl_engine_megatron.options import MegatronConfig

CHUNKS = (5, 1, 16, 2)
"""Lengths of the documents compared, in units of the smallest length that context-parallel ranks can share."""

TOLERANCE = 3e-2
"""Largest difference relative to the largest entry: bfloat16 keeps 8 bits. In short documents a token too many or too few differs by more."""

logger = logging.getLogger(__name__)


def make_document_kernels(base: Any) -> Any:
    """Return a subclass of `base`, megatron-core's `TEDotProductAttention`, that takes documents from where `DocumentAttention` does."""

    class DocumentKernels(base):  # type: ignore[misc] # megatron-core is untyped
        """megatron-core's `core_attention` for rows of documents, computed by Transformer Engine."""

        @outside
        def forward(
            self,
            query_THD: Tensor,
            key_TGD: Tensor,
            value_TGD: Tensor,
            _mask: None = None,
            *,
            attn_mask_type: Any,
            packed_seq_params: Boundaries,
            **_: Any,
        ) -> Tensor:
            output: Tensor = super().forward(
                query_THD, key_TGD, value_TGD, None, attn_mask_type, packed_seq_params=packed_seq_params.on_device
            )
            return output.flatten(1)

    return DocumentKernels


def choose_core_attention(options: MegatronConfig, config: TransformerConfig, device: torch.device) -> Any:
    """Return the class of `core_attention` that `options.attention` asks for, the same on all ranks.

    Raises UnsupportedError if Transformer Engine was asked for and is not available, ModelError if it computes something else.
    """
    is_required = options.attention == "transformer_engine"
    if options.attention == "torch" or (not is_required and (device.type != "cuda" or not config.bf16)):
        return DocumentAttention
    if is_required and device.type != "cuda":
        raise UnsupportedError(
            'backend.attention = "transformer_engine", and Transformer Engine computes on CUDA devices alone',
            remedy='Set backend.attention to "auto"',
        )
    versions: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(versions, version())
    if None in versions or len(set(versions)) > 1:
        if is_required:
            versions_of_ranks = ", ".join(f"rank {rank}: {version or 'none'}" for rank, version in enumerate(versions))
            raise UnsupportedError(
                f'backend.attention = "transformer_engine" needs one version of Transformer Engine on all ranks, and finds {versions_of_ranks}',
                remedy='Install it on every machine (pip install --no-build-isolation "transformer-engine[pytorch]"), '
                'or set backend.attention to "auto"',
            )
        return DocumentAttention
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return choose_kernels(make_document_kernels(TEDotProductAttention), config, device, is_required=is_required)


def version() -> str | None:
    """Return the version of Transformer Engine that megatron-core can use here, or None if there is none or its import fails."""
    if find_spec("transformer_engine") is None:
        return None
    try:
        from megatron.core.extensions.transformer_engine import HAVE_TE, get_te_version

        return str(get_te_version()) if HAVE_TE else None
    except Exception:  # a build for another CUDA or torch raises what it likes
        logger.warning("Transformer Engine is installed and cannot be imported", exc_info=True)
        return None


def choose_kernels(kernels: Any, config: TransformerConfig, device: torch.device, *, is_required: bool) -> Any:
    """Return `kernels` if they agree with `DocumentAttention` on every rank, else `DocumentAttention`, with a warning.

    The comparison runs on each rank by itself first, where a rank that raises keeps no other waiting, and then with context parallelism.
    Raises ModelError instead of the warning if `is_required`: the configuration names the kernels.
    """
    ranks = config.context_parallel_size
    for together in dict.fromkeys((1, ranks)):
        differences: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(differences, _measure_difference(kernels, config, device, together))
        for rank, (difference, why) in enumerate(differences):
            if not difference <= TOLERANCE:
                message = f"Transformer Engine's attention differs from torch's by {difference:.1e} on rank {rank}{why}"
                if is_required:
                    raise ModelError(message, remedy='Set backend.attention to "torch", and report it')
                logger.warning("documents are attended one by one: %s", message)
                return DocumentAttention
    return kernels


def _measure_difference(kernels: Any, config: TransformerConfig, device: torch.device, ranks: int) -> tuple[float, str]:
    try:
        return find_worst_difference(kernels, config, device, ranks), ""
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises on a device that it was not built for
        lines = str(error).strip().splitlines()
        return float("inf"), f" ({type(error).__name__}: {lines[0] if lines else 'no message'})"


def find_worst_difference(kernels: Any, config: TransformerConfig, device: torch.device, ranks: int) -> float:
    """Return the largest difference of output and gradients on random documents, relative to the largest entry of each.

    `ranks` is 1, or the number of context-parallel ranks, each of which compares its share. Keys and values are slices of one projection, as in
    a layer.
    """
    lengths = tuple(chunks * alignment(ranks) for chunks in CHUNKS)
    order = order_after_gather(lengths, ranks).to(device) if ranks > 1 else None
    boundaries = Boundaries.of(lengths, order).for_kernels(device)
    draw = torch.Generator().manual_seed(parallel_state.get_context_parallel_rank())
    shares = config.tensor_model_parallel_size
    heads, key_heads = config.num_attention_heads // shares, config.num_query_groups // shares
    tokens, size = sum(lengths) // ranks, config.kv_channels
    shapes = ((tokens, heads, size), (tokens, key_heads, 2 * size), (tokens, heads * size))
    query, keys_and_values, upstream = (torch.randn(shape, generator=draw).to(device, config.params_dtype) for shape in shapes)
    config = copy(config)
    config.context_parallel_size = ranks
    results = []
    with torch.enable_grad():
        for attention in (DocumentAttention, kernels):
            module = attention(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
            inputs = query.clone().requires_grad_(), keys_and_values.clone().requires_grad_()
            key, value = torch.split(inputs[1], size, -1)
            output = module.to(device)(
                inputs[0], key, value, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=boundaries
            )
            results.append([output.detach(), *torch.autograd.grad(output, inputs, upstream)])
    return max(
        float((got.float() - expected.float()).abs().max().nan_to_num(float("inf")) / expected.float().abs().max())
        for expected, got in zip(*results, strict=True)
    )
