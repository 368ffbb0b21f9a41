"""Bodies of the calls that are JSON, one class per call, and the reader that holds a body against its class.

Fields of a class have these types, alone or with None: whole numbers of 64 bits, finite numbers, `bool`, texts, lists, objects of texts, and
further classes. Anything else is refused with the field's name and what it must be. Fields that a class does not have are passed over, since
newer clients send more; those of `_Closed` are refused, because a number that is not read would change what is computed.

A request that has its turn in a model's order is read in two halves: `InTurn` when it arrives, and the rest in its turn. So a mistake in the
rest is the request's answer, and leaves no hole in the order.
"""

import json
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
from attrs import field, frozen

from skyrl_engine_tinker.errors import RequestError

Body = TypeVar("Body")

METADATA_BYTES: Final = 65_536
"""The most bytes of `user_metadata` as JSON: it lies beside every checkpoint, and every list of checkpoints has it."""

LARGEST: Final = 2**63 - 1
"""The largest whole number of a request."""


class _Closed:
    """The base of classes that refuse fields which they do not have."""


def _require_small(_body: object, _field: object, metadata: Mapping[str, str] | None) -> None:
    if metadata is not None and (size := len(json.dumps(metadata))) > METADATA_BYTES:
        raise RequestError(f"user_metadata are {size:,} bytes of JSON; they must be {METADATA_BYTES:,} or fewer")


@frozen(kw_only=True)
class SessionRequest:
    """The body of `session_heartbeat`."""

    session_id: str


@frozen(kw_only=True)
class LoraTable(_Closed):
    """The field `lora_config`: a rank of 0 asks for full weights."""

    rank: int = 0
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


@frozen(kw_only=True)
class OptimizerTable:
    """The field `optimizer_config`."""

    type: str = "adamw"

    def __attrs_post_init__(self) -> None:
        if self.type != "adamw":
            raise RequestError(f"there is no optimizer {self.type!r} here; this server steps with adamw alone")


@frozen(kw_only=True)
class NewModelRequest:
    """Fields that create_model and a load_weights that makes a model have in common."""

    session_id: str
    model_seq_id: int
    optimizer_config: OptimizerTable | None = None
    user_metadata: Mapping[str, str] | None = field(default=None, validator=_require_small)

    @property
    def model_id(self) -> str:
        return f"{self.session_id}:train:{self.model_seq_id}"


@frozen(kw_only=True)
class CreateModelRequest(NewModelRequest):
    """The body of `create_model`."""

    base_model: str
    lora_config: LoraTable | None = None


@frozen(kw_only=True)
class ModelRequest:
    """The body of `unload_model` and `get_info`."""

    model_id: str


@frozen(kw_only=True)
class InTurn:
    """The fields that say when a request has its turn: requests of a model are counted from 1."""

    model_id: str
    seq_id: int

    def __attrs_post_init__(self) -> None:
        if self.seq_id < 1:
            raise RequestError(f"seq_id is {self.seq_id}; requests of a model are counted from 1")


@frozen(kw_only=True)
class AdamParams(_Closed):
    """The numbers of a step, with the defaults of the API; a `grad_clip_norm` of 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@frozen(kw_only=True)
class OptimStepRequest(InTurn):
    """The body of `optim_step`; clients of other optimizers send no `adam_params`."""

    adam_params: AdamParams | None = None


@frozen(kw_only=True)
class SaveRequest(InTurn):
    """The body of `save_weights`."""

    path: str | None = None
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] | None = field(default=None, validator=_require_small)


@frozen(kw_only=True)
class SaveExternalRequest(SaveRequest):
    """The body of `save_weights_external`."""

    age_encryption_recipients: tuple[str, ...] | None = None


@frozen(kw_only=True)
class SaveForSamplerRequest(SaveRequest):
    """The body of `save_weights_for_sampler`; without a path it makes a sampler of the present weights."""

    kind: str = "snapshot"


@frozen(kw_only=True)
class LoadRequest(InTurn):
    """The body of a `load_weights` into a model that is there."""

    path: str
    optimizer: bool
    optimizer_config: OptimizerTable | None = None


@frozen(kw_only=True)
class CreateByLoadRequest(NewModelRequest):
    """The body of a `load_weights` that makes a model."""

    path: str
    optimizer: bool
    base_model: str | None = None


@frozen(kw_only=True)
class WeightsInfoRequest:
    """The body of `weights_info`."""

    tinker_path: str


@frozen(kw_only=True)
class SamplingSessionRequest:
    """The body of `create_sampling_session`: a path, or a base model."""

    session_id: str
    model_path: str | None = None
    base_model: str | None = None


@frozen(kw_only=True)
class Chunk:
    """A part of a prompt; one of another type than text has no tokens."""

    type: str = "encoded_text"
    tokens: tuple[int, ...] = ()


@frozen(kw_only=True)
class PromptTable:
    """The field `prompt`."""

    chunks: tuple[Chunk, ...]


@frozen(kw_only=True)
class SamplingTable(_Closed):
    """The field `sampling_params`; `max_tokens` None or 0: all that there is room for, `top_k` below 1: all."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | tuple[str | int, ...] | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


