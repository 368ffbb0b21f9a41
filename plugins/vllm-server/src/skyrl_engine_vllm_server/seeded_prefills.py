"""On a CPU, vLLM 0.32 ends when a seeded request's prompt is read in several steps.

What a step before the last one draws is taken back by moving the generator's offset, which generators of a CPU have not. Here the generator's
state before the draw is restored instead.
"""

from typing import Any


def restore_generators_of_unfinished_prompts() -> None:
    """Replace what fails in vLLM's runner for CPUs; on other devices, and the second time, nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if getattr(CPUModelRunner, "_skyrl_engine_restores", False):
        return
    draw, keep_books = TopKTopPSampler.forward_cpu, CPUModelRunner._bookkeeping_sync
    states: dict[int, Any] = {}

    def draw_from_known_states(self: Any, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        states.clear()
        states.update({row: generator.get_state() for row, generator in generators.items()})
        return draw(self, logits, generators, k, p)

    def keep_books_of_finished_prompts(self: Any, *arguments: Any, **keywords: Any) -> Any:
        batch = self.input_batch
        unfinished = [row for row in range(batch.num_reqs) if self.discard_request_mask.np[row] and row in batch.generators]
        taken_out = {row: batch.generators.pop(row) for row in unfinished}
        for row, generator in taken_out.items():
            if row in states:
                generator.set_state(states[row])
        try:
            return keep_books(self, *arguments, **keywords)
        finally:
            batch.generators.update(taken_out)

    TopKTopPSampler.forward_cpu = draw_from_known_states
    CPUModelRunner._bookkeeping_sync = keep_books_of_finished_prompts
    CPUModelRunner._skyrl_engine_restores = True
