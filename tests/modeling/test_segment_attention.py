"""Packed rows equal rows of their own, and no document sees another.

Models of four random layers, float32, CPU, one packed row of five documents of 5, 1, 17, 2 and 30 tokens, windows of 8. Log-probabilities of
packed and separate documents agree within 1e-6 absolutely: values of order 5 have float32 steps of 5e-7, and both sides do the same sums, over
matrices of different height. Gradients agree within 1e-5 of their norm. Changing one document leaves the others bit-identical, because no
sum of a dense model runs over tokens; a mixture of experts groups its tokens by expert, so for it the exact statement is about gradients.
Not covered: CUDA (the backend's own tests), dropout.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.modeling.causal_lm import split_causal_lm
from skyrl_engine.modeling.loading import enable_activation_checkpointing, load_scorer
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.segment_adoption import adopt_segment_attention
from skyrl_engine.modeling.segment_attention import NAME, segment_attention, segment_mask
from skyrl_engine.modeling.segments import WHOLE_ROWS, Segments, SegmentSupport

VOCABULARY, LAYERS = 256, 4
LENGTHS = (5, 1, 17, 2, 30)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWED = {"head_dim": 16, "sliding_window": 8}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {
        **WINDOWED,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mistral": WINDOWED,
    "phi3": {"sliding_window": 8},
    "olmo2": {},
    "cohere2": WINDOWED,
    "gpt2": {"n_embd": 64, "n_layer": LAYERS, "n_head": 4},
}
WEIGHTED: dict[str, dict[str, Any]] = {
    "gemma2": {**WINDOWED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},
    "gpt_oss": {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Models whose scores have soft caps or sinks, which torch's kernel does not compute."""
FAMILIES = {**DENSE, "qwen3_moe": EXPERTS, "mixtral": {"num_local_experts": 4, **WINDOWED}, **WEIGHTED}
LINEAR = {
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def tiny(family: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    sizes = {} if family in ("gpt2", "bloom") else SIZES
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = AutoConfig.for_model(family, **{**sizes, "vocab_size": VOCABULARY, **special, **FAMILIES.get(family, {}), **options})
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # torch's grouped product knows no float64
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **experts).eval()


def adopt(model: Any) -> Scorer:
    """A scorer over `model`, which attends by segments from now on, or says why not."""
    scorer = Scorer(split_causal_lm(model), logits_per_chunk=7 * VOCABULARY)
    scorer.segment_support = adopt_segment_attention(model, scorer.decoder, name="tiny")
    return scorer


def documents() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in LENGTHS]


