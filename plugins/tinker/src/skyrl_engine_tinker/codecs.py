"""Between bytes of the wire and columns of the engine. Arrays are views of the message's bytes until they are joined once."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_engine import BatchOutput
from skyrl_engine.contracts import Completion, SampleColumns
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.losses import COLUMNS, KINDS
from skyrl_engine_tinker.wire import CLASSES, FLOAT32, INT32, INT64, LENGTH, STOP

Array = npt.NDArray[Any]

INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": (),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), ("logprobs", "advantages")),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
}
"""Inputs that a loss must be given beside `target_tokens`."""

_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
OPTIONS: Mapping[str, Mapping[str, float]] = {
    "ppo": _BOUNDS,
    "cispo": _BOUNDS,
    "gspo": _BOUNDS,
    "dro": {"beta": 0.05},
}
"""Options of a loss and their defaults. Those of ppo are documented by the API; the others stand in its examples."""

COLUMN_OF = {
    "weights": "weights",
    "logprobs": "sampler_logprobs",
    "advantages": "advantages",
    "sequence_ratio_mask": "ratio_mask",
    "clip_low_threshold": "ratio_low",
    "clip_high_threshold": "ratio_high",
    "beta": "beta",
}
"""The column of the engine's batch that holds an input or an option."""

_DTYPES: Mapping[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}


def parsed(name: str, body: bytes) -> Any:
    """Parse a message. Raises RequestError for bytes that are none."""
    message = CLASSES[name]()
    try:
        message.ParseFromString(body)
    except Exception as error:
        raise RequestError(f"the body is no {name}: {error}") from error
    return message


def columns_of(request: Any, *, longest: int) -> SampleColumns:
    """Columns of a ForwardBackwardRequest: position i of a datum's N tokens predicts its target i.

    A sample is the N tokens and the last target, and all but its first token are response. So targets must be the tokens that follow.
    Raises RequestError naming the datum.
    """
    name = request.loss_fn
    if name not in KINDS:
        raise RequestError(f"there is no loss {name!r} here; there are {', '.join(KINDS)}")
    if not len(request.data):
        raise RequestError("the request has no datum")
    options = _options(request)
    rows: list[Array] = []
    columns: dict[str, list[Array]] = {column: [] for column in COLUMNS}
    for number, datum in enumerate(request.data):
        tokens = tokens_of(datum.model_input, f"datum {number}")
        if len(tokens) > longest:
            raise RequestError(f"datum {number} has {len(tokens):,} tokens; this server takes {longest:,}")
        rows.append(_with_last_target(tokens, datum, number))
        given = _inputs(datum, number, name, len(tokens))
        for column in COLUMNS:
            value = KINDS.index(name) if column == "loss_kind" else given.get(column, options.get(column, 0.0))
            columns[column].append(np.broadcast_to(np.asarray(value, dtype=np.float32), len(tokens)))
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return SampleColumns.create(
        input_ids=np.concatenate(rows),
        token_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        action_offsets=np.concatenate([[0], np.cumsum(lengths - 1)]).astype(np.int64),
        columns={column: np.concatenate(parts) for column, parts in columns.items()},
    )


def tokens_of(chunks: Any, where: str) -> Array:
    """int32[N]: the tokens of all chunks. Raises RequestError for images, for sound, and for nothing at all."""
    parts = []
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            raise RequestError(f"{where} has a chunk that is no text; this server trains and samples on tokens alone")
        parts.append(_view(chunk.encoded_text.tokens, _DTYPES[INT32], where))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not len(tokens):
        raise RequestError(f"{where} has no token")
    return tokens


def _options(request: Any) -> dict[str, float]:
    """Options of the loss by column: defaults, overwritten by those of the request."""
    known = OPTIONS.get(request.loss_fn, {})
    given: dict[str, float] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        if value.HasField("text"):
            raise RequestError(f"the option {key!r} of {request.loss_fn} is a text; it must be a number")
        given[key] = value.number
    for key, number in given.items():
        if key not in known:
            raise RequestError(f"{request.loss_fn} has no option {key!r}; it has {', '.join(known) or 'none'}")
        if not np.isfinite(number) or number < 0:
            raise RequestError(f"the option {key!r} of {request.loss_fn} is {number}; it must be a number of 0 or more")
    return {COLUMN_OF[key]: given.get(key, default) for key, default in known.items()}


