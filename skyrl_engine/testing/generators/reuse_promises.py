"""Promises about what a generator keeps of tokens that it has read, for later turns of their session and for others that begin alike."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, evolve, field

from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.generators.bench import (
    OTHER,
    RunningGenerator,
    TinyWeights,
    claims,
    due_logprobs_of,
    hand_over_to,
    no_weights,
    require_likeliest,
    require_logprobs,
    run_generator,
    undecidable_on_error,
)
from skyrl_engine.testing.generators.places import description_of
from skyrl_engine.testing.promise import promise
from skyrl_engine.testing.subject import Subject


@promise("What was computed of a prompt does not outlive an update", exempt=claims("logprobs"))
def no_stale_prefix(subject: Subject[Any], _case: None) -> None:
    prompt = np.arange(20, 40, dtype=np.int32)
    with undecidable_on_error(), run_generator(subject) as generator:
        for version in (0, 1):
            sampling = Sampling(max_tokens=6, ignore_eos=True)
            requests = [GenerationRequest(10 * version + n, prompt, sampling, n, session=1, prefix_group=0) for n in range(6)]
            for request, done in zip(requests, generator.sample(requests), strict=True):
                require_logprobs(generator, request, done, "Empty prefix caches when weights change")
            generator.update(version + 1)


@promise(
    "What was computed of other tokens is not reused: in a session whose earlier tokens changed, in a group of unlike prompts, at one length",
    exempt=no_weights,
)
def no_foreign_prefix(subject: Subject[Any], _case: None) -> None:
    """Sample turns of sessions, and then turns of the same ids and lengths that differ from them in one early token."""
    draw = np.random.default_rng(13)
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    prompts = [draw.integers(0, VOCABULARY, 24).astype(np.int32) for _ in range(4)]
    remedy = "Compare the tokens of a prompt with those that a cache holds, one by one; neither ids nor lengths tell"
    with undecidable_on_error(), run_generator(subject) as generator:
        # two groups, of unlike prompts
        turns = [GenerationRequest(n, prompt, sampling, n, session=n, prefix_group=n // 2) for n, prompt in enumerate(prompts)]
        next_prompts = []
        for request in turns:
            (done,) = generator.sample([request])
            require_likeliest(generator, request, done, remedy)
            next_prompts.append(np.concatenate([request.prompt_ids, done.token_ids, request.prompt_ids[:3]]).astype(np.int32))
        # an environment changed what stood before: the first token, one in the middle, what was sampled, and the end is left out
        for place, changed in enumerate((0, 12, 25, 2)):
            next_prompts[place][changed] = (next_prompts[place][changed] + 1) % VOCABULARY
        next_prompts[3] = next_prompts[3][:20]
        later = [evolve(turn, request_id=10 + n, prompt_ids=next_prompts[n]) for n, turn in enumerate(turns)]
        # sessions that nobody knows, as long as those before them
        new = draw.integers(0, VOCABULARY, (4, 24)).astype(np.int32)
        others = [
            GenerationRequest(20 + n, prompt, sampling, n, session=20 + n, prefix_group=n // 2) for n, prompt in enumerate(new)
        ]
        for requests in (later, others):
            for request, done in zip(requests, generator.sample(requests), strict=True):
                require_likeliest(generator, request, done, remedy)


FIRST_PROMPTS = (9, 24, 24, 24, 33, 130)
"""Tokens of the first prompts of dialogues: three end their turns in one step, at one length, and two of those are a group's."""


@define(eq=False)
class _Dialogues:
    """Dialogues that observe a few random tokens after each turn, every one another number of them but for those of one length."""

    requests: list[GenerationRequest] = field(factory=list)
    _draw: np.random.Generator = field(factory=lambda: np.random.default_rng(17))
    _last_id: int = 0

    def __attrs_post_init__(self) -> None:
        self.requests = [self._begin(session, length) for session, length in enumerate(FIRST_PROMPTS)]

    def _begin(self, session: int, length: int) -> GenerationRequest:
        prompt = self._draw.integers(0, VOCABULARY, length).astype(np.int32)
        group = 1 if session in (1, 2) else None
        return GenerationRequest(
            self._count(), prompt, Sampling(max_tokens=5, ignore_eos=True), session, session=session, prefix_group=group
        )

    def _count(self) -> int:
        self._last_id += 1
        return self._last_id

    def go_on(self, done: Sequence[Completion]) -> None:
        """Let every dialogue observe something after its turn."""
        later = []
        for request, completion in zip(self.requests, done, strict=True):
            observed = self._draw.integers(0, VOCABULARY, 1 + len(request.prompt_ids) % 7)
            prompt = np.concatenate([request.prompt_ids, completion.token_ids, observed]).astype(np.int32)
            later.append(evolve(request, request_id=self._count(), prompt_ids=prompt, seed=request.seed + 100))
        self.requests = later

    def begin_again(self, session: int) -> None:
        """Let another dialogue take the number of a session, with a prompt of the same length."""
        self.requests[session] = self._begin(session, len(self.requests[session].prompt_ids))


