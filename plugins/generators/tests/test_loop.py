"""Ends and contents of requests, and that nothing is lost while slots are filled, emptied and moved: on rows that follow a script."""

import numpy as np
import pytest
import torch

from skyrl_engine.contracts import GenerationRequest, Sampling
from skyrl_engine_generators.loop import SlotLoop
from skyrl_engine_generators.sampled_row import SampledRow
from skyrl_engine_generators.stops import StopRule

WORDS = ["<end>", "<turn>", "a", "b", "c", "ab", "bc", "abc", "d", " ", "x\n", "\ny", "\n\n"]
END, TURN = 0, 1


def ids(text):
    """Word by word, separated by spaces in the script; `_` is a space."""
    return [WORDS.index(word.replace("_", " ").replace("|", "\n")) for word in text.split()]


class Scripted:
    """Rows that say a script, whose number is the only token of the prompt."""

    device = torch.device("cpu")
    vocabulary = len(WORDS)
    keeps = keeps_sampled = False

    def __init__(self, scripts, slots):
        self._scripts = scripts
        self._slots = [None] * slots
        self.reads = []
        self.rested = 0

    def reserve(self, count, length):
        pass

    def read(self, slots, rows, starts):
        self.reads.append([len(row) for row in rows])
        hidden = torch.zeros(len(rows), max(map(len, rows)), 1)
        for place, (slot, row) in enumerate(zip(slots, rows, strict=True)):
            self._slots[slot] = list(row)
            hidden[place, len(row) - 1] = self._next(slot)
        return [hidden[place, : len(row)] for place, row in enumerate(rows)]

    def step(self, tokens, at):
        for slot, (token, place) in enumerate(zip(tokens, at, strict=True)):
            assert len(self._slots[slot]) >= place, "a row lost tokens on its way"
            self._slots[slot] = [*self._slots[slot][:place], token]
        return torch.tensor([[float(self._next(slot))] for slot in range(len(tokens))])

    def copy(self, source, targets, length):
        for target in targets:
            self._slots[target] = self._slots[source][:length]

    def settle(self, choice):
        return choice

    def rest(self):
        self.rested += 1

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[:, 0].long(), len(WORDS)) * 1000.0

    def _next(self, slot):
        script, *said = self._slots[slot]
        assert list(said) == self._scripts[script][: len(said)], "a row goes on with another's tokens"
        return self._scripts[script][len(said)]


def decode(tokens):
    return "".join(WORDS[token] for token in tokens if token > 1)


def row(number, *, sampling=None, script=None, ends=(END, TURN), **more):
    sampling = sampling or Sampling(max_tokens=4)
    request = GenerationRequest(
        number, np.array([number if script is None else script], dtype=np.int32), sampling, seed=number, **more
    )
    return SampledRow(request, StopRule.of(sampling, ends, lambda: decode), request.prompt_ids.astype(np.int64))


def drain_loop(loop):
    done = {}
    while len(loop):
        for completion in loop.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
    return done


LONG = "a b c d a b c d"
CASES = [
    # what would be said, settings, what is kept, finish, stop
    ("a b <end> c d", {}, "a b <end>", "stop", END),
    ("a b <turn> c d", {}, "a b <turn>", "stop", TURN),
    ("<end> a a a", {}, "<end>", "stop", END),
    ("a b c <end> d", {}, "a b c <end>", "stop", END),
    ("a b c d <end>", {}, "a b c d", "length", None),
    ("a b <end> c d", {"ignore_eos": True}, "a b <end> c", "length", None),
    ("a b c d", {"stop_token_ids": (3,)}, "a b", "stop", 3),
    ("a <end> c d", {"stop_token_ids": (4,), "ignore_eos": True}, "a <end> c", "stop", 4),
    ("a b c d", {"stop_strings": ("b",)}, "a b", "stop", "b"),
    ("a b c d", {"stop_strings": ("bc",)}, "a b c", "stop", "bc"),
    ("a b c d", {"stop_strings": ("abc",)}, "a b c", "stop", "abc"),
    ("d abc d d", {"stop_strings": ("b",)}, "d abc", "stop", "b"),
    ("d ab c d", {"stop_strings": ("bc",)}, "d ab c", "stop", "bc"),
    ("x| |y a a", {"stop_strings": ("\n\n",)}, "x| |y", "stop", "\n\n"),
    ("|| a a a", {"stop_strings": ("\n",)}, "||", "stop", "\n"),
    ("a b c d", {"stop_strings": ("c", "ab")}, "a b", "stop", "ab"),
    ("a bc d d", {"stop_strings": ("c", "b")}, "a bc", "stop", "b"),
    ("a b <end> c", {"stop_strings": ("zz",)}, "a b <end>", "stop", END),
    ("a b c d", {"stop_strings": ("zz",)}, "a b c d", "length", None),
    (LONG, {"stop_strings": ("da",), "max_tokens": 5}, "a b c d a", "stop", "da"),
    (LONG, {"stop_strings": ("b",), "min_tokens": 3, "max_tokens": 8}, "a b c d a b", "stop", "b"),
    ("<end> a <end> b", {"min_tokens": 2}, "<end> a <end>", "stop", END),
    ("<end> <end> b b", {"min_tokens": 2}, "<end> <end>", "stop", END),
    ("a a a a", {"max_tokens": 1}, "a", "length", None),
    ("<end> a a a", {"max_tokens": 1}, "<end>", "stop", END),
    ("a b c d", {"stop_strings": ("d",)}, "a b c d", "stop", "d"),
    ("a b c d", {"stop_strings": ("",)}, "a b c d", "length", None),
]


