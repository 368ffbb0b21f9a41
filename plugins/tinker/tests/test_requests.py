"""Bodies that are no such request: every field of every call with values of wrong types, sizes and depths, sent to a real server."""

import json
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import attrs
import pytest

from skyrl_engine_tinker import losses
from skyrl_engine_tinker.calls import CALLS
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.requests import (
    METADATA_BYTES,
    AdamParams,
    CreateByLoadRequest,
    CreateModelRequest,
    InTurn,
    LoadRequest,
    SampleRequest,
    SaveRequest,
    TtlRequest,
    _hints_of,
    read_request,
)
from skyrl_engine_tinker.wire import CLASSES, MESSAGES

NOT_JSON = {"create_session", "telemetry", "forward_backward"}
"""Calls whose body is not read, or is a protobuf message."""

HUGE = f"1{'0' * 400}"
"""A whole number that no float holds."""

WRONG: Mapping[type, tuple[str, ...]] = {
    float: ("NaN", "Infinity", "-Infinity", "1e999", HUGE, '"1"', "true", "[]"),
    int: ("NaN", "Infinity", "-Infinity", "1e999", HUGE, "9223372036854775808", "0.5", '"1"', "true", "{}"),
    bool: ("NaN", "0", '"true"', "[]"),
    str: ("NaN", "1", "false", '"\\ud800"', "[]"),
}
"""JSON that is no value of a type."""

OF_CONTAINERS: Mapping[type, tuple[str, ...]] = {tuple: ("NaN", "1", "{}"), dict: ("Infinity", "[]", '{"a": 1}', '{"a": NaN}')}


def wrong_values(hint: Any) -> Iterator[tuple[str, str]]:
    """Yield a path below a field of a type ("" for itself, ".NAME", "[0]") with JSON that does not belong there."""
    if hint is Any:
        return
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if get_origin(hint) is UnionType else [hint]
    if NoneType not in get_args(hint):
        yield "", "null"
    for kind in kinds:
        origin = get_origin(kind)
        if attrs.has(kind):
            yield from (("", wrong) for wrong in ("NaN", "1", "[]"))
            for name, below in _hints_of(kind).items():
                yield from ((f".{name}{path}", wrong) for path, wrong in wrong_values(below))
        elif origin is tuple:
            (of_items,) = [each for each in get_args(kind) if each is not ...]
            yield from (("", wrong) for wrong in OF_CONTAINERS[tuple] if len(kinds) == 1)
            yield from ((f"[0]{path}", wrong) for path, wrong in wrong_values(of_items) if get_origin(of_items) is not UnionType)
            if get_origin(of_items) is UnionType:
                # texts and numbers are both right in it
                yield from (("[0]", wrong) for wrong in ("NaN", "Infinity", "0.5", HUGE, "true", "null"))
        elif origin is not None:
            yield from (("", wrong) for wrong in OF_CONTAINERS[dict])
        elif len(kinds) == 1:
            yield from (("", wrong) for wrong in WRONG[kind])


def with_wrong(body: Mapping[str, Any], path: str, wrong: str) -> bytes:
    """A body as JSON, with `wrong` in the place that `path` names."""
    mark, changed = "<here>", json.loads(json.dumps(body))
    parts = [part for part in path.replace("[0]", ".0").split(".") if part]
    place = changed
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        if following is None:
            put(place, part, mark)
        else:
            if (isinstance(place, dict) and place.get(part) in (None, [])) or (isinstance(place, list) and not place):
                put(place, part, [] if following == "0" else {})
            place = place[0] if isinstance(place, list) else place[part]
    return json.dumps(changed).replace(json.dumps(mark), wrong).encode()


def put(place: Any, part: str, value: Any) -> None:
    if isinstance(place, list):
        place[:1] = [value]
    else:
        place[part] = value


def cases() -> Iterator[Any]:
    for call, known in CALLS.items():
        for kind in known.requests:
            yield pytest.param(call, kind, id=f"{call}-{kind.__name__}")


@pytest.fixture(scope="module")
def bodies(client):
    """A right body of every class, of a model, a sampler and a session that are there."""
    model = client.open_model(rank=2)
    session = model.split(":")[0]
    path = client.complete("save_weights", {"model_id": model, "seq_id": 1, "path": "one"})["path"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    right = {
        "session_id": session,
        "model_id": model,
        "model_seq_id": 7,
        "base_model": "tiny",
        "sampling_session_id": client.sampler(model, 2),
        "request_id": f"{model}:1",
        "tinker_path": path,
        "path": path,
        "optimizer": True,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 1},
    }
    numbers = iter(range(3, 10**6))

    def body_of(kind: type) -> dict[str, Any]:
        required = [each.name for each in attrs.fields(kind) if each.default is attrs.NOTHING]
        return {name: next(numbers) if name == "seq_id" else right[name] for name in required}

    yield body_of
    client.finish(model)