def _require_all(
    generator: RunningGenerator, requests: Sequence[GenerationRequest], done: Sequence[Completion], remedy: str
) -> None:
    """Raise Broken unless all log-probabilities are those of the generator's present weights."""
    due = due_logprobs_of(generator.weights, requests, done)
    for request, completion, rows in zip(requests, done, due, strict=True):
        require_logprobs(generator, request, completion, remedy, due=rows)


@promise(
    "A later turn goes on from all of its history and from no other, whatever is kept of sessions: several turns on, in another order, "
    "after the session ended",
    exempt=claims("logprobs"),
)
def later_turns(subject: Subject[Any], _case: None) -> None:
    remedy = "Keep of a row the tokens that were read, not the last sampled one, under its own session, and read all that comes after them"
    with undecidable_on_error(), run_generator(subject) as generator:
        dialogues = _Dialogues()
        for turn in range(4):
            requests = dialogues.requests
            if turn == 1:
                done = generator.sample(requests[::-1])[::-1]
            elif turn == 2:
                done = [completion for request in requests for completion in generator.sample([request])]
            else:
                done = generator.sample(requests)
            _require_all(generator, requests, done, remedy)
            dialogues.go_on(done)
            if turn == 1:
                # one of them is known to nobody
                generator.placed.end_sessions([0, 3, 4, 12_345])
                dialogues.begin_again(3)


@promise(
    "What is kept of a session is of its weights: it outlives no update, between two turns or in the midst of one, and serves no other target",
    exempt=claims("logprobs"),
)
def no_stale_session(subject: Subject[Any], _case: None) -> None:
    remedy = "Drop what is kept of all sessions when their weights change, what rows under way have read too, and keep it apart by target"
    with undecidable_on_error(), run_generator(subject) as generator:
        dialogues = _Dialogues()
        dialogues.go_on(generator.sample(dialogues.requests))
        generator.update(1)
        done = generator.sample(dialogues.requests)
        _require_all(generator, dialogues.requests, done, remedy)
        dialogues.go_on(done)
        other = evolve(generator, weights=TinyWeights(generator.weights.form, 7))
        if hand_over_to(generator, other.weights, 7, OTHER):
            same = [evolve(request, request_id=1000 + request.request_id, target=OTHER) for request in dialogues.requests]
            _require_all(other, same, other.sample(same), remedy)
        if "update_while_generating" in description_of(subject).capabilities:
            _update_amid_a_turn(generator, dialogues)
            _require_all(generator, dialogues.requests, generator.sample(dialogues.requests), remedy)


@promise(
    "After sleep, an update of a weight set brings all of it back, and nothing that was kept before is reused",
    exempt=claims("logprobs", "sleep"),
)
def wakes(subject: Subject[Any], _case: None) -> None:
    remedy = "Give memory back in sleep, keys and values too, and fill every weight in the update that follows"
    with undecidable_on_error(), run_generator(subject) as generator:
        dialogues = _Dialogues()
        dialogues.go_on(generator.sample(dialogues.requests))
        for step, changes in ((1, True), (2, False)):
            generator.placed.sleep()
            if changes:
                generator.update(step)
            else:
                generator.hand_over(step)
            done = generator.sample(dialogues.requests)
            _require_all(generator, dialogues.requests, done, remedy)
            dialogues.go_on(done)


def _update_amid_a_turn(generator: RunningGenerator, dialogues: _Dialogues) -> None:
    """Let the weights change while a turn of every dialogue is sampled; what is sampled of it is another promise's."""
    dialogues.requests = [evolve(request, sampling=evolve(request.sampling, max_tokens=12)) for request in dialogues.requests]
    generator.submit(dialogues.requests)
    early = generator.let_sample(4)
    generator.update(2)
    came = {completion.request_id: completion for completion in early}
    left = [request for request in dialogues.requests if request.request_id not in came]
    came |= {completion.request_id: completion for completion in generator.collect(left)}
    dialogues.go_on([came[request.request_id] for request in dialogues.requests])
