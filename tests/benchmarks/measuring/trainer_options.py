"""Options with which transformers' and TRL's trainers do what the engine does, and nothing else."""

from typing import Any, Final

PLAIN: Final[dict[str, Any]] = {
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch_fused",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""AdamW (fused) at one rate, on the CPU in float32 without recomputed activations, which are defaults of TRL's; nothing saved or reported."""