def pack(chosen: list[Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """One row of documents; every token that has a predecessor is scored."""
    ends = torch.tensor([len(one) for one in chosen]).cumsum(0)
    positions = torch.cat([torch.arange(len(one) - 1) + int(end) - len(one) for one, end in zip(chosen, ends, strict=True)])
    places = torch.cat([torch.arange(len(one)) for one in chosen])
    ids = torch.cat(chosen)
    return {"input_ids": ids[None], "position_ids": places[None]}, positions, ids[positions + 1]


def score(scorer: Scorer, chosen: list[Tensor], lengths: tuple[int, ...] | None = None) -> list[Tensor]:
    """Log-probabilities per document from one packed row."""
    segments = Segments(lengths or tuple(len(one) for one in chosen))
    logprobs = scorer(*pack(chosen), segments=segments)["logprobs"]
    return list(logprobs.split([len(one) - 1 for one in chosen]))


def score_separately(model: Any, chosen: list[Tensor]) -> list[Tensor]:
    """The definition: each document a forward of its own, whole logits."""
    parts = []
    for one in chosen:
        logprobs = model(input_ids=one[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        parts.append(logprobs.gather(-1, one[1:, None])[:, 0])
    return parts


def gradients(model: nn.Module, logprobs: list[Tensor]) -> dict[str, Tensor]:
    flat = torch.cat(logprobs)
    model.zero_grad()
    flat.backward(torch.linspace(-1, 1, len(flat), dtype=flat.dtype))
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "activation-checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_separate_ones(family: str, checkpointing: bool) -> None:
    model = tiny(family, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0) if family == "gpt2" else tiny(family)
    plain = copy.deepcopy(model)
    scorer = adopt(model)
    assert scorer.segment_support == SegmentSupport(LAYERS, "", tree_refusal="", division_refusal="")
    if checkpointing:
        enable_activation_checkpointing(model, family)
        model.train()
    packed, separate = score(scorer, documents()), score_separately(plain, documents())
    for ours, theirs in zip(packed, separate, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    own, reference = gradients(model, packed), gradients(plain, separate)
    assert own.keys() == reference.keys()
    for name, gradient in own.items():
        assert (gradient - reference[name]).norm() <= 1e-5 * reference[name].norm(), name


def test_float64_is_exact_to_1e_12() -> None:
    """By GPT-2, whose norms compute in float64."""
    model = tiny("gpt2", dtype=torch.float64)
    plain = copy.deepcopy(model)
    for ours, theirs in zip(score(adopt(model), documents()), score_separately(plain, documents()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", DENSE)
def test_changing_one_document_leaves_the_others_bit_identical(family: str) -> None:
    scorer = adopt(tiny(family))
    with torch.no_grad():
        before = score(scorer, documents())
        for changed in range(len(LENGTHS)):
            others = documents()
            others[changed] = (others[changed] + 1) % VOCABULARY
            after = score(scorer, others)
            for number, (old, new) in enumerate(zip(before, after, strict=True)):
                if number != changed:
                    assert torch.equal(old, new), (changed, number)
            assert len(before[changed]) == 0 or not torch.equal(before[changed], after[changed])


def test_the_leak_would_be_seen() -> None:
    """The same comparison, over one segment that holds two documents."""
    scorer = adopt(tiny("llama"))
    others = documents()
    others[2] = (others[2] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = (score(scorer, chosen, (5, 1, 19, 30)) for chosen in (documents(), others))
    assert not torch.equal(before[3], after[3])
    assert torch.equal(before[4], after[4])


@pytest.mark.parametrize("family", FAMILIES)
def test_no_gradient_crosses_a_boundary(family: str) -> None:
    model = tiny(family)
    scorer = adopt(model)
    gradients: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        gradients.append(output.detach().requires_grad_())
        return gradients[0]

    model.get_input_embeddings().register_forward_hook(keep)
    packed = score(scorer, documents())
    for number, logprobs in enumerate(packed):
        if len(logprobs):
            (gradient,) = torch.autograd.grad(logprobs.sum(), gradients, retain_graph=True)
            for other, part in enumerate(gradient[0].split(LENGTHS)):
                assert part.any() == (other == number), (number, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_rows_stay_bit_identical(family: str) -> None:
    """A model that attends by segments still serves padded rows, through transformers' own attention, its windows and masks included.

    So it does where the host knows whether rows have padding, with padding and without.
    """
    model = tiny(family)
    plain = copy.deepcopy(model)
    scorer = adopt(model)
    ids, mask = torch.zeros(2, 30, dtype=torch.int64), torch.zeros(2, 30, dtype=torch.int64)
    ids[0], mask[0] = documents()[4], 1
    ids[1, 13:], mask[1, 13:] = documents()[2], 1
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    full = {name: tensor[:1] for name, tensor in inputs.items()}
    for rows, padded in ((inputs, True), (full, False)):
        with torch.no_grad():
            theirs = plain.get_decoder()(**rows, use_cache=False)[0]
            for known in (None, padded):
                ours = scorer._compute_hidden_states(rows, None, known)
                if family in WEIGHTED:
                    torch.testing.assert_close(
                        ours[rows["attention_mask"] == 1], theirs[rows["attention_mask"] == 1], rtol=0, atol=2e-6
                    )
                else:
                    assert torch.equal(ours, theirs), known


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("qwen3_next", {**EXPERTS, **LINEAR}, "1 of its 4 layers attend through"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "2 of its 4 layers attend through"),
        ("mamba", {"state_size": 4}, "knows no way to compute MambaForCausalLM's attention"),
        ("bloom", {"n_layer": 4, "n_head": 4, "hidden_size": 64}, "BloomForCausalLM computes its attention in code of its own"),
        ("stablelm", {}, "StableLmAttention does not hand on where the documents of a row end"),
    ],
)
def test_models_whose_attention_cannot_be_replaced_are_refused(family: str, options: dict[str, Any], reason: str) -> None:
    model = tiny(family, **options)
    plain = copy.deepcopy(model)
    scorer = adopt(model)
    assert scorer.segment_support.layers == 0
    with pytest.raises(UnsupportedError, match=rf"cannot be trained on packed rows: .*{reason}") as caught:
        score(scorer, documents())
    assert "padded" in caught.value.remedy
    ids = documents()[4][None]
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain(input_ids=ids, use_cache=False).logits)
    assert (
        scorer({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.arange(3), ids[0, 1:4])["logprobs"]
        .isfinite()
        .all()
    )


def see_the_neighbour(hidden: Tensor) -> Tensor:
    """Too little for a comparison of values to show, across every boundary."""
    return hidden + 1e-7 * hidden.roll(1, 1)


def count_through(hidden: Tensor) -> Tensor:
    """A place in the row instead of a place in the document."""
    return hidden + 0.1 * torch.arange(hidden.shape[1])[None, :, None]


@pytest.mark.parametrize(("spoil", "reason"), [(see_the_neighbour, "see each other"), (count_through, "differ from separate ones")])
def test_the_proof_at_load_finds_models_that_mix(spoil: Callable[[Tensor], Tensor], reason: str) -> None:
    model = tiny("llama")
    model.model.layers[-1].register_forward_hook(lambda _layer, _arguments, output: spoil(output))
    assert reason in adopt(model).segment_support.refusal
    assert model.config._attn_implementation == "sdpa"


def test_a_window_that_attention_never_hears_of_is_refused() -> None:
    model = tiny("qwen2")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert "2 of its layers attend in a sliding window, 0 of them" in adopt(model).segment_support.refusal


def test_a_pass_that_loses_a_layer_is_an_error() -> None:
    scorer = adopt(tiny("llama"))
    scorer.segment_support = SegmentSupport(LAYERS + 1, "")
    with pytest.raises(ModelError, match="4 of 5 layers"):
        score(scorer, documents())


def test_an_export_keeps_no_trace(tmp_path: Path) -> None:
    model = tiny("qwen3")
    model.save_pretrained(tmp_path / "before")
    loaded, scorer = load_scorer(ModelConfig(str(tmp_path / "before")))
    scorer.refuse_rows_unless_supported("packed")
    assert scorer.segment_support.layers == LAYERS
    assert loaded.config._attn_implementation == NAME
    loaded.save_pretrained(tmp_path / "after")
    assert NAME not in (tmp_path / "after" / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    ids = documents()[4][None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_announced_packed_rows_are_refused_at_load(tmp_path: Path) -> None:
    tiny("stablelm").save_pretrained(tmp_path)
    load_scorer(ModelConfig(str(tmp_path)))
    with pytest.raises(UnsupportedError, match="StableLmModel cannot be trained on packed rows"):
        load_scorer(ModelConfig(str(tmp_path)))[1].refuse_rows_unless_supported("packed")


def attend(*, tokens: int = 6, mask: Tensor | None = None, **options: Any) -> Tensor:
    """The attention function by itself: two heads of four."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, tokens, 4, generator=generator) for _ in range(3))
    return segment_attention(nn.Module(), query, key, value, mask, **options)[0]


def test_attention_without_segments_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Module does not hand on where the documents of a row end"):
        attend()


@pytest.mark.parametrize("name", ["position_bias", "never_seen_before"])
def test_what_packing_would_drop_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"attends with {name}, which packing would drop"):
        attend(segments=Segments((6,)), **{name: torch.ones(2)})
    attend(segments=Segments((6,)), **{name: None})


@pytest.mark.parametrize("window", [3, None])
def test_soft_caps_and_sinks_are_those_of_the_definition(window: int | None) -> None:
    """In float64, over documents and over a tree, whose runs see a path: a sink is one more score, of no value."""
    tokens, cap = 9, 0.3
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 2, tokens, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    # a segment of three tokens, two that follow it, and a document
    segments = Segments((3, 2, 2, 2), parents=(-1, 0, 0, -1))
    paths = ([0], [0, 1], [0, 2], [3])
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(segments.lengths))
    place = torch.tensor([0, 1, 2, 3, 4, 3, 4, 0, 1])
    distance = place[:, None] - place
    above = torch.tensor([[int(theirs) in paths[int(mine)] for theirs in owner] for mine in owner])
    seen = above & (distance >= 0) & (distance < (window or tokens))
    scores = (cap * torch.tanh(query @ key.transpose(2, 3) * 0.5 / cap)).masked_fill(~seen, float("-inf"))
    due = torch.cat([scores, sinks.view(1, 2, 1, 1).expand(1, 2, tokens, 1)], -1).softmax(-1)[..., :-1] @ value
    options = {"scaling": 0.5, "softcap": cap, "s_aux": sinks, "sliding_window": window}
    output = segment_attention(nn.Module(), query, key, value, None, segments=segments, **options)[0]
    torch.testing.assert_close(output, due.transpose(1, 2), rtol=0, atol=1e-12)


def test_attention_that_is_not_causal_is_refused() -> None:
    for options in ({"is_causal": False}, {"mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}):
        with pytest.raises(UnsupportedError, match="does not attend causally"):
            attend(segments=Segments((6,)), **options)


@pytest.mark.parametrize("window", [1, 2, 3, 6, 7, None])
def test_windows_are_counted_within_the_document(window: int | None) -> None:
    """Against the definition, softmax over an explicit mask."""
    tokens, lengths = 9, (2, 6, 1)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, tokens, 4, generator=generator) for _ in range(3))
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = (owner[:, None] == owner) & (distance >= 0) & (distance < (window or tokens))
    weights = (query @ key.transpose(2, 3) * 0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    segments = Segments(lengths)
    output = attend(tokens=tokens, segments=segments, sliding_window=window)
    torch.testing.assert_close(output, (weights @ value).transpose(1, 2), rtol=0, atol=1e-6)
    assert segments.windows == [window]


def test_whole_rows_need_the_mask_their_window_lives_in() -> None:
    attend(segments=WHOLE_ROWS, sliding_window=6)
    with pytest.raises(UnsupportedError, match="sliding window and got no mask"):
        attend(segments=WHOLE_ROWS, sliding_window=5)


def test_mask_patterns_that_attention_never_hears_of_are_refused() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=8)
    assert segment_mask(config=config, local_size=8) is None
    for options in ({"local_size": 4}, {"use_vmap": True}):
        with pytest.raises(UnsupportedError, match="neither causal nor a sliding window"):
            segment_mask(config=config, **options)