@pytest.mark.parametrize(("call", "kind"), list(cases()))
def test_every_field_refuses_what_is_no_value_of_its_type(client, bodies, call, kind):
    """By the status 422, or where the request has its turn as its answer; never by 500, and never in silence."""
    wrong = [(name + path, each) for name, hint in _hints_of(kind).items() for path, each in wrong_values(hint)]
    # without a session the request is one of the model's own, which lacks other fields
    wrong = [each for each in wrong if (kind, *each) != (CreateByLoadRequest, "session_id", "null")]
    assert len(wrong) >= len(attrs.fields(kind))
    passed = []
    for path, each in wrong:
        status, answer = client.post(call, with_wrong(bodies(kind), path, each))
        if status == 200 and "request_id" in answer:
            answer = client.wait_for(answer)
        text = json.dumps(answer) if isinstance(answer, dict) else repr(answer)
        user = status == 422 or (status == 200 and isinstance(answer, dict) and answer.get("category") == "user")
        if not user or path.partition("[")[0].rpartition(".")[2] not in text:
            passed.append((path, each, status, text))
    assert not passed


def test_every_call_has_a_schema():
    assert {name for name, call in CALLS.items() if not call.requests} == NOT_JSON


def test_the_walk_sees_every_float():
    """The numbers of a step and the sampling parameters, each with NaN and both infinities; a field that is added later is found too."""
    found = {
        (kind.__name__, name + path, each)
        for call in CALLS.values()
        for kind in call.requests
        for name, hint in _hints_of(kind).items()
        for path, each in wrong_values(hint)
    }
    steps = {f"adam_params.{field.name}" for field in attrs.fields(AdamParams)}
    samples = {f"sampling_params.{name}" for name in ("temperature", "top_p")}
    for kind, names in (("OptimStepRequest", steps), ("SampleRequest", samples)):
        assert {(kind, name, each) for name in names for each in ("NaN", "Infinity", "-Infinity", HUGE)} <= found


@pytest.mark.parametrize("depth", [900, 100_000])
@pytest.mark.parametrize("call", sorted(CALLS.keys() - NOT_JSON))
def test_deep_json_is_the_senders_mistake(client, call, depth):
    body = b'{"user_metadata": ' + b"[" * depth + b"]" * depth + b"}"
    assert client.post(call, body)[0] == 422


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"ttl_seconds": Infinity}', "ttl_seconds is Infinity"),
        (b'{"ttl_seconds": 1e999}', "must be a whole number"),
        (b'{"ttl_seconds": ' + HUGE.encode() + b"}", "a whole number of 64 bits"),
        (b'{"ttl_seconds": 9223372036854775807}', "ttl_seconds is 9223372036854775807; it must be 3,600 to"),
        (b'{"ttl_seconds": ' + b"[" * 100_000, "nested too deeply"),
        (b"[]", "no JSON object"),
    ],
)
def test_a_time_to_live_is_refused_in_words(client, bodies, body, words):
    path = bodies(LoadRequest)["path"].removeprefix("tinker://")
    model, _, name = path.split("/")
    status, answer = client.post(f"training_runs/{model}/checkpoints/weights/{name}/ttl", body, method="PUT")
    assert status == 422
    assert words in answer["detail"]
    assert _hints_of(TtlRequest)


def test_fields_that_would_change_a_computation_are_refused_and_others_are_passed_over():
    head = {"model_id": "m", "seq_id": 1, "a_later_field": 1}
    assert read_request(InTurn, head) == InTurn(model_id="m", seq_id=1)
    from skyrl_engine_tinker.requests import OptimStepRequest

    with pytest.raises(RequestError, match="adam_params has the field 'amsgrad'"):
        read_request(OptimStepRequest, {**head, "adam_params": {"amsgrad": True}})
    sample = {"sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": []}}
    with pytest.raises(RequestError, match="sampling_params has the field 'min_p'"):
        read_request(SampleRequest, {**sample, "sampling_params": {"min_p": 0.1}})


@pytest.mark.parametrize("kind", [CreateModelRequest, CreateByLoadRequest])
def test_another_optimizer_is_refused_by_name(kind):
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "path": "p", "optimizer": True}
    with pytest.raises(RequestError, match="there is no optimizer 'dimuon' here"):
        read_request(kind, {**body, "optimizer_config": {"type": "dimuon"}})


@pytest.mark.parametrize("kind", [CreateModelRequest, SaveRequest])
def test_metadata_are_texts_and_have_a_bound(kind):
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "model_id": "m", "seq_id": 1}
    right = {"recipe": "by hand", "é": "ü"}
    assert read_request(kind, {**body, "user_metadata": right}).user_metadata == right
    with pytest.raises(RequestError, match=f"must be {METADATA_BYTES:,} or fewer"):
        read_request(kind, {**body, "user_metadata": {"a": "x" * METADATA_BYTES}})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_options_of_losses_are_finite(client, message, number):
    """`loss_fn_config` and its second form are the only numbers of a request that are neither JSON nor tensors."""
    doubles = {kind for kind in MESSAGES["ForwardBackwardRequest"].values() if "double" in kind[1] or "Loss" in kind[1]}
    assert doubles == {(5, "map double"), (7, "map LossConfigValue")}
    model, numbers = client.open_model(rank=2), iter(range(1, 100))
    options = [(name, key) for name, inputs in losses.INPUTS.items() for key in losses.OPTIONS if key in inputs]
    for name, key in [*options, ("skyrl-engine-losses:ppo", "clip_low")]:
        for second_form in (False, True):
            request = CLASSES["ForwardBackwardRequest"].FromString(message(model, next(numbers), loss=name))
            if second_form:
                request.loss_fn_config_v2[key].number = number
            else:
                request.loss_fn_config[key] = number
            error = client.complete("forward_backward", request.SerializeToString())["error"]
            assert f"the option '{key}' is {number}; it must be a finite number" in error
    client.finish(model)
