"""The plan of a run as a person reads it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from skyrl_engine.cli.render import format_kept_rows, show_facts, show_table
from skyrl_engine.cli.terminal import echo

if TYPE_CHECKING:
    from skyrl_engine.training.rl.dry_run import RlPlan
    from skyrl_engine.training.sft.dry_run import RunPlan


def show_plan(plan: "RunPlan | RlPlan | Mapping[str, str]") -> None:
    """Print the plan of a run, on stdout; that of another distribution's trainer is a mapping of lines by their names."""
    if isinstance(plan, Mapping):
        show_facts(plan)
        return
    from skyrl_engine.data.preview import show_boundaries
    from skyrl_engine.engine.memory_plan import format_memory_plan
    from skyrl_engine.training.rl.dry_run import RlPlan, facts

    if isinstance(plan, RlPlan):
        show_facts(facts(plan))
        return
    topology = plan.topology
    sizes = ", ".join(f"{name} {size}" for name, size in attrs.asdict(topology).items())
    shared = f"; {plan.sharing}" if plan.sharing else ""
    show_facts(
        {
            **plan.plugins,
            "observers": ", ".join(plan.observers) or "none",
            "model": plan.model,
            "launch": f"{plan.launch}, world of {topology.world_size} ({sizes}){shared}",
            **({"adapters": plan.adapters} if plan.adapters else {}),
            **({"compiling": plan.compiles} if plan.compiles else {}),
            "capabilities": f"needs {', '.join(plan.required)}; the backend declares {', '.join(plan.capabilities)}",
            "training data": _format_data_counts(plan.train),
            **(
                {}
                if "assumed" in plan.train
                else {
                    "held-out data": "none" if plan.evaluation is None else _format_data_counts(plan.evaluation),
                    "first prompt": show_boundaries(plan.prompt) or "none: every token carries loss",
                }
            ),
            "length limit": "none" if plan.longest_allowed is None else f"{plan.longest_allowed:,} tokens",
            **({} if plan.rotary_length is None else {"rotary frequencies": f"fixed for rows of {plan.rotary_length:,} tokens"}),
            "steps": f"{plan.total_steps:,} of {plan.batch_size} samples"
            + (f" ({plan.steps_per_epoch:,} an epoch)" if plan.steps_per_epoch is not None else "")
            + (f"; {plan.samples_per_step}" if plan.samples_per_step else ""),
            **({"mixture": plan.mixture} if plan.mixture else {}),
            **({} if plan.sampled is None else {"sampled steps": plan.sampled}),
            "first mini-batch": str(plan.shape),
            **({"chosen": "\n".join(plan.chosen)} if plan.chosen else {}),
            **({} if plan.memory is None else format_memory_plan(plan.memory)),
        }
    )
    echo("")
    show_table(
        ("first mini-batch: rank", "rows", "width", "samples"),
        [(shape.rank, shape.rows, shape.width, shape.samples) for shape in plan.micro_batches],
    )


def _format_data_counts(data: Mapping[str, Any]) -> str:
    if "stream" in data:
        return f"{data['name']} ({data['format']}): {data['stream']}"
    if "assumed" in data:
        return f"{data['samples']:,} samples, assumed by their lengths: {data['tokens']:,} tokens"
    bad = [
        f"{data[name]:,} {what}"
        for name, what in (("dropped_bad_rows", "that cannot be used"), ("dropped_bad_images", "with bad images"))
        if data[name]
    ]
    dropped = sum(count for name, count in data.items() if name.startswith("dropped_"))
    return (
        f"{data['name']} ({data['format']}): {format_kept_rows(data['format'], data['samples'], data['rows'])}, {dropped:,} dropped"
        + (f" ({', '.join(bad)}), " if bad else ", ")
        + f"{data['truncated']:,} truncated; {data['tokens']:,} tokens, {data['loss_tokens']:,} carry loss"
        + (f"; {data['images']:,} images of {data['image_tokens']:,} tokens" if data["images"] else "")
        + (f"; columns {', '.join(data['columns'])}" if data["columns"] else "")
        + f"; written {data['written']}"
    )
