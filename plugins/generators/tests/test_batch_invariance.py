"""A row's tokens and log-probabilities do not tell what was sampled with it: bit for bit, on a CPU, for every family and length."""

import numpy as np
import pytest
import torch
from attrs import evolve
from by_day import now
from sampled_models import ARCHITECTURES, QUICK, READ_ANEW, write
from torch import nn
from transformers import AutoModelForCausalLM

from skyrl_engine.contracts import GenerationRequest, Sampling
from skyrl_engine_generators.attention import attend_in_blocks
from skyrl_engine_generators.batch_invariance import EAGER, EXPERTS, SDPA, AlignedActivation, BatchInvariance, ask_filled_experts
from skyrl_engine_generators.buckets import BUCKET, FIXED, PLACES, apply_in_fixed_rows, find_unit, pad_rows
from skyrl_engine_generators.loop import SlotLoop
from skyrl_engine_generators.rows import CachedDecoder, UncachedDecoder
from skyrl_engine_generators.sampled_row import SampledRow
from skyrl_engine_generators.stops import StopRule

LONGEST = 1024
LENGTHS = {False: (1, 7, 16, 60, 127, 128, 129, 190, 193, 250, 330, 530, 800), True: (1, 7, 30, 70)}
"""Prompt tokens of cached rows, and of rows that are read again: kernels change at 192 and 768 queries and every 192 keys on this torch."""


def build_requests(lengths, vocabulary=128):
    draw = np.random.default_rng(1)
    requests = []
    for group, length in enumerate(lengths):
        prompt = draw.integers(0, vocabulary, length).astype(np.int32)
        for member in range(1 + group % 3):
            sampling = Sampling(max_tokens=2 + 7 * len(requests) % 11, ignore_eos=True, temperature=(1.0, 0.7)[member % 2])
            requests.append(GenerationRequest(len(requests), prompt, sampling, seed=len(requests), prefix_group=group))
    return requests


@torch.inference_mode()
def sample_tokens(rows, slots, arrivals, waiting):
    """Sample all requests; `arrivals(n)` is how many more arrive while n are under way."""
    loop, got = SlotLoop(rows, slots), {}
    while waiting or len(loop):
        for request in waiting[: (arriving := arrivals(len(loop)))]:
            rule = StopRule(frozenset(), (), 0, request.sampling.max_tokens, None)
            loop.add(SampledRow(request, rule, request.prompt_ids.astype(np.int64)))
        waiting = waiting[arriving:]
        got |= {done.request_id: (done.token_ids.tobytes(), done.logprobs.tobytes()) for done in loop.step()}
    return got


ORDERS = {
    "three slots": (3, lambda _live: 99, 1),
    "staggered": (64, lambda _live: 1, 1),
    "last comes first": (64, lambda live: 1 + live % 3, -1),
}


def family_of(tmp_path, family):
    settings = {**ARCHITECTURES[family], "max_position_embeddings": LONGEST}
    if "n_positions" in settings:
        settings["n_positions"] = LONGEST
    return AutoModelForCausalLM.from_pretrained(write(tmp_path, family, **settings)).eval()


def require_alike(kind, model, threads, requests):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = sample_tokens(kind(model, 1), 1, lambda live: 0 if live else 1, requests)
        for name, (slots, arrivals, order) in ORDERS.items():
            got = sample_tokens(kind(model, slots), slots, arrivals, requests[::order])
            differ = [
                f"{len(request.prompt_ids)} tokens" for request in requests if got[request.request_id] != alone[request.request_id]
            ]
            assert not differ, (name, differ)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", now(ARCHITECTURES, *sorted(QUICK | {"qwen3_moe"})))
def test_rows_beside_change_no_bit(family, tmp_path):
    reads = family in READ_ANEW
    require_alike(UncachedDecoder if reads else CachedDecoder, family_of(tmp_path, family), 1, build_requests(LENGTHS[reads]))


POISON = 122
"""Tokens from here on have hidden states that are no numbers, like a row that overflows; so are their keys and values, in every layer."""


