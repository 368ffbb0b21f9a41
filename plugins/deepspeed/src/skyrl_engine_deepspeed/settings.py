"""DeepSpeed's configuration for one engine, with every value that matters written out, and the combinations that are refused."""

from typing import Any

import torch

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ComputeDtype
from skyrl_engine_deepspeed.options import DeepSpeedConfig
from skyrl_engine_deepspeed.state_layout import BUCKET


def settings(config: DeepSpeedConfig, dtype: ComputeDtype, device: torch.device, *, learns: bool) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`.

    It has one accumulation step, because DeepSpeed is not to count micro-batches, and no clipping (DeepSpeed's default clips at 1), which
    `AccumulatedGradients.clip` does. Gradients are accumulated and communicated in float32, whatever precision computes.
    """
    on_cuda = device.type == "cuda"
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "overlap_comm": on_cuda and config.zero_stage == 3,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": config.persistence_threshold,
    }
    if config.offload_optimizer and learns:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_cuda}
    if config.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": on_cuda}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def refuse_unsupported(config: DeepSpeedConfig, dtype: ComputeDtype, device: torch.device, *, learns: bool) -> None:
    """Raises UnsupportedError for settings that DeepSpeed cannot follow, or follows with a loss of precision."""
    config.refuse_contradictions()
    config.refuse_precision(dtype, learns=learns)
    for option in ("offload_optimizer", "offload_parameters"):
        if getattr(config, option) and device.type != "cuda" and learns:
            raise UnsupportedError(
                f"backend.{option} moves tensors between a CUDA device and host memory, and this rank computes on the {device.type}",
                remedy=f"Set backend.{option} to false, or run on CUDA devices",
            )