@frozen(kw_only=True)
class SamplerTurn:
    """The fields that say which request of which sampler a sample is."""

    sampling_session_id: str
    seq_id: int


@frozen(kw_only=True)
class SampleRequest(SamplerTurn):
    """The body of `asample`. The last three fields ask for what this server does not have."""

    prompt: PromptTable
    sampling_params: SamplingTable
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int | None = None
    topk_sample_logprobs: int | None = None
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int | None = None
    record_stability_info: bool | None = None


@frozen(kw_only=True)
class RetrieveRequest:
    """The body of `retrieve_future`."""

    request_id: str


@frozen(kw_only=True)
class TtlRequest:
    """The body of a change of a checkpoint's time to live; None: for ever."""

    ttl_seconds: int | None = None


def read_request(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """Read an object of parsed JSON as one of a class of this file. Raises RequestError that names the field."""
    body: Body = _read_object(kind, fields, "")
    return body


def _read_object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _refusal(where, value, "an object")
    hints, given = _hints_of(kind), {}
    if issubclass(kind, _Closed) and (unknown := sorted(value.keys() - hints.keys())):
        raise RequestError(
            f"{where} has the field {unknown[0][:60]!r}, which this server does not read; it reads {', '.join(hints)}"
        )
    for attribute in attrs.fields(kind):
        name = f"{where}.{attribute.name}" if where else attribute.name
        if attribute.name in value:
            given[attribute.name] = _read_value(hints[attribute.name], value[attribute.name], name)
        elif attribute.default is attrs.NOTHING:
            raise RequestError(f"the request lacks {name}")
    return kind(**given)


@cache
def _hints_of(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {attribute.name: hints[attribute.name] for attribute in attrs.fields(kind)}


def _read_value(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _read_union(get_args(hint), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _refusal(where, value, "a list")
        of_items = get_args(hint)[0]
        if of_items is int and set(map(type, value)) == {int} and min(value) >= -LARGEST and max(value) <= LARGEST:
            # a prompt may have many tokens
            return tuple(value)
        return tuple(_read_value(of_items, item, f"{where}[{place}]") for place, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _refusal(where, value, "an object of texts")
        return {
            _read_text(key, where): _read_value(get_args(hint)[1], item, f"{where}[{key[:60]!r}]") for key, item in value.items()
        }
    if attrs.has(hint):
        return _read_object(hint, value, where)
    return _READERS[hint](value, where)


def _read_union(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    """Read a value as the one of several types that has its JSON type."""
    if value is None and types.NoneType in hints:
        return None
    several = [hint for hint in hints if hint is not types.NoneType]
    matching = [hint for hint in several if isinstance(value, _JSON_TYPES.get(get_origin(hint) or hint, object))]
    return _read_value(matching[0] if matching else several[0], value, where)


def _read_whole_number(value: Any, where: str) -> int:
    if type(value) is not int:
        raise _refusal(where, value, "a whole number")
    if not -LARGEST <= value <= LARGEST:
        raise RequestError(f"{where} is a number of {len(str(abs(value)))} digits; it must be a whole number of 64 bits")
    return value


def _read_number(value: Any, where: str) -> float:
    if type(value) not in (int, float):
        raise _refusal(where, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{where} is {number}; it must be a finite number")
    return number


def _read_switch(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _refusal(where, value, "true or false")
    return value


def _read_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _refusal(where, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is no text: it has one half of a surrogate pair") from error
    return value


_READERS: Final = {int: _read_whole_number, float: _read_number, bool: _read_switch, str: _read_text}
_JSON_TYPES: Final = {tuple: list, str: str, int: int}


def _refusal(where: str, value: Any, due: str) -> RequestError:
    given = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else json.dumps(value)
    return RequestError(f"{where or 'the body'} is {given[:100]}; it must be {due}")