@pytest.mark.parametrize(("said", "settings", "kept", "finish", "stop"), CASES)
def test_a_request_ends_where_its_rule_says(said, settings, kept, finish, stop):
    sampling = Sampling(**{"max_tokens": 4, **settings})
    loop = SlotLoop(Scripted([ids(said) + [2] * 9], 1), 1)
    loop.add(row(0, sampling=sampling))
    done = drain_loop(loop)[0]
    assert (done.token_ids.tolist(), done.finish, done.stop) == (ids(kept), finish, stop)
    assert done.logprobs.dtype == np.float32
    assert done.token_ids.dtype == np.int32
    assert done.versions.per_token(len(done.token_ids)).tolist() == [0] * len(done.token_ids)


@pytest.mark.parametrize("slots", [1, 2, 3, 16, 40])
def test_no_request_is_lost_or_mixed_up_while_slots_change(slots):
    draw = np.random.default_rng(slots)
    scripts = [draw.integers(2, len(WORDS), 40).tolist() for _ in range(30)]
    loop = SlotLoop(Scripted(scripts, slots), slots)
    lengths = draw.integers(1, 30, 30).tolist()
    for number, length in enumerate(lengths):
        loop.add(row(number, sampling=Sampling(max_tokens=length)))
    done = drain_loop(loop)
    assert [done[number].token_ids.tolist() for number in range(30)] == [
        script[:length] for script, length in zip(scripts, lengths, strict=True)
    ]


def test_a_prompt_of_a_group_is_read_once_in_a_batch_and_copied_from_a_live_row_later():
    rows = Scripted([[2, 3, 4, 5, 6, 7, 8] * 3], 4)
    loop = SlotLoop(rows, 4)
    for number in range(7):
        loop.add(row(number, script=0, sampling=Sampling(max_tokens=3 + 2 * number), prefix_group=9))
    loop.add(row(7, script=0, sampling=Sampling(max_tokens=3)))
    done = drain_loop(loop)
    assert [len(done[number].token_ids) for number in range(8)] == [3, 5, 7, 9, 11, 13, 15, 3]
    assert rows.rested == 1
    # the group's prompt, and that of the request which is in no group
    assert rows.reads == [[1], [1]]


def test_an_update_reads_live_rows_anew_and_marks_what_comes_after():
    rows = Scripted([[2, 3, 4, 5, 6, 7, 8]] * 3, 2)
    loop = SlotLoop(rows, 2, version=4)
    for number in range(3):
        loop.add(row(number, sampling=Sampling(max_tokens=4)))
    for _ in range(2):
        assert loop.step() == []
    loop.update(5)
    done = drain_loop(loop)
    assert rows.reads == [[1, 1], [3, 3], [1]]
    for number, versions in ((0, [4, 4, 5, 5]), (1, [4, 4, 5, 5]), (2, [5, 5, 5, 5])):
        assert done[number].token_ids.tolist() == [2, 3, 4, 5]
        assert done[number].versions.per_token(4).tolist() == versions


def test_an_abort_returns_what_was_sampled_and_leaves_the_others_alone():
    loop = SlotLoop(Scripted([[2, 3, 4, 5, 6, 7, 8]] * 4, 3), 3)
    for number in range(4):
        loop.add(row(number, sampling=Sampling(max_tokens=5)))
    loop.step()
    loop.step()
    gone = {completion.request_id: completion for completion in loop.abort(lambda number: number in (0, 3, 99))}
    assert [gone[number].token_ids.tolist() for number in (0, 3)] == [[2, 3], []]
    assert {completion.finish for completion in gone.values()} == {"abort"}
    assert len(gone[3].versions.starts) == 0
    done = drain_loop(loop)
    assert {number: completion.token_ids.tolist() for number, completion in done.items()} == {
        1: [2, 3, 4, 5, 6],
        2: [2, 3, 4, 5, 6],
    }


def test_prompts_are_read_in_passes_of_a_limited_size():
    rows = Scripted([[2] * 9] * 5, 8)
    loop = SlotLoop(rows, 8, prefill_tokens=2)
    for number in range(5):
        loop.add(row(number, sampling=Sampling(max_tokens=2)))
    drain_loop(loop)
    assert [len(tokens) for tokens in rows.reads] == [2, 2, 1]


def test_a_row_whose_logits_are_no_numbers_fails_alone():
    class Broken(Scripted):
        def logits(self, hidden):
            logits = super().logits(hidden)
            logits[hidden[:, 0] == 5] = torch.nan
            return logits

    loop = SlotLoop(Broken([[2, 5, 5, 5], [2, 3, 4, 2]], 2), 2)
    for number in range(2):
        loop.add(row(number))
    done = drain_loop(loop)
    assert (done[0].finish, done[0].token_ids.tolist(), done[0].error) == (
        "error",
        [2],
        "the model's logits are not finite after token 1",
    )
    assert done[1].finish == "length"
