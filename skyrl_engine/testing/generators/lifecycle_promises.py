"""Promises about requests and weights that change on the way, refusals and the end, as far as capabilities go."""

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import numpy as np
from attrs import define, evolve
from torch import Tensor

from skyrl_engine.contracts.kinds.generator import POLICY, Completion, GenerationRequest, Sampling, WeightForm
from skyrl_engine.errors import ContractError, EngineError, ModelError
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.generators.bench import (
    ODD_SIZES,
    OTHER,
    PATIENCE_SECONDS,
    POSITIONS,
    TOLERANCE,
    RunningGenerator,
    TinyWeights,
    claims,
    due_logprobs,
    hand_over_to,
    no_weights,
    raise_broken_on_error,
    requests_of,
    require_logprobs,
    run_generator,
    undecidable_on_error,
)
from skyrl_engine.testing.generators.places import description_of, placement_of
from skyrl_engine.testing.process_settings import processes, require_settings_left_alone, restore_settings
from skyrl_engine.testing.promise import Broken, any_of, promise
from skyrl_engine.testing.random_state import global_random_state, restore_random_state
from skyrl_engine.testing.subject import Subject

# --- what happens on the way -------------------------------------------------------------------------------------------------------


@promise("An aborted request returns what was sampled of it, a beginning of what would have come", exempt=claims("abort"))
def aborts(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject) as generator:
        requests = requests_of(6, max_tokens=60)
        whole = generator.sample(requests)
        generator.submit(requests)
        early = generator.let_sample(5)
        generator.abort([requests[0].request_id, requests[1].request_id])
        generator.abort()
        done = {completion.request_id: completion for completion in early}
        left = [request for request in requests if request.request_id not in done]
        done |= {completion.request_id: completion for completion in generator.collect(left)}
        if generator.has_logprobs:
            for request in requests:
                require_logprobs(
                    generator, request, done[request.request_id], "Keep the log-probabilities of what was sampled, too"
                )
    is_seeded = "seeded" in description_of(subject).capabilities
    total = 0
    for request, full in zip(requests, whole, strict=True):
        completion = done[request.request_id]
        count = len(completion.token_ids)
        total += count
        if completion.finish == "abort" and count >= request.sampling.max_tokens:
            raise Broken(f"ends a request that had its {count} tokens as aborted", "Return what has finished as it finished")
        if len(completion.logprobs) != count or (completion.finish != "abort" and count < len(full.token_ids)):
            raise Broken(
                f"ends an aborted request as {completion.finish!r} with {count} tokens",
                'Return what was sampled, with finish "abort"',
            )
        if is_seeded and completion.token_ids.tolist() != full.token_ids[:count].tolist():
            raise Broken(
                "returns other tokens for an aborted request than it would have sampled", "Return the tokens as they were sampled"
            )
    if not total:
        raise Broken(
            "returns no token of six requests that were sampled for five polls", "Keep what was sampled when a request is aborted"
        )


@promise(
    "Aborting some requests leaves the others as they are, unknown ids are passed over, and what is aborted at once does not go on",
    exempt=claims("abort"),
)
def aborts_apart(subject: Subject[Any], _case: None) -> None:
    with raise_broken_on_error(), run_generator(subject) as generator:
        requests = requests_of(6, max_tokens=30)
        generator.submit(requests)
        done = {completion.request_id: completion for completion in generator.poll(0.0)}
        generator.abort([requests[4].request_id, 12_345])
        left = [request for request in requests if request.request_id not in done]
        done |= {completion.request_id: completion for completion in generator.collect(left)}
        long = requests_of(6, first=20, max_tokens=60)
        generator.submit(long)
        generator.abort()
        ended = generator.collect(long)
    for request in requests:
        if request is not requests[4] and done[request.request_id].finish == "abort":
            raise Broken(
                f"ends request {request.request_id} where request {requests[4].request_id} was aborted",
                "End the named requests alone",
            )
    if all(completion.finish != "abort" for completion in ended):
        raise Broken(
            "samples requests to their end that were aborted as soon as they were sent", "End requests when they are aborted"
        )


def _no_streams(subject: Subject[Any]) -> str | None:
    """Exempt generators that show no tokens before their request ends, and those in places where nobody asks for them."""
    return claims("streaming")(subject) or (
        None if placement_of(subject) == "rank" else "only a generator in this process is asked"
    )


