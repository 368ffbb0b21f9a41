"""The generator `hf` by its contract, on tiny models of real architectures; refusals name what is wrong."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hf_requests import Weights, build_requests, finish_requests
from sampled_models import ARCHITECTURES, QUICK, READ_ANEW, write

from skyrl_engine import ContractError, ModelError, UnsupportedError
from skyrl_engine.contracts import POLICY, GenerationRequest, GeneratorStart, ModelConfig, Sampling
from skyrl_engine.modeling.loading import load_causal_lm
from skyrl_engine.modeling.tiny import write_tokenizer
from skyrl_engine_generators import loop
from skyrl_engine_generators.generator import HfGenerator
from skyrl_engine_generators.options import HfOptions
from skyrl_engine_generators.rows import CachedDecoder, UncachedDecoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("qwen3"), "qwen3")
    write_tokenizer(directory, ["some words to learn from, and more words to say"])
    return directory


@pytest.fixture(scope="module")
def model(folder):
    return load_causal_lm(ModelConfig(str(folder))).eval()


def start_generator(folder, model, *, form="tensors", slots=4, ends=(), version=0, cache_tokens=None, **settings):
    generator = HfGenerator(HfOptions(slots=slots, cache_tokens=cache_tokens))
    generator.start(GeneratorStart(ModelConfig(str(folder), **settings), "cpu", ends, Weights(model, form), version))
    return generator


@torch.no_grad()
def measure_gap(model, requests, done, temperature=1.0):
    """The largest distance in nats between log-probabilities of completions and those of the whole model."""
    gaps = []
    for request, completion in zip(requests, done, strict=True):
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0].double() / temperature
        first = len(request.prompt_ids)
        whole = logits[first - 1 : -1].log_softmax(-1).gather(1, ids[first:, None])[:, 0].numpy()
        gaps.append(np.abs(whole - completion.logprobs).max())
    return max(gaps)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in ARCHITECTURES]
)
def test_log_probabilities_are_the_models_own(family, tmp_path, caplog):
    """Rows are read again from their first token where a model caches more than keys and values, with a warning that names it."""
    write(tmp_path, family, **ARCHITECTURES[family])
    model = load_causal_lm(ModelConfig(str(tmp_path))).eval()
    with caplog.at_level(logging.WARNING):
        generator = start_generator(tmp_path, model)
    rows = generator._sets[POLICY].rows
    assert isinstance(rows, UncachedDecoder if family in READ_ANEW else CachedDecoder)
    assert ("is sampled without a cache" in caplog.text) == (family in READ_ANEW)
    requests = build_requests(9, ignore_eos=True)
    assert measure_gap(model, requests, finish_requests(generator, requests)) < 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_the_same_in_any_company(folder, model, temperature):
    requests = build_requests(12, temperature=temperature)
    together = finish_requests(start_generator(folder, model, slots=16), requests)
    assert measure_gap(model, requests, together, temperature) < 1e-4
    few = finish_requests(start_generator(folder, model, slots=3), requests[::-1])[::-1]
    alone = start_generator(folder, model, slots=1)
    for request, here, there in zip(requests, together, few, strict=True):
        assert here.token_ids.tolist() == there.token_ids.tolist() == finish_requests(alone, [request])[0].token_ids.tolist()


def test_a_shared_prefix_changes_nothing(folder, model):
    prompt = np.arange(30, dtype=np.int32)
    separate = [GenerationRequest(number, prompt, Sampling(max_tokens=2 + number % 7), seed=number) for number in range(20)]
    grouped = [
        GenerationRequest(request.request_id, prompt, request.sampling, request.seed, prefix_group=0) for request in separate
    ]
    apart, together = (finish_requests(start_generator(folder, model, slots=6), requests) for requests in (separate, grouped))
    assert [completion.token_ids.tolist() for completion in apart] == [completion.token_ids.tolist() for completion in together]
    assert measure_gap(model, grouped, together) < 1e-4


def test_shared_memory_sees_every_change_and_a_copy_only_what_it_is_given(folder):
    model = load_causal_lm(ModelConfig(str(folder))).eval()
    sharing, copying = (start_generator(folder, model, form=form) for form in ("module", "tensors"))
    weights = sharing._sets[POLICY].model.get_input_embeddings().weight
    assert weights.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    requests = build_requests(4, ignore_eos=True)
    before = finish_requests(copying, requests)
    assert [completion.token_ids.tolist() for completion in finish_requests(sharing, requests)] == [
        completion.token_ids.tolist() for completion in before
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    sharing.update(Weights(model, "module"), 1)
    assert measure_gap(model, requests, after := finish_requests(sharing, requests)) < 1e-4
    assert [completion.versions.versions.tolist() for completion in after] == [[1]] * 4
    assert [completion.logprobs.tolist() for completion in finish_requests(copying, requests)] == [
        completion.logprobs.tolist() for completion in before
    ]
    copying.update(Weights(model), 1)
    assert measure_gap(model, requests, finish_requests(copying, requests)) < 1e-4


def test_weights_under_another_name_stay_what_they_were(folder):
    model = load_causal_lm(ModelConfig(str(folder))).eval()
    generator = start_generator(folder, model, form="module")
    generator.update(Weights(model), 0, "reference")
    requests = build_requests(3, ignore_eos=True)
    first = finish_requests(generator, requests)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)
    generator.update(Weights(model, "module"), 1)
    now = finish_requests(generator, requests)
    frozen = finish_requests(generator, [evolve(request, target="reference") for request in requests])
    assert [completion.token_ids.tolist() for completion in frozen] == [completion.token_ids.tolist() for completion in first]
    assert [completion.versions.versions.tolist() for completion in frozen] == [[0]] * 3
    assert [completion.logprobs.tolist() for completion in now] != [completion.logprobs.tolist() for completion in first]
    generator.release("reference")
    with pytest.raises(ContractError, match="asks for the weights 'reference', which nobody gave"):
        generator.submit([GenerationRequest(9, requests[0].prompt_ids, requests[0].sampling, 0, target="reference")])
    with pytest.raises(UnsupportedError, match="are those that are trained"):
        generator.release(POLICY)


def test_an_update_while_sampling_goes_on_with_the_new_weights(folder):
    model = load_causal_lm(ModelConfig(str(folder))).eval()
    generator = start_generator(folder, model)
    request = GenerationRequest(0, np.array([5, 6, 7], dtype=np.int32), Sampling(max_tokens=8, ignore_eos=True), seed=3)
    (undisturbed,) = finish_requests(generator, [request])
    generator.submit([request])
    for _ in range(3):
        assert generator.poll(0.0) == []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    generator.update(Weights(model), 7)
    (done,) = generator.poll(10.0)
    assert done.versions.per_token(8).tolist() == [0] * 3 + [7] * 5
    assert done.token_ids[:3].tolist() == undisturbed.token_ids[:3].tolist()
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, done.token_ids]).astype(np.int64))
    with torch.no_grad():
        whole = model(input_ids=ids[None]).logits[0].log_softmax(-1)[2:-1].gather(1, ids[3:, None])[:, 0].numpy()
    assert np.abs(whole[3:] - done.logprobs[3:]).max() < 1e-4
    assert np.abs(whole[:3] - done.logprobs[:3]).max() > 1e-3


def test_scores_of_prompts_and_of_the_most_likely_tokens(folder, model, monkeypatch):
    monkeypatch.setattr(loop, "LOGITS_AT_ONCE", 2 * model.config.vocab_size)  # two places of the prompt at once
    ids = np.array([3, 9, 27, 81], dtype=np.int32)
    sampling = Sampling(max_tokens=3, temperature=0.5, ignore_eos=True)
    request = GenerationRequest(0, ids, sampling, 0, prompt_logprobs=True, top_logprobs=5, top_prompt_logprobs=2, prefix_group=1)
    neither = GenerationRequest(1, ids, sampling, 0, prefix_group=1)
    ranked = GenerationRequest(2, ids, sampling, 0, top_prompt_logprobs=100, prefix_group=1)
    done, plain, alone = finish_requests(start_generator(folder, model), [request, neither, ranked])
    assert plain.prompt_logprobs is None
    assert plain.top_prompt_logprobs is None
    assert alone.prompt_logprobs is None
    assert alone.top_prompt_logprobs.token_ids.shape == (4, 100)
    whole = torch.from_numpy(np.concatenate([ids, done.token_ids]).astype(np.int64))
    with torch.no_grad():
        scores = (model(input_ids=whole[None]).logits[0].double() / 0.5).log_softmax(-1)
    assert np.isnan(done.prompt_logprobs[0])
    np.testing.assert_allclose(done.prompt_logprobs[1:], scores[:3].gather(1, whole[1:4, None])[:, 0], atol=1e-4)
    top_logprobs = done.top_prompt_logprobs
    assert top_logprobs.token_ids[0].tolist() == [0, 0]
    assert np.isnan(top_logprobs.logprobs[0]).all()
    most = scores[:3].topk(2)
    np.testing.assert_allclose(top_logprobs.logprobs[1:], most.values, atol=1e-4)
    assert top_logprobs.token_ids[1:].tolist() == most.indices.tolist()
    most = scores[3:6].topk(5)
    np.testing.assert_allclose(done.top_logprobs.logprobs, most.values, atol=1e-4)
    assert done.top_logprobs.token_ids.tolist() == most.indices.tolist()


@pytest.mark.parametrize("fields", [{"top_logprobs": 1000}, {"top_prompt_logprobs": 1000}])
def test_more_most_likely_tokens_than_there_are_is_refused(folder, model, fields):
    request = GenerationRequest(0, np.array([3], dtype=np.int32), Sampling(max_tokens=1), 0, **fields)
    with pytest.raises(ContractError, match="the 1000 most likely tokens of a vocabulary of 128"):
        start_generator(folder, model).submit([request])


def test_stop_strings_are_found_in_the_text_as_it_is_decoded(folder, model):
    from skyrl_engine.model_facts.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(str(folder)))
    # the tokenizer's vocabulary is smaller than the model's, so that some tokens are no text
    request = GenerationRequest(0, np.array([7], dtype=np.int32), Sampling(max_tokens=60, ignore_eos=True), seed=5)
    generator = start_generator(folder, model)
    (free,) = finish_requests(generator, [request])
    text = tokenizer.decode(free.token_ids, skip_special_tokens=True)
    string = text[len(text) // 2 : len(text) // 2 + 3]
    sampling = Sampling(max_tokens=60, ignore_eos=True, stop_strings=("never said", string))
    (done,) = finish_requests(generator, [GenerationRequest(0, request.prompt_ids, sampling, seed=5)])
    assert (done.finish, done.stop) == ("stop", string)
    assert done.token_ids.tolist() == free.token_ids[: len(done.token_ids)].tolist()
    assert string in tokenizer.decode(done.token_ids, skip_special_tokens=True)
    assert string not in tokenizer.decode(done.token_ids[:-1], skip_special_tokens=True)


def test_several_end_tokens_count(folder, model):
    ends = tuple(range(0, 128, 4))
    requests = build_requests(8, max_tokens=30)
    for completion in finish_requests(start_generator(folder, model, ends=ends), requests):
        assert completion.finish == "stop"
        assert completion.stop == completion.token_ids[-1]
        assert completion.token_ids[-1] in ends
        assert not set(completion.token_ids[:-1].tolist()) & set(ends)


def test_a_prompt_without_room_fails_alone(folder, model):
    long = GenerationRequest(0, np.zeros(155, dtype=np.int32), Sampling(max_tokens=6), seed=0)
    fits = GenerationRequest(1, np.zeros(154, dtype=np.int32), Sampling(max_tokens=6, ignore_eos=True), seed=0)
    failed, done = finish_requests(start_generator(folder, model), [long, fits])
    assert (failed.finish, len(failed.token_ids)) == ("error", 0)
    assert f"a prompt of 155 tokens leaves no room for 6 more: {folder} takes 160" in failed.error
    assert (done.finish, len(done.token_ids)) == ("length", 6)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1, 128], "has the token 128 at place 1, outside of the vocabulary of 128"),
        ([-1], "has the token -1 at place 0"),
        ([], "has no prompt"),
    ],
)
def test_prompts_that_no_model_reads_are_refused_before_anything_is_taken(folder, model, prompt, words):
    generator = start_generator(folder, model)
    wrong = GenerationRequest(1, np.array(prompt, dtype=np.int32), Sampling(max_tokens=2), seed=0)
    with pytest.raises(ContractError, match=words):
        generator.submit([*build_requests(1), wrong])
    assert generator.poll(0.0) == []
    assert len(finish_requests(generator, build_requests(1))) == 1


def test_ids_under_way_are_not_given_again(folder, model):
    generator = start_generator(folder, model)
    generator.submit(build_requests(1, max_tokens=5, ignore_eos=True))
    with pytest.raises(ContractError, match="request 0 is under way already"):
        generator.submit(build_requests(1))
    with pytest.raises(ContractError, match="two requests have one request_id"):
        generator.submit([*build_requests(1, first=5), *build_requests(1, first=5)])


def test_weights_that_do_not_fit_change_nothing(folder, model):
    generator = start_generator(folder, model)
    requests = build_requests(3, ignore_eos=True)
    before = finish_requests(generator, requests)

    class Other(Weights):
        def __init__(self, change):
            super().__init__(model)
            self._change = change

        def tensors(self):
            return iter(self._change([(name, tensor * 2) for name, tensor in super().tensors()]))

    for change, words in (
        (lambda weights: weights[1:], "embed_tokens.weight is not among the weights"),
        (lambda weights: [*weights, ("model.other", torch.zeros(2))], "model.other has no place, or one of another shape"),
        (lambda weights: [(name, tensor[:1]) for name, tensor in weights], "has no place, or one of another shape"),
    ):
        with pytest.raises(ModelError, match=words):
            generator.update(Other(change), 1)
    after = finish_requests(generator, requests)
    assert [completion.logprobs.tolist() for completion in after] == [completion.logprobs.tolist() for completion in before]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_precisions(folder, dtype, caplog):
    model = load_causal_lm(ModelConfig(str(folder), dtype=dtype)).eval()
    with caplog.at_level(logging.WARNING):
        generator = start_generator(folder, model, dtype=dtype)
    assert "without a cache" not in caplog.text
    requests = build_requests(6, ignore_eos=True)
    done = finish_requests(generator, requests)
    assert measure_gap(model, requests, done) < (1e-6 if dtype == "float64" else 0.5)


def test_a_model_whose_cached_rows_are_wrong_is_sampled_by_reading_rows_anew(folder, model, monkeypatch, caplog):
    """Were the mask of a step wrong for some architecture, the start would say so; and the samples are right all the same."""
    from skyrl_engine_generators import rows

    def sees_too_much(config, kinds, places, end, dtype):
        return torch.ones(len(places), 1, places.shape[1], end, dtype=torch.bool)

    monkeypatch.setattr(rows, "make_masks", sees_too_much)
    with caplog.at_level(logging.WARNING):
        generator = start_generator(folder, model)
    assert "Qwen3ForCausalLM) is sampled without a cache" in caplog.text
    assert "nats off" in caplog.text
    requests = build_requests(6, ignore_eos=True)
    assert measure_gap(model, requests, finish_requests(generator, requests)) < 1e-4


def test_a_model_that_no_rows_are_right_for_is_refused(folder, model, monkeypatch):
    from skyrl_engine_generators import rows

    monkeypatch.setattr(rows._Model, "logits", lambda self, hidden: self._parts.head(hidden) * 1.5)
    with pytest.raises(UnsupportedError, match=r"Qwen3ForCausalLM\) cannot be sampled from: log-probabilities of its rows are"):
        start_generator(folder, model)


def test_memory_of_a_device_is_freed_between_rollouts(folder, model):
    generator = start_generator(folder, model)
    rows = generator._sets[POLICY].rows
    finish_requests(generator, build_requests(3))
    assert rows.room.capacity
    rows._frees = True
    finish_requests(generator, build_requests(3))
    assert rows.room.capacity == 0
    requests = build_requests(6, ignore_eos=True)
    assert measure_gap(model, requests, finish_requests(generator, requests)) < 1e-4


def test_weight_sets_share_one_budget_and_give_it_back(folder, model):
    generator = start_generator(folder, model, cache_tokens=2048)
    budget = generator._budget
    generator.update(Weights(model), 1, "other")
    requests = [
        evolve(request, session=number, target=(POLICY, "other")[number % 2])
        for number, request in enumerate(build_requests(6, ignore_eos=True))
    ]
    finish_requests(generator, requests)
    assert budget.used <= 2048
    lengths = [len(request.prompt_ids) + request.sampling.max_tokens - 1 for request in requests]
    assert budget.kept_tokens == sum(lengths)
    generator.end_sessions([0, 1, 99])
    assert budget.kept_tokens == sum(lengths[2:])
    generator.update(Weights(model), 2)
    assert budget.kept_tokens == lengths[3] + lengths[5]
    generator.release("other")
    assert budget.kept_tokens == 0
    with pytest.raises(ModelError):
        generator.update(Weights(torch.nn.Linear(2, 2)), 3, "third")
    assert len(budget.rooms) == 1, "a set that was never there holds nothing"
    generator.close()


def test_a_request_that_the_budget_cannot_hold_fails_alone(folder, model):
    generator = start_generator(folder, model, cache_tokens=24)
    fits = GenerationRequest(0, np.arange(20, dtype=np.int32), Sampling(max_tokens=4, ignore_eos=True), 0)
    long = evolve(fits, request_id=1, sampling=Sampling(max_tokens=5, ignore_eos=True))
    done = finish_requests(generator, [fits, long])
    assert [each.finish for each in done] == ["length", "error"]
    assert "25 tokens, and generator.cache_tokens is 24" in done[1].error


def test_an_abort_returns_a_beginning_of_what_would_have_come(folder, model):
    generator = start_generator(folder, model, slots=3)
    requests = build_requests(5, max_tokens=20, ignore_eos=True)
    whole = finish_requests(generator, requests)
    generator.submit(requests)
    for _ in range(4):
        generator.poll(0.0)
    generator.abort([0, 4, 77])
    came = {completion.request_id: completion for _ in range(2) for completion in generator.poll(10.0)}
    generator.abort()
    came |= {completion.request_id: completion for completion in generator.poll(10.0)}
    while len(came) < 5:
        came |= {completion.request_id: completion for completion in generator.poll(10.0)}
    assert came[0].finish == came[4].finish == "abort"
    assert 0 < len(came[0].token_ids) < 20
    for completion, full in zip((came[number] for number in range(5)), whole, strict=True):
        assert completion.token_ids.tolist() == full.token_ids[: len(completion.token_ids)].tolist()
        np.testing.assert_allclose(completion.logprobs, full.logprobs[: len(completion.token_ids)], atol=1e-5)


def test_close_forgets_what_is_under_way(folder, model):
    generator = start_generator(folder, model)
    generator.submit(build_requests(5))
    generator.close()
    assert generator.poll(0.0) == []


def test_global_states_are_left_alone(folder, model):
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    finish_requests(start_generator(folder, model, form="module"), build_requests(3))
    finish_requests(start_generator(folder, model), build_requests(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert Path(folder).is_dir()
