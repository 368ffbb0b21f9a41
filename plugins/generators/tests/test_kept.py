"""Kept keys and values change no bit of a dialogue: with them, without them, after others took their memory, alone and beside others."""

from weakref import ref

import numpy as np
import pytest
import torch
from attrs import evolve
from by_day import now
from sampled_models import ARCHITECTURES, READ_ANEW, write
from transformers import AutoModelForCausalLM

from skyrl_engine.contracts import POLICY, GenerationRequest, Sampling
from skyrl_engine_generators import rows as rows_module
from skyrl_engine_generators.keeping_proof import prove_keeping
from skyrl_engine_generators.kept import CacheBudget, KeptRow, count_common
from skyrl_engine_generators.loop import SlotLoop
from skyrl_engine_generators.rows import CachedDecoder
from skyrl_engine_generators.sampled_row import SampledRow
from skyrl_engine_generators.slots import KeptPiece
from skyrl_engine_generators.stops import StopRule

PROMPTS = (3, 40, 40, 17, 129, 64)
"""Tokens of first prompts; the second and the third are a group's."""

TURNS = 4
KEEPING = [family for family in ARCHITECTURES if family not in READ_ANEW]


def family_of(tmp_path, family):
    settings = {**ARCHITECTURES[family], "max_position_embeddings": 1024}
    if "n_positions" in settings:
        settings["n_positions"] = 1024
    return AutoModelForCausalLM.from_pretrained(write(tmp_path, family, **settings)).eval()


class Dialogues:
    """Dialogues whose observations are drawn from their numbers.

    `read` counts the prompt tokens that were read, `reused` those that need not be.
    """

    def __init__(self, model, *, keeps, slots=4, tokens=2**20, budget=None, target=POLICY):
        keeping = prove_keeping(model, None)
        self.budget = budget or CacheBudget(tokens)
        room = self.budget.open_room()
        self.rows = CachedDecoder(model, slots, room)
        self.rows.keeps, self.rows.keeps_sampled = keeping.keeps and keeps, keeping.keeps_sampled
        self.loop = SlotLoop(self.rows, slots, budget=self.budget, room=room, target=target)
        self.read, self._read = 0, self.rows.read
        self.reused = self.most_held = 0
        self.rows.read = self._count

    def _count(self, slots, rows, starts):
        self.read += sum(len(row) - start for row, start in zip(rows, starts, strict=True))
        self.reused += sum(starts)
        return self._read(slots, rows, starts)

    def add(self, requests):
        for request in requests:
            rule = StopRule(frozenset(), (), 0, request.sampling.max_tokens, None)
            self.loop.add(SampledRow(request, rule, request.prompt_ids.astype(np.int64)))

    @torch.inference_mode()
    def sample(self, requests):
        self.add(requests)
        done = {}
        while len(self.loop):
            done |= {completion.request_id: completion for completion in self.loop.step()}
            self.most_held = max(self.most_held, self.budget.used)
        return [done[request.request_id] for request in requests]


def first_turns():
    requests = []
    for number, length in enumerate(PROMPTS):
        group = 1 if number in (1, 2) else None
        prompt = np.random.default_rng(length).integers(0, 128, length).astype(np.int32)
        sampling = Sampling(max_tokens=3 + 5 * number % 9, ignore_eos=True, temperature=(1.0, 0.7)[number % 2])
        requests.append(GenerationRequest(number, prompt, sampling, seed=number, session=number, prefix_group=group))
    return requests


def next_turn(request, done):
    observed = np.random.default_rng([request.session, len(request.prompt_ids)]).integers(0, 128, 1 + request.session * 7)
    prompt = np.concatenate([request.prompt_ids, done.token_ids, observed]).astype(np.int32)
    return evolve(request, request_id=request.request_id + 100, seed=request.seed + 1000, prompt_ids=prompt)


def converse(dialogues, requests, *, apart=False, before_turn=lambda _dialogues: None):
    """Bytes of every turn of each dialogue, all at once or one after the other."""
    said = {request.session: [] for request in requests}
    for first in [[request] for request in requests] if apart else [requests]:
        part = first
        for _ in range(TURNS):
            before_turn(dialogues)
            done = dialogues.sample(part)
            for request, completion in zip(part, done, strict=True):
                said[request.session].append((completion.token_ids.tobytes(), completion.logprobs.tobytes()))
            part = [next_turn(request, completion) for request, completion in zip(part, done, strict=True)]
    return said