@promise(
    "The tokens that are shown while a request is sampled begin its completion, and nothing is shown after it", exempt=_no_streams
)
def streams(subject: Subject[Any], _case: None) -> None:
    requests = requests_of(3, max_tokens=20)
    shown: dict[int, list[list[int]]] = {request.request_id: [] for request in requests}
    with raise_broken_on_error(), run_generator(subject) as generator:
        generator.submit(requests)
        done: dict[int, Completion] = {}
        while len(done) < len(requests):
            done |= {completion.request_id: completion for completion in generator.poll(0.0)}
            for number in shown.keys() - done.keys():
                shown[number].append(generator.show(number))
        late = generator.show_late(requests[0].request_id)
    if late is not None:
        raise Broken(f"shows {late} for a request that it has answered", "Raise ContractError for requests that are not under way")
    for request in requests:
        tokens, parts = done[request.request_id].token_ids.tolist(), shown[request.request_id]
        if wrong := next((part for part in parts if part != tokens[: len(part)]), None):
            raise Broken(f"shows {wrong} on the way to {tokens}", "Show the tokens as they were sampled")
        if len(parts) > 1 and not parts[-1]:
            raise Broken(
                f"shows nothing in {len(parts)} polls of request {request.request_id}, which ends with {len(tokens)} tokens",
                "Show every token as soon as it was sampled",
            )


STEPS = (1, 5)
"""Versions are the caller's: a run that goes on does not begin at 1, and some steps hand nothing over."""


@promise("After an update, new tokens have the log-probabilities of the new weights and their version", exempt=claims("logprobs"))
def updates(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject) as generator:
        requests = requests_of(8)
        generator.sample(requests)
        versions = [generator.first_version]
        for step in STEPS:
            versions.append(version := generator.update(step))
            for request, done in zip(requests, generator.sample(requests), strict=True):
                try:
                    require_logprobs(
                        generator, request, done, "Take every parameter of the last update, and sample from those weights"
                    )
                except Broken as broken:
                    raise Broken(f"{broken.cause}; {_name_weights(generator, request, done, versions)}", broken.remedy) from broken
                if done.versions.versions.tolist() != [version]:
                    raise Broken(
                        f"says that tokens sampled after the update to version {version} are of version {done.versions.versions.tolist()}",
                        "Take the update's version",
                    )


def _name_weights(generator: RunningGenerator, request: GenerationRequest, done: Completion, versions: list[int]) -> str:
    """Say whether log-probabilities are those of an earlier one of these `versions`, between which `STEPS` lie."""
    weights = TinyWeights(generator.weights.form)
    for version, step in zip(versions, STEPS, strict=False):
        due = due_logprobs(weights, request, done)[np.arange(len(done.token_ids)), done.token_ids]
        if np.abs(due - done.logprobs).max() <= TOLERANCE:
            return f"they are those of version {version}, and the last update is version {versions[-1]}"
        weights.change(step)
    return f"they are of no version that it was given: of a part of version {versions[-1]}, or of another model"


@promise(
    "Requests under way at an update go on with the new weights; older tokens keep the older version",
    exempt=claims("logprobs", "update_while_generating"),
)
def updates_on_the_way(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject) as generator:
        # so many that a process of its own does not come to their end while it is looked at
        requests = requests_of(3, max_tokens=40 if generator.steps_in_poll else 120)
        generator.submit(requests)
        early = generator.let_sample(8)
        version = generator.update(1)
        if not generator.steps_in_poll:
            # these had their last token before the update came
            early += generator.poll(0.0)
        left = _leave_out(requests, early)
        for request, done in zip(left, generator.collect(left), strict=True):
            versions = done.versions.per_token(len(done.token_ids))
            since = int(np.searchsorted(versions, version))
            due = due_logprobs(generator.weights, request, done)[np.arange(len(versions)), done.token_ids]
            older = np.abs(due - done.logprobs) > TOLERANCE
            remedy = "Write down the version of every token when it is sampled"
            if since == len(versions):
                raise Broken(f"says that all {since} tokens of a request are older than the update after which it went on", remedy)
            if since == 0 and older[0]:
                raise Broken("says that tokens of the old weights are of the new version", remedy)
            require_logprobs(generator, request, done, "Compute keys and values again after an update", since)
            if since and not older[:since].any():
                raise Broken("says that tokens of the new weights are of the old version", remedy)


def _leave_out(requests: Sequence[GenerationRequest], answered: Sequence[Completion]) -> list[GenerationRequest]:
    """Return the requests that are not answered."""
    ids = {completion.request_id for completion in answered}
    return [request for request in requests if request.request_id not in ids]


MOST_WAITING = 32
"""Requests at once beyond which `updates_keep_requests` does not try to let some wait."""


