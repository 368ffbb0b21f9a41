"""On a CPU, vLLM keeps a packed copy of a head; of one that is the embedding too, no reload makes it again."""

import torch


def pack_heads_again(model: torch.nn.Module) -> int:
    """Pack the heads of a model on a CPU from their present weights; return how many. On other devices nothing is packed."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return 0
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead) and module.weight.numel()]
    for head in heads:
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    return len(heads)