@pytest.mark.parametrize("family", now(KEEPING, "qwen3"))
def test_what_is_kept_changes_no_bit(family, tmp_path):
    model, requests = family_of(tmp_path, family), first_turns()
    nothing = Dialogues(model, keeps=False, slots=1)
    due = converse(nothing, requests, apart=True)
    kept = Dialogues(model, keeps=True)
    assert converse(kept, requests) == due
    assert kept.read < 0.6 * nothing.read
    alone = Dialogues(model, keeps=True, slots=1)
    assert converse(alone, requests, apart=True) == due
    # two of the six histories fit beside the rows that are sampled
    few = Dialogues(model, keeps=True, slots=2, tokens=1200)
    assert converse(few, requests) == due
    assert kept.read < few.read < nothing.read
    assert few.most_held <= 1200
    last_first = Dialogues(model, keeps=True, slots=3)
    assert converse(last_first, requests[::-1]) == due

    def drop(dialogues):
        dialogues.budget.drop_target(POLICY)

    resumed = Dialogues(model, keeps=True)
    assert converse(resumed, requests, before_turn=drop) == due


@pytest.mark.nightly
@pytest.mark.parametrize("threads", [2, 5])
def test_what_is_kept_changes_no_bit_in_several_threads(threads, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model, requests = family_of(tmp_path, "qwen3"), first_turns()
        due = converse(Dialogues(model, keeps=False, slots=1), requests, apart=True)
        assert converse(Dialogues(model, keeps=True), requests) == due
    finally:
        torch.set_num_threads(before)


@pytest.mark.nightly
def test_long_prompts_are_read_in_several_passes(tmp_path, monkeypatch):
    model, requests = family_of(tmp_path, "gemma3_text"), first_turns()
    due = converse(Dialogues(model, keeps=False, slots=1), requests, apart=True)
    monkeypatch.setattr(rows_module, "MASK_ELEMENTS", 128 * 24)
    assert converse(Dialogues(model, keeps=True), requests) == due


def test_a_group_reads_what_it_has_alike_once_in_later_turns_too(tmp_path):
    """After an update nothing is kept, and the histories of a group begin alike."""
    model = family_of(tmp_path, "qwen3")
    prompt = np.arange(100, dtype=np.int32)
    sampling = Sampling(max_tokens=5, ignore_eos=True)
    requests = [GenerationRequest(n, prompt, sampling, seed=n, session=n, prefix_group=7) for n in range(4)]
    due = converse(Dialogues(model, keeps=False, slots=1), requests, apart=True)
    dialogues = Dialogues(model, keeps=True, slots=4)
    assert converse(dialogues, requests, before_turn=lambda each: each.loop.update(1)) == due
    histories = 4 * sum(100 + turn * 5 for turn in range(1, TURNS)) + sum(1 + 7 * n for n in range(4)) * 6
    assert dialogues.read == 100 + histories - 3 * 100 * (TURNS - 1)


def test_a_session_whose_history_was_rewritten_goes_on_from_what_did_not_change(tmp_path):
    model = family_of(tmp_path, "qwen3")
    (first,) = (request for request in first_turns() if request.session == 4)
    dialogues = Dialogues(model, keeps=True)
    (done,) = dialogues.sample([first])
    later = next_turn(first, done)
    later.prompt_ids[90] ^= 1
    before = dialogues.read
    (got,) = dialogues.sample([later])
    assert dialogues.read - before == len(later.prompt_ids) - 90
    (due,) = Dialogues(model, keeps=False).sample([later])
    assert got.logprobs.tobytes() == due.logprobs.tobytes()


def test_scores_of_a_prompt_are_those_of_a_prompt_that_nobody_kept(tmp_path):
    model = family_of(tmp_path, "qwen3")
    dialogues = Dialogues(model, keeps=True)
    (first,) = (request for request in first_turns() if request.session == 4)
    (done,) = dialogues.sample([first])
    later = evolve(next_turn(first, done), prompt_logprobs=True)
    (got,), (due,) = dialogues.sample([later]), Dialogues(model, keeps=False).sample([later])
    assert got.prompt_logprobs.tobytes() == due.prompt_logprobs.tobytes()


def test_an_update_drops_what_was_kept_and_the_last_turn_keeps_nothing(tmp_path):
    model = family_of(tmp_path, "qwen3")
    dialogues = Dialogues(model, keeps=True)
    requests = first_turns()
    dialogues.sample(requests)
    held = dialogues.budget.kept_tokens
    assert held >= sum(PROMPTS)
    dialogues.loop.update(1)
    assert dialogues.budget.kept_tokens == 0
    dialogues.sample([evolve(request, last_turn=True) for request in requests])
    assert dialogues.budget.kept_tokens == 0
    # requests of one session at a time: the last that ends stays
    dialogues.sample([evolve(request, session=0) for request in requests])
    assert 0 < dialogues.budget.kept_tokens < 150


def test_the_last_turn_frees_what_was_kept_of_those_before(tmp_path):
    model = family_of(tmp_path, "qwen3")
    dialogues = Dialogues(model, keeps=True)
    requests = first_turns()[:2]
    done = dialogues.sample(requests)
    later = [next_turn(request, completion) for request, completion in zip(requests, done, strict=True)]
    dialogues.sample([evolve(later[0], last_turn=True), later[1]])
    assert [dialogues.budget.find((POLICY, n), None, later[n].prompt_ids)[0] is None for n in (0, 1)] == [True, False]
    dialogues.add([evolve(later[1], last_turn=True)])
    dialogues.loop.step()
    dialogues.loop.abort(lambda _number: True)
    assert dialogues.budget.kept_tokens == 0


def request_of(number, length, new=4):
    prompt = np.random.default_rng(number).integers(0, 128, length).astype(np.int32)
    return GenerationRequest(number, prompt, Sampling(max_tokens=new, ignore_eos=True), seed=number, session=number)


def test_a_long_row_leaves_no_room_that_short_ones_have_no_use_for(tmp_path):
    """Memory grows to the longest row and to the most rows, which were never there together."""
    model = family_of(tmp_path, "qwen3")
    dialogues = Dialogues(model, keeps=True, slots=8, tokens=1024)
    plain = Dialogues(model, keeps=False, slots=1)
    for part in ([request_of(0, 700)], [request_of(n, 20) for n in range(1, 9)], [request_of(9, 800), request_of(10, 30)]):
        due = [plain.sample([request])[0] for request in part]
        assert [each.logprobs.tobytes() for each in dialogues.sample(part)] == [each.logprobs.tobytes() for each in due]
        assert dialogues.budget.used <= 1024
    assert dialogues.most_held <= 1024
    assert dialogues.budget.kept_tokens


def test_weight_sets_that_take_turns_hold_no_more_than_one_budget(tmp_path):
    """Each gives back what its rows that are sampled do not need when the other wants it, in the midst of its own."""
    model, other = family_of(tmp_path, "qwen3"), family_of(tmp_path, "qwen3")
    one = Dialogues(model, keeps=True, slots=6, tokens=1024)
    two = Dialogues(other, keeps=True, slots=6, budget=one.budget, target="other")
    plain = Dialogues(model, keeps=False, slots=1)
    requests = [request_of(n, 30 + 40 * (n % 5), new=3 + 5 * (n % 4)) for n in range(12)]
    due = [completion.logprobs.tobytes() for request in requests for completion in plain.sample([request])]
    one.add(requests[::2])
    two.add(requests[1::2])
    got, held = {}, []
    while len(one.loop) or len(two.loop):
        for dialogues in (one, two):
            got |= {completion.request_id: completion.logprobs.tobytes() for completion in dialogues.loop.step()}
            held.append(one.budget.used)
    assert [got[n] for n in range(12)] == due
    assert max(held) <= 1024


def test_memory_of_what_is_kept_is_freed_though_a_row_goes_on_from_it(tmp_path):
    model = family_of(tmp_path, "qwen3")
    dialogues = Dialogues(model, keeps=True)
    (done,) = dialogues.sample([first := request_of(1, 60)])
    states = ref(dialogues.budget.find((POLICY, 1), None, first.prompt_ids)[0].pieces[0])
    later = next_turn(first, done)
    dialogues.add([later])
    dialogues.loop.step()
    dialogues.budget.drop_target(POLICY)
    assert states() is None
    (due,) = Dialogues(model, keeps=False).sample([later])
    while len(dialogues.loop):
        ended = dialogues.loop.step()
    assert ended[0].logprobs.tobytes() == due.logprobs.tobytes()
    assert dialogues.budget.kept_tokens


@pytest.mark.parametrize("family", now(KEEPING, "gemma2"))
def test_whatever_happens_on_the_way_changes_no_bit(family, tmp_path):
    """Two weight sets share little memory; at random turns begin, steps are taken, sessions are ended, evicted, aborted or read again."""
    model, tokens = family_of(tmp_path, family), 1536
    plain = Dialogues(model, keeps=False, slots=1)
    one = Dialogues(model, keeps=True, slots=3, tokens=tokens)
    sets = (one, Dialogues(model, keeps=True, slots=4, budget=one.budget, target="other"))
    draw = np.random.default_rng(0)
    shared = draw.integers(0, 128, 70).astype(np.int32)
    idle = {n: evolve(request_of(n, 40 + 31 * n, new=2 + 3 * n % 7), prefix_group=n % 2) for n in range(8)}
    for n in (0, 2, 4, 5):
        idle[n] = evolve(idle[n], prompt_ids=np.concatenate([shared[: 20 + 10 * n], idle[n].prompt_ids]))
    under_way, turns = {}, dict.fromkeys(idle, 0)
    while idle or under_way:
        chosen = sets[draw.integers(2)]
        key = chosen.loop._target, int(draw.integers(8))
        match draw.integers(20):
            # what a row sampled is read together after an update
            case 0 if chosen.rows.keeps_sampled or not len(chosen.loop):
                chosen.loop.update(0)
            case 1:
                one.budget.drop([key])
            case 2 if key[1] in under_way:
                sets[key[1] % 2].loop.abort(lambda number: number % 100 == key[1])  # noqa: B023 - called at once
                request = under_way.pop(key[1])
                idle[key[1]] = evolve(request, request_id=request.request_id + 100)
            case 3 | 4 | 5 | 6 if key[1] in idle:
                request = idle.pop(key[1])
                last = bool(turns[key[1]] == 3 or draw.integers(5) == 0)
                sets[key[1] % 2].add([evolve(request, last_turn=last)])
                under_way[key[1]] = request
            case _:
                with torch.inference_mode():
                    done = chosen.loop.step()
                for completion in done:
                    n = completion.request_id % 100
                    request = under_way.pop(n)
                    assert completion.logprobs.tobytes() == plain.sample([request])[0].logprobs.tobytes(), (n, turns)
                    turns[n] += 1
                    if turns[n] < TURNS:
                        idle[n] = next_turn(request, completion)
        assert one.budget.used <= tokens
    assert min(dialogues.reused for dialogues in sets) > 100


def row_of(session, tokens, group=None, target=POLICY):
    states = torch.zeros(1, tokens, 1)
    return KeptRow((target, session), group, np.full(tokens, session), (KeptPiece(((states, states),), tokens),))


def test_the_least_recently_used_goes_first():
    budget = CacheBudget(100)
    for session in range(3):
        budget.keep(row_of(session, 30))
    assert budget.find((POLICY, 0), None, np.zeros(40))[1] == 30
    budget.keep(row_of(3, 30))
    assert [budget.find((POLICY, session), None, np.full(40, session))[1] for session in range(4)] == [30, 0, 30, 30]
    # the same session, in its place
    budget.keep(row_of(0, 40))
    assert budget.kept_tokens == 100
    budget.drop([(POLICY, 0), (POLICY, 77)])
    assert budget.kept_tokens == 60


def test_a_turn_that_reads_again_for_want_of_room_warns_once(caplog):
    budget = CacheBudget(100)
    ids = np.zeros(60, dtype=np.int64)
    for session in range(5):
        budget.keep(row_of(session, 40))
    budget.find((POLICY, 7), None, ids)
    budget.drop([(POLICY, 0)])
    budget.find((POLICY, 0), None, ids)
    assert not caplog.messages, "new sessions and ended ones miss nothing"
    for session in (1, 2):
        budget.find((POLICY, session), None, ids)
    (message,) = caplog.messages
    assert "keys and values of 100 tokens" in message
    assert "raise generator.cache_tokens" in message
    short = CacheBudget(100)
    short.note_short((POLICY, 1))
    short.drop_target(POLICY)
    short.find((POLICY, 1), None, ids)
    assert len(caplog.messages) == 1, "after an update all is read again"


def test_rows_that_are_sampled_go_before_kept_ones():
    budget = CacheBudget(100)
    one, other = budget.open_room(), budget.open_room()
    budget.keep(row_of(0, 40))
    budget.keep(row_of(1, 40, target="other"))
    one.bound = 50
    one.grow(50)
    assert budget.kept_tokens == 40
    assert budget.takes(50)
    assert not budget.takes(51)
    # what a set holds that samples nothing is freed before anything that is kept
    freed = []
    one.bound, one.shrink = 0, lambda: (freed.append(one.held), one.grow(0))
    assert budget.takes(100)
    other.grow(60)
    assert (freed, budget.kept_tokens) == ([50], 40)
    other.bound = 60
    assert one.admits(40)
    assert not one.admits(41)
    other.bound = 0
    assert one.admits(400), "the only rows go on"


def test_a_group_finds_the_longest_beginning():
    budget = CacheBudget(1000)
    budget.keep(row_of(5, 20, group=3))
    budget.keep(row_of(5, 30, group=3, target="other"))
    assert budget.find((POLICY, 9), 3, np.full(50, 5))[1] == 20
    assert budget.find((POLICY, 9), 4, np.full(50, 5)) == (None, 0)
    budget.drop_target(POLICY)
    assert budget.find((POLICY, 9), 3, np.full(50, 5)) == (None, 0)
    assert budget.find(("other", 9), 3, np.full(50, 5))[1] == 30


def test_tokens_are_compared_one_by_one():
    assert count_common(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert count_common(np.array([1, 2]), np.array([1, 2, 4, 5])) == 2
    assert count_common(np.array([9]), np.array([1])) == 0
    cut = row_of(1, 10).cut(4)
    assert (len(cut.ids), cut.pieces[0].tokens, cut.pieces[0].states[0][0].shape) == (4, 4, (1, 4, 1))