@promise(
    "No request is lost where weights change, nor answered twice: none under way, none that waits, none that ends just then",
    exempt=claims("update_while_generating"),
)
def updates_keep_requests(subject: Subject[Any], _case: None) -> None:
    with raise_broken_on_error(), run_generator(subject) as generator:
        count = min(description_of(subject).concurrency, MOST_WAITING) + 8
        requests = [*requests_of(4, max_tokens=40), *requests_of(count, first=10)]
        generator.submit(requests)
        answered = []
        for step in STEPS:
            answered += generator.give_moment()
            generator.update(step)
        left = _leave_out(requests, answered)
        try:
            generator.collect(left)
        except Broken as broken:
            raise Broken(
                f"{broken.cause}, of which {len(left)} were under way or waited when weights changed", broken.remedy
            ) from broken
        # what it sends again, or has twice, comes while others are sampled
        generator.sample(requests_of(2, first=2000, max_tokens=50))


@promise(
    "Weights of another target, where it takes them, are a set of their own: the policy keeps its weights and version",
    exempt=claims("logprobs"),
)
def targets(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject) as generator:
        other = evolve(generator, weights=TinyWeights(generator.weights.form, 1))
        if not hand_over_to(generator, other.weights, 1, OTHER):
            return
        requests_by_target = {
            POLICY: requests_of(4),
            OTHER: [evolve(plain_request, target=OTHER) for plain_request in requests_of(4, first=10)],
        }
        done = iter(generator.sample([request for requests in requests_by_target.values() for request in requests]))
        for target, requests in requests_by_target.items():
            for request in requests:
                version = 1 if target == OTHER else generator.first_version
                _require_target(generator if target == POLICY else other, request, next(done), version)
        version = generator.update(2)
        for target, requests in requests_by_target.items():
            for request, again in zip(requests, generator.sample(requests), strict=True):
                _require_target(generator if target == POLICY else other, request, again, 1 if target == OTHER else version)
        generator.placed.release(OTHER)
        for request, again in zip(requests_by_target[POLICY], generator.sample(requests_by_target[POLICY]), strict=True):
            _require_target(generator, request, again, version)


def _require_target(generator: RunningGenerator, request: GenerationRequest, done: Completion, version: int) -> None:
    require_logprobs(generator, request, done, "Keep one set of weights per target, and sample each request from its own")
    if done.versions.versions.tolist() != [version]:
        raise Broken(
            f"says that tokens of the target {request.target!r} are of version {done.versions.versions.tolist()}, where its weights are of "
            f"version {version}",
            "Keep a version per target",
        )


# --- weights that do not fit -------------------------------------------------------------------------------------------------------


@define(eq=False)
class _RenamedWeights(TinyWeights):
    """Weights of which the last has a name that no model knows."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        *named, (last, weight) = super().tensors()
        return iter([*named, (f"{last}_of_another_model", weight)])


@define(eq=False)
class _MissingWeights(TinyWeights):
    """Weights of which the last did not come."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        *named, _last = super().tensors()
        return iter(named)