@pytest.mark.parametrize("value", now([torch.nan, torch.inf], torch.nan), ids=str)
@pytest.mark.parametrize("family", now(ARCHITECTURES, *sorted(QUICK)))
def test_a_row_that_fails_leaves_nothing_in_its_slot(family, value, tmp_path):
    """Rows that come after it, move into its slot or have its prompt's beginning are those that each has in slots of its own."""
    reads = family in READ_ANEW
    kind, model = UncachedDecoder if reads else CachedDecoder, family_of(tmp_path, family)
    model.get_input_embeddings().register_forward_hook(
        lambda _module, inputs, outputs: outputs.masked_fill((inputs[0] >= POISON)[..., None], value)
    )
    requests = build_requests((7, 30, 12, 25, 3, 20, 33, 5) if reads else (7, 140, 16, 60, 3, 300, 127, 40, 20))
    requests = [evolve(request, sampling=evolve(request.sampling, max_tokens=24, temperature=2.0)) for request in requests]
    for request in requests:
        np.minimum(request.prompt_ids, POISON - 1, out=request.prompt_ids)
    for request in requests[3::6]:
        request.prompt_ids[-2] = POISON
    alone = {
        request.request_id: sample_tokens(kind(model, 1), 1, lambda _live: 1, [request])[request.request_id] for request in requests
    }
    ended = {number: len(tokens) for number, (tokens, _) in alone.items()}
    assert {0, 24 * 4} < set(ended.values()), "some rows fail at their prompts, later, and not at all"
    for name, (slots, arrivals, order) in ORDERS.items():
        got = sample_tokens(kind(model, slots), slots, arrivals, requests[::order])
        differ = [
            (len(request.prompt_ids), ended[request.request_id])
            for request in requests
            if got[request.request_id] != alone[request.request_id]
        ]
        assert not differ, (name, differ)


@pytest.mark.nightly
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if family not in READ_ANEW])
def test_rows_beside_change_no_bit_in_several_threads(family, threads, tmp_path):
    require_alike(CachedDecoder, family_of(tmp_path, family), threads, build_requests(LENGTHS[False]))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral", "deepseek_v3"])
def test_rows_beside_change_no_bit_in_other_precisions(family, dtype, tmp_path):
    model = family_of(tmp_path, family).to(dtype)
    if dtype == torch.float64 and getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        # as the engine loads it: torch's grouped product lacks float64
        model.set_experts_implementation("eager")
    require_alike(CachedDecoder, model, 1, build_requests(LENGTHS[False]))


@pytest.mark.parametrize("threads", now([1, 2, 5], 1))
def test_rows_beside_change_no_bit_of_a_larger_model(threads):
    """Elementwise functions are shared out among threads from 32,768 elements on."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 3080, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=1003, num_hidden_layers=2, pad_token_id=0, eos_token_id=2, **sizes)).eval()
    require_alike(CachedDecoder, model, threads, build_requests((5, 40, 90, 200, 260), 1003))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("widths", [(12, 12), (16, 8)], ids=["torch's kernel", "products"])
def test_attention_in_blocks_is_attention(rows, widths):
    """Also where a sliding window leaves whole blocks out of sight."""
    width, value_width = widths
    draw = torch.Generator().manual_seed(0)
    places = 3 * PLACES
    query = torch.randn(rows, 6, 1, width, generator=draw)
    key = torch.randn(rows, 2, places, width, generator=draw)
    value = torch.randn(rows, 2, places, value_width, generator=draw)
    for at, window in ((3, places), (PLACES, places), (2 * PLACES + 40, places), (2 * PLACES + 40, 50)):
        seen = (torch.arange(places) <= at) & (torch.arange(places) > at - window)
        mask = torch.where(seen, 0.0, -torch.inf).expand(rows, 1, 1, -1)
        got, _ = attend_in_blocks(nn.Module(), query, key, value, mask, scaling=0.3)
        scores = query.double() @ key.double().repeat_interleave(3, 1).transpose(-1, -2) * 0.3 + mask
        due = scores.softmax(-1) @ value.double().repeat_interleave(3, 1)
        torch.testing.assert_close(got.double(), due.transpose(1, 2), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7])
def test_attention_in_blocks_is_the_same_in_every_thread(heads, threads):
    """Sixteen equal rows come out equal. torch gives each thread a part of one buffer, and parts of some sizes are not aligned."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for width in (8, 12, 16, 17, 24, 64, 80, 128):
            draw = torch.Generator().manual_seed(0)
            query = torch.randn(1, 2 * heads, 1, width, generator=draw)
            key, value = (torch.randn(1, 2, 2 * PLACES, width, generator=draw) for _ in range(2))
            mask = torch.where(torch.arange(2 * PLACES) <= PLACES + 90, 0.0, -torch.inf).expand(BUCKET, 1, 1, -1)
            rows = [part.expand(BUCKET, -1, -1, -1).contiguous() for part in (query, key, value)]
            got, _ = attend_in_blocks(nn.Module(), *rows, mask, scaling=0.3)
            assert torch.equal(got, got[:1].expand_as(got)), width
    finally:
        torch.set_num_threads(before)