def _with_last_target(tokens: Array, datum: Any, number: int) -> Array:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise RequestError(f"datum {number} has no target_tokens")
    targets = tensor(datum.loss_fn_inputs["target_tokens"], f"target_tokens of datum {number}")
    if targets.shape != tokens.shape:
        raise RequestError(
            f"target_tokens of datum {number} are {list(targets.shape)} for {len(tokens)} tokens; this server takes one per token"
        )
    if not np.array_equal(targets[:-1], tokens[1:]):
        place = int(np.argmax(targets[:-1] != tokens[1:]))
        raise RequestError(
            f"target {place} of datum {number} is the token {int(targets[place])}, and token {place + 1} is {int(tokens[place + 1])}; this "
            "server scores the tokens that follow (use weights of 0 for those that do not count)"
        )
    return np.append(tokens, np.int32(targets[-1]))


def _inputs(datum: Any, number: int, loss: str, length: int) -> dict[str, Array]:
    """Inputs by column, float32[length]; weights of 1 where cross_entropy is given none."""
    found: dict[str, Array] = {}
    allowed = {"weights", *INPUTS[loss], *OPTIONS.get(loss, {})}
    for name, message in datum.loss_fn_inputs.items():
        if name == "target_tokens":
            continue
        if name not in allowed:
            raise RequestError(
                f"datum {number} has the input {name!r}, which {loss} does not read; it reads {', '.join(sorted(allowed))}"
            )
        values = tensor(message, f"{name} of datum {number}").astype(np.float32)
        if values.shape != (length,):
            raise RequestError(f"{name} of datum {number} has the shape {list(values.shape)} for {length} tokens")
        if not np.isfinite(values).all():
            raise RequestError(f"{name} of datum {number} is not finite at place {int(np.argmin(np.isfinite(values)))}")
        found[COLUMN_OF[name]] = values
    if missing := [name for name in INPUTS[loss] if COLUMN_OF[name] not in found]:
        raise RequestError(f"datum {number} lacks {', '.join(missing)}, which {loss} reads")
    if loss != "cross_entropy" and "weights" in found:
        raise RequestError(f"datum {number} has weights, which {loss} does not read; put 0 into its advantages")
    return {"weights": np.ones(length, np.float32), **found} if loss == "cross_entropy" else found


def tensor(message: Any, where: str) -> Array:
    """Return a view of a dense tensor in its shape. Raises RequestError for sparse ones, and for sizes that do not fit."""
    if message.HasField("sparse_csr"):
        raise RequestError(f"{where} is sparse; this server takes dense tensors")
    if message.dtype not in _DTYPES:
        raise RequestError(f"{where} has the unknown type {message.dtype}")
    values = _view(message.dense, _DTYPES[message.dtype], where)
    shape = tuple(message.shape) or values.shape
    if min(shape, default=0) < 0 or int(np.prod(shape)) != values.size:
        raise RequestError(f"{where} has {values.size} numbers and the shape {list(shape)}")
    return values.reshape(shape)


def _view(data: bytes, dtype: np.dtype[Any], where: str) -> Array:
    if len(data) % dtype.itemsize:
        raise RequestError(f"{where} has {len(data)} bytes, no whole number of {dtype.name}")
    return np.frombuffer(data, dtype=dtype)


def encoded_outputs(output: BatchOutput, loss_sum: float) -> bytes:
    """Encode a ForwardBackwardOutput: `logprobs` of every datum at every position, and the metric `loss:sum`."""
    logprobs = output.on_actions("logprobs")
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(output))
    field = record.fields["logprobs"]
    field.data = np.ascontiguousarray(logprobs.values, dtype="<f4").tobytes()
    field.offsets = (logprobs.offsets * 4).astype("<i8").tobytes()
    field.dtype = FLOAT32
    message.metrics["loss:sum"] = loss_sum
    return bytes(message.SerializeToString())


def encoded_samples(completions: list[Completion], *, prompt_logprobs: bool) -> bytes:
    """Encode a SampleResponse of one prompt's completions; log-probabilities of the prompt are the first one's."""
    message = CLASSES["SampleResponse"]()
    for completion in completions:
        sequence = message.sequences.add(stop_reason=STOP if completion.finish == "stop" else LENGTH)
        sequence.tokens = completion.token_ids.astype("<i4").tobytes()
        sequence.logprobs = completion.logprobs.astype("<f4").tobytes()
        if (top := completion.top_logprobs) is not None:
            count, k = top.token_ids.shape
            sequence.topk_sampled_logprobs.token_ids = top.token_ids.astype("<i4").tobytes()
            sequence.topk_sampled_logprobs.logprobs = top.logprobs.astype("<f4").tobytes()
            sequence.topk_sampled_logprobs.k, sequence.topk_sampled_logprobs.length = k, count
    if prompt_logprobs and completions[0].prompt_logprobs is not None:
        message.prompt_logprobs = completions[0].prompt_logprobs.astype("<f4").tobytes()
    return bytes(message.SerializeToString())