@define(eq=False)
class _NarrowWeights(TinyWeights):
    """Weights of another model, with half of the width between the projections of each feed-forward layer."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        half = ODD_SIZES["intermediate_size"] // 2
        for name, weight in super().tensors():
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                yield name, weight[:half]
            else:
                yield name, weight[:, :half] if name.endswith("down_proj.weight") else weight


@promise("Weights whose names do not fit are refused before any weight changes", exempt=claims("logprobs"))
def unknown_weights(subject: Subject[Any], _case: None) -> None:
    _require_refusal(subject, _RenamedWeights, "weights of which one has a name that its model does not know")


@promise("An update in which a weight is missing is refused before any weight changes", exempt=claims("logprobs"))
def missing_weights(subject: Subject[Any], _case: None) -> None:
    _require_refusal(subject, _MissingWeights, "a part of an update, in which a weight of its model is missing")


@promise(
    "Weights of another model, whose names fit and whose shapes do not, are refused before any weight changes",
    exempt=claims("logprobs"),
)
def other_shapes(subject: Subject[Any], _case: None) -> None:
    _require_refusal(subject, _NarrowWeights, "weights of another model, whose shapes are not those of its own")


def _require_refusal(subject: Subject[Any], make: Callable[[WeightForm, int], TinyWeights], what: str) -> None:
    remedy = "Raise ModelError that names the weight"
    with undecidable_on_error(), run_generator(subject) as generator:
        # a module is shared: no names are read of the policy's weights then
        target = OTHER if generator.weights.form == "module" else POLICY
        if target == OTHER and not hand_over_to(generator, generator.weights, 0, OTHER):
            return
        try:
            generator.placed.update(make(generator.weights.form, 1), generator.first_version + 1, target)
        except ModelError:
            pass
        except EngineError as error:
            raise Broken(f"fails for {what}: {error.cause}", remedy) from error
        else:
            raise Broken(f"takes {what}", remedy)
        requests = [evolve(plain_request, target=target) for plain_request in requests_of(4)]
        for request, done in zip(requests, generator.sample(requests), strict=True):
            require_logprobs(generator, request, done, "Look at all names and shapes before any weight changes")


# --- what is refused, and what is left alone ---------------------------------------------------------------------------------------


@promise("A prompt that leaves no room for max_tokens fails alone, naming its length and the limit", exempt=no_weights)
def no_room(subject: Subject[Any], _case: None) -> None:
    limit = POSITIONS
    with undecidable_on_error(), run_generator(subject) as generator:
        fits = requests_of(2, first=1)
        long = GenerationRequest(0, np.zeros(limit - 2, dtype=np.int32), Sampling(max_tokens=3, ignore_eos=True), 0)
        largest = GenerationRequest(9, np.zeros(limit - 3, dtype=np.int32), Sampling(max_tokens=3, ignore_eos=True), 0)
        failed, *others = generator.sample([long, *fits, largest])
    if any(done.finish == "error" for done in others):
        raise Broken(
            "fails requests that fit, one of them just so, next to one whose prompt is too long", "Fail that request alone"
        )
    words = failed.error or ""
    if failed.finish != "error" or str(limit) not in words or str(limit - 2) not in words:
        raise Broken(
            f"ends a prompt of {limit - 2} tokens with 3 to come as {failed.finish!r} ({failed.error}), where the model takes {limit}",
            "Fail it with an error that names both numbers; do not cut max_tokens down",
        )


@promise("Prompts that are empty or hold ids outside of the vocabulary are refused, before any request is taken", exempt=no_weights)
def vocabulary(subject: Subject[Any], _case: None) -> None:
    with run_generator(subject) as generator:
        for prompt in ([VOCABULARY], [3, -1], []):
            wrong = GenerationRequest(0, np.array(prompt, dtype=np.int32), Sampling(max_tokens=2), 0)
            try:
                generator.submit([*requests_of(1, first=1), wrong])
                if placement_of(subject) == "process":
                    # which is asked, and says so later
                    generator.poll(PATIENCE_SECONDS)
            except ContractError:
                pass
            except EngineError as error:
                raise Broken(f"fails for the prompt {prompt}: {error.cause}", "Raise ContractError that names the token") from error
            else:
                raise Broken(
                    f"takes the prompt {prompt} of a vocabulary of {VOCABULARY}", "Raise ContractError that names the token"
                )
            if generator.placed.poll(0.5):
                raise Broken("takes the requests before the one that it refuses", "Look at all of them before taking one")


def _lives_elsewhere(subject: Subject[Any]) -> str | None:
    return "it lives in a process of its own" if placement_of(subject) == "process" else None


@promise(
    "Global random states and the settings of torch, NumPy and the process stay as they are",
    exempt=any_of(no_weights, _lives_elsewhere),
)
def process_state(subject: Subject[Any], _case: None) -> None:
    def work() -> None:
        before = global_random_state()
        with undecidable_on_error(), run_generator(subject) as generator:
            after_start = global_random_state()
            generator.sample(requests_of(4))
            generator.update(1)
            generator.sample(requests_of(2))
        if before != after_start or global_random_state() != before:
            raise Broken("draws from a global random state", "Draw from generators of the requests' seeds")

    # once before, for what it imports the first time
    with restore_random_state(), restore_settings(), undecidable_on_error(), run_generator(subject) as warm:
        warm.sample(requests_of(2))
    with restore_random_state():
        require_settings_left_alone(work)


@promise("Closing with requests under way takes less than 10 seconds and leaves no process", exempt=no_weights)
def closes(subject: Subject[Any], _case: None) -> None:
    before = processes()
    with undecidable_on_error():
        with run_generator(subject, is_alone=True) as generator:
            generator.submit(requests_of(20, max_tokens=100))
            generator.poll(0.0)
            since = monotonic()
        taken = monotonic() - since
    if taken > 10:
        raise Broken(f"takes {taken:.0f} seconds to close", "End what is under way")
    if left := processes() - before:
        raise Broken(f"leaves the process {min(left)}", "End processes when it is closed")
