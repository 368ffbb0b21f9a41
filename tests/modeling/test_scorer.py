"""The scorer equals whole logits and log_softmax, values and gradients, for every way models treat their logits."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_engine.contracts.kinds.needs import LOGPROBS_AT
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.causal_lm import LogitRule, split_causal_lm, transformer_layers
from skyrl_engine.modeling.chunked_head import VOCABULARY_SCORES, ChunkedHead, RequestedScores, Score, compute_chunked_scores
from skyrl_engine.modeling.parity import check_parity
from skyrl_engine.modeling.scorer import Scorer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"sliding_window": 4},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "phi": {},
}
VOCABULARY = 97
BOTH = ("logprobs", "entropy")
EVERY_SCORE = (*VOCABULARY_SCORES, LOGPROBS_AT)


def tiny(family: str, *, attention: str | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    own = FAMILIES[family]
    sizes = {} if family == "gpt2" else SIZES
    config = AutoConfig.for_model(family, **{**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **own, **options})
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, 0)
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # torch's grouped product knows no float64
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention, **experts).eval()


def whole_logits(model: Any, ids: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: log-probabilities and entropies [rows * (width - 1)]."""
    logprobs = (model(input_ids=ids, use_cache=False).logits[:, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[:, 1:, None]).flatten(), -(logprobs.exp() * logprobs).sum(-1).flatten()


def everywhere(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = ids.shape
    return (torch.arange(rows)[:, None] * width + torch.arange(width - 1)).flatten(), ids[:, 1:].flatten()


def gradients(model: Any, logprobs: torch.Tensor, entropy: torch.Tensor) -> dict[str, torch.Tensor]:
    upstream = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    model.zero_grad()
    ((upstream * logprobs).sum() + (upstream.flip(0) * entropy).sum()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Per parameter, relative to its own norm and, where that is next to nothing, to the largest: gpt_neox's key bias has gradient 0."""
    assert actual.keys() == expected.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= tolerance * max(gradient.norm(), 1e-3 * largest), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [VOCABULARY * 3, 10**9], ids=["chunks", "one-chunk"])
def test_values_and_gradients_equal_whole_logits(family: str, chunk: int) -> None:
    """In float64, where differences of summation order end at 1e-12 and the float32 parts inside some models at 1e-7."""
    model = tiny(family, dtype=torch.float64)
    ids = torch.randint(1, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(2))
    expected = whole_logits(model, ids)
    reference = gradients(model, *expected)
    scorer = Scorer(split_causal_lm(model), logits_per_chunk=chunk)
    scores = scorer({"input_ids": ids}, *everywhere(ids), needs=BOTH)
    torch.testing.assert_close(scores["logprobs"], expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(scores["entropy"], expected[1], rtol=1e-9, atol=1e-9)
    compare(gradients(model, scores["logprobs"], scores["entropy"]), reference, 1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_the_check_at_load(family: str) -> None:
    model = tiny(family)
    check_parity(model, Scorer(split_causal_lm(model), logits_per_chunk=VOCABULARY), name=family)
    assert len(transformer_layers(split_causal_lm(model).decoder)) == 2


def test_temperature_divides_logits_after_the_models_own_rule() -> None:
    model = tiny("gemma2", dtype=torch.float64)
    ids = torch.randint(1, VOCABULARY, (1, 9))
    scores = Scorer(split_causal_lm(model), logits_per_chunk=200)({"input_ids": ids}, *everywhere(ids), temperature=0.5, needs=BOTH)
    for actual, expected in zip(scores.values(), whole_logits(model, ids, 0.5), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.25), LogitRule(softcap=0.5)], ids=["plain", "scale", "soft-cap"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("weighted", [*([name] for name in EVERY_SCORE), EVERY_SCORE], ids="+".join)
def test_gradients_of_scores_are_autograds_under_every_rule_and_temperature(
    rule: LogitRule, temperature: float, weighted: list[str]
) -> None:
    """Also when nothing is computed from some score, as from an entropy that is a metric alone; one chunk is kept, four are computed again."""
    draw = torch.Generator().manual_seed(0)
    raw = (torch.randn(11, VOCABULARY, generator=draw, dtype=torch.float64) * 3).requires_grad_()
    tokens = torch.randint(0, VOCABULARY, (11, 4), generator=draw)
    tokens[:5, 1], tokens[:3, 2] = tokens[:5, 0], tokens[:3, 3]  # a candidate may be the label, or occur twice
    score = Score(rule, temperature, EVERY_SCORE)
    upstream = [torch.randn(score_values.shape, generator=draw, dtype=torch.float64) for score_values in score(raw, tokens)]

    def gradient(scores: tuple[torch.Tensor, ...]) -> torch.Tensor:
        of = {name: (values, up) for name, values, up in zip(EVERY_SCORE, scores, upstream, strict=True)}
        return torch.autograd.grad([of[name][0] for name in weighted], raw, [of[name][1] for name in weighted])[0]

    expected = gradient(score(raw, tokens))
    for chunk in (3, 11):
        scores = compute_chunked_scores(raw, torch.eye(VOCABULARY).double(), None, tokens, score, chunk)
        torch.testing.assert_close(gradient(scores), expected)


def test_scores_are_those_of_whole_logits() -> None:
    """By definition, of logits that a temperature divided; candidates of two columns come back under their needs."""
    draw = torch.Generator().manual_seed(0)
    raw = torch.randn(5, VOCABULARY, generator=draw, dtype=torch.float64) * 3
    labels = torch.randint(0, VOCABULARY, (5,), generator=draw)
    candidates = {"one": torch.randint(0, VOCABULARY, (5, 1), generator=draw), "three": torch.randint(0, VOCABULARY, (5, 3))}
    requested = RequestedScores.of({*VOCABULARY_SCORES, "values", "logprobs_at:three", "logprobs_at:one"}, labels, candidates)
    got = requested.name_values(Score(LogitRule(), 0.5, requested.scores)(raw, requested.tokens))
    logits = raw / 0.5
    logprobs = logits.log_softmax(-1)
    expected = {
        "logprobs": logprobs[torch.arange(5), labels],
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "logits": logits[torch.arange(5), labels],
        "logsumexp": logits.exp().sum(-1).log(),
        "mean_logprob": logprobs.mean(-1),
        "log_sum_squares": (logprobs.exp() ** 2).sum(-1).log(),
        "logprobs_at:one": logprobs.gather(-1, candidates["one"]),
        "logprobs_at:three": logprobs.gather(-1, candidates["three"]),
    }
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(got[name], wanted)


def test_the_rules_of_the_families_matter() -> None:
    """Were the rule ignored, the test above would fail: it changes the values by far more than the tolerance."""
    for family in ("gemma2", "cohere", "granite"):
        model = tiny(family)
        parts = split_causal_lm(model)
        ignoring = Scorer(type(parts)(parts.decoder, parts.head, type(parts.rule)()), logits_per_chunk=10**6)
        with pytest.raises(ModelError, match=f"a {family} .*differ from its decoder and head"):
            check_parity(model, ignoring, name=f"a {family}")


def test_logits_treated_in_an_unknown_way_are_refused() -> None:
    model = tiny("llama")
    scorer = Scorer(split_causal_lm(model), logits_per_chunk=10**6)
    model.register_forward_hook(lambda *call: type(call[2])(logits=call[2].logits * 1.01))
    with pytest.raises(ModelError, match=r"tests/model \(LlamaForCausalLM\) computes logits that differ"):
        check_parity(model, scorer, name="tests/model")
    assert not model.training


def test_no_scored_position_still_runs_the_head() -> None:
    model = tiny("llama")
    none = torch.zeros(0, dtype=torch.int64)
    scores = Scorer(split_causal_lm(model), logits_per_chunk=VOCABULARY)(
        {"input_ids": torch.ones(1, 4, dtype=torch.int64)}, none, none
    )
    assert scores.keys() == {"logprobs"}
    assert scores["logprobs"].shape == (0,)
    scores["logprobs"].sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, kind) for family in ("llama", "qwen3", "mistral", "phi3") for kind in ("sdpa", "eager")), ("gemma2", "eager")],
)
def test_left_padding_and_empty_rows_change_nothing_and_are_finite(family: str, attention: str) -> None:
    """Row 1 is padding alone; row 0 scores as it does without padding. 1e-5: other kernels under a mask."""
    model = tiny(family, attention=attention)
    ids = torch.zeros(3, 9, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    ids[0, 4:], mask[0, 4:] = torch.arange(11, 16), 1
    ids[2], mask[2] = torch.arange(31, 40), 1
    positions, labels = torch.arange(4, 8), ids[0, 5:]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    scorer = Scorer(split_causal_lm(model), logits_per_chunk=VOCABULARY)
    padded = gradients(model, *(scores := scorer(inputs, positions, labels, needs=BOTH)).values())
    alone = {"input_ids": ids[:1, 4:]}
    plain_scores = scorer(alone, torch.arange(4), labels, needs=BOTH)
    plain = gradients(model, *plain_scores.values())
    for name, values in scores.items():
        assert torch.isfinite(values).all()
        torch.testing.assert_close(values, plain_scores[name], rtol=1e-5, atol=1e-5)
    assert all(torch.isfinite(gradient).all() for gradient in padded.values())
    compare(padded, plain, 1e-4)


def test_the_heads_bias_and_a_frozen_weight_get_what_they_should() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, VOCABULARY).double()
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (11,))

    def reference() -> list[torch.Tensor | None]:
        linear(hidden).log_softmax(-1).gather(-1, labels[:, None]).sum().backward()
        return [hidden.grad, linear.weight.grad, linear.bias.grad]

    def chunked() -> list[torch.Tensor | None]:
        ChunkedHead(linear, LogitRule(), 4 * VOCABULARY)(hidden, labels[:, None], 1.0, ("logprobs",))[0].sum().backward()
        return [hidden.grad, linear.weight.grad, linear.bias.grad]

    results = []
    for frozen in (False, True):
        linear.weight.requires_grad_(not frozen)
        for scorer in (reference, chunked):
            hidden.grad = linear.weight.grad = linear.bias.grad = None
            results.append(scorer())
    for expected, actual in (results[:2], results[2:]):
        for one, other in zip(expected, actual, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(other, one)


def test_a_bfloat16_weights_gradient_is_summed_in_float32() -> None:
    """512 chunks of one position: summed in bfloat16 the error would be tens of percent; rounding the end result alone gives 4e-3."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, VOCABULARY, bias=False).bfloat16()
    hidden, labels = torch.rand(512, 8).bfloat16(), torch.zeros(512, dtype=torch.int64)

    def gradient(elements: int) -> torch.Tensor:
        linear.weight.grad = None
        ChunkedHead(linear, LogitRule(), elements)(hidden, labels[:, None], 1.0, ("logprobs",))[0].sum().backward()
        assert linear.weight.grad is not None
        return linear.weight.grad.float()

    exact = torch.nn.Linear(8, VOCABULARY, bias=False)
    exact.weight.data = linear.weight.data.float()
    exact(hidden.float()).log_softmax(-1).gather(-1, labels[:, None]).sum().backward()
    assert exact.weight.grad is not None
    assert (gradient(VOCABULARY) - exact.weight.grad).norm() / exact.weight.grad.norm() < 8e-3


def test_models_without_a_telling_head_are_refused() -> None:
    model = tiny("llama")
    model.get_output_embeddings = lambda: None
    with pytest.raises(ModelError, match="does not say where its linear language-model head is"):
        split_causal_lm(model)
    model = tiny("llama")
    model.get_decoder = lambda: model
    with pytest.raises(ModelError, match="does not separate its decoder"):
        split_causal_lm(model)