def test_filled_experts_are_the_models_experts(tmp_path):
    model = family_of(tmp_path, "mixtral")
    experts = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(21, 48, generator=draw)
    chosen = torch.randint(0, 3, (21, 2), generator=draw)
    weights = torch.rand(21, 2, generator=draw)
    with torch.no_grad():
        torch.testing.assert_close(ask_filled_experts(experts, hidden, chosen, weights), experts(hidden, chosen, weights))


@pytest.mark.parametrize("count", [1, 37, 592, 40_001])
def test_an_aligned_activation_is_the_activation(count):
    inputs = torch.randn(2 * count, generator=torch.Generator().manual_seed(0)).view(count, 2)[:, 0]
    torch.testing.assert_close(AlignedActivation(nn.SiLU())(inputs), nn.functional.silu(inputs))


def test_a_model_is_left_as_it_was(tmp_path):
    model = family_of(tmp_path, "qwen3_moe")
    before = (str(model), model.config._attn_implementation, model.config._experts_implementation)
    invariance = BatchInvariance(model)
    assert (model.config._attn_implementation, model.config._experts_implementation) == (SDPA, EXPERTS)
    assert "AlignedActivation" in str(model)
    BatchInvariance(model)
    assert str(model).count("AlignedActivation") == str(before[0]).count("SiLU"), "wrapped twice"
    invariance.undo()
    assert (str(model), model.config._attn_implementation, model.config._experts_implementation) == before


def test_models_attend_by_their_own_code(tmp_path):
    folder = write(tmp_path, "llama")
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    CachedDecoder(eager, 1)
    assert eager.config._attn_implementation == EAGER
    other_model = AutoModelForCausalLM.from_pretrained(folder).eval()
    CachedDecoder(other_model, 1)
    assert other_model.config._attn_implementation == SDPA


def test_rows_are_filled_up_with_zeros():
    rows = torch.ones(BUCKET + 1, 3)
    filled = pad_rows(rows, BUCKET)
    assert filled.shape == (2 * BUCKET, 3)
    assert torch.equal(filled[: len(rows)], rows)
    assert not filled[len(rows) :].any()
    assert pad_rows(rows[:BUCKET], BUCKET).shape == (BUCKET, 3)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_rows_of_which_none_depends_on_the_others(threads, dtype):
    """With several threads, or in another precision, products of 16 rows and of 64 differ in their last bits (896 to 4864)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        draw = torch.Generator().manual_seed(0)
        for features in ((896, 4864), (2048, 512)):
            product = nn.Linear(*features, bias=False, dtype=dtype)
            unit = find_unit(product.weight)
            assert unit == (BUCKET if threads == 1 and dtype == torch.float32 else FIXED)
            rows = torch.randn(4 * FIXED, features[0], generator=draw).to(dtype)
            whole = apply_in_fixed_rows(product, product.weight, rows)
            assert whole.shape == (4 * FIXED, features[1])
            for start, end in ((0, unit), (unit, 3 * unit), (2 * unit, 4 * unit)):
                assert torch.equal(apply_in_fixed_rows(product, product.weight, rows[start:end].contiguous()), whole[start:end])
    finally:
        torch.set_num_threads(before)
