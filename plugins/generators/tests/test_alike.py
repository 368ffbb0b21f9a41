"""A row's tokens and log-probabilities do not tell what was sampled beside it: bit for bit, on a CPU."""

from itertools import product

import numpy as np
import pytest
import torch
from by_day import now
from sampled_models import ARCHITECTURES, QUICK, write
from transformers import AutoModelForCausalLM

from skyrl_engine.contracts import GenerationRequest, Sampling
from skyrl_engine_generators.alike import NAME, ROWS, filled_rows
from skyrl_engine_generators.loop import SampledRow, SlotLoop
from skyrl_engine_generators.rows import CachedRows
from skyrl_engine_generators.stops import StopRule

OTHERS = {"qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gemma2", "mamba"}
"""Experts compute the tokens that are sent to them, few or many; gemma2 attends by products of its own; mamba's scan depends on the shape."""


def requests():
    draw = np.random.default_rng(1)
    made = []
    for group in range(12):
        prompt = draw.integers(0, 128, int(draw.integers(1, 70))).astype(np.int32)
        for member in range(int(draw.integers(1, 4))):
            sampling = Sampling(max_tokens=int(draw.integers(1, 30)), ignore_eos=True, temperature=(1.0, 0.7)[member % 2])
            made.append(GenerationRequest(len(made), prompt, sampling, seed=len(made), prefix_group=group))
    return made


@torch.inference_mode()
def sampled(rows, slots, arrivals):
    """Sample all requests; `arrivals(n)` is how many more arrive while n are under way."""
    loop, waiting, got = SlotLoop(rows, slots), requests(), {}
    while waiting or len(loop):
        for request in waiting[: (now := arrivals(len(loop)))]:
            rule = StopRule(frozenset(), (), 0, request.sampling.max_tokens, None)
            loop.add(SampledRow(request, rule, request.prompt_ids.astype(np.int64)))
        waiting = waiting[now:]
        got |= {each.request_id: (each.token_ids.tobytes(), each.logprobs.tobytes()) for each in loop.step()}
    return got


ORDERS = {
    "one by one": (1, lambda live: 0 if live else 1),
    "three slots": (3, lambda _live: 99),
    "staggered": (64, lambda _live: 1),
}


@pytest.mark.parametrize(
    ("family", "threads"),
    now(product([each for each in ARCHITECTURES if each not in OTHERS], [1, 2]), *product(QUICK, [1])),
)
def test_rows_beside_change_no_bit(family, threads, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write(tmp_path, family, **ARCHITECTURES[family])).eval()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = sampled(CachedRows(model, 64), 64, lambda _live: 99)
        for name, (slots, arrivals) in ORDERS.items():
            assert sampled(CachedRows(model, slots), slots, arrivals) == together, name
    finally:
        torch.set_num_threads(before)


def test_models_that_attend_in_another_way_keep_it(tmp_path):
    folder = write(tmp_path, "llama")
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    CachedRows(eager, 1)
    assert eager.config._attn_implementation == "eager"
    other = AutoModelForCausalLM.from_pretrained(folder).eval()
    CachedRows(other, 1)
    assert other.config._attn_implementation == NAME


def test_rows_are_filled_up_with_zeros():
    rows = torch.ones(ROWS + 1, 3)
    filled = filled_rows(rows)
    assert filled.shape == (2 * ROWS, 3)
    assert torch.equal(filled[: len(rows)], rows)
    assert not filled[len(rows) :].any()
    assert filled_rows(rows[:ROWS]).shape == (ROWS, 3)
