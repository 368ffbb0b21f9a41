"""Between bytes of the wire and arrays. Arrays are views of the message's bytes until they are joined once."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts import Completion, offsets_of
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.wire import CLASSES, FLOAT32, INT32, INT64, LENGTH, STOP

Array = npt.NDArray[Any]

NOT_SCORED = -99_999.0
"""The SDK's mark of a place without scores (`tinker.types.topk_logprobs.MASK_LOGPROB`)."""

_DTYPES: Mapping[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}


def parse_message(name: str, body: bytes) -> Any:
    """Parse a message. Raises RequestError for bytes that are none."""
    message = CLASSES[name]()
    try:
        message.ParseFromString(body)
    except Exception as error:
        raise RequestError(f"the body is no {name}: {error}") from error
    return message


def tokens_of(chunks: Any, where: str) -> Array:
    """int32[N]: the tokens of all chunks. Raises RequestError for images, for sound, and for nothing at all."""
    parts = []
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            raise RequestError(f"{where} has a chunk that is no text; this server trains and samples on tokens alone")
        parts.append(_view_array(chunk.encoded_text.tokens, _DTYPES[INT32], where))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not len(tokens):
        raise RequestError(f"{where} has no token")
    return tokens


def tensor(message: Any, where: str, most: int) -> Array:
    """Return a tensor in its shape, a view where it is dense, and at most `most` numbers where it is sparse.

    Raises RequestError for sizes that do not fit.
    """
    if message.dtype not in _DTYPES:
        raise RequestError(f"{where} has the unknown type {message.dtype}")
    dtype, shape = _DTYPES[message.dtype], tuple(message.shape)
    if message.HasField("sparse_csr"):
        return _fill_sparse(message.sparse_csr, dtype, shape, where, most)
    values = _view_array(message.dense, dtype, where)
    shape = shape or values.shape
    if min(shape, default=0) < 0 or int(np.prod(shape)) != values.size:
        raise RequestError(f"{where} has {values.size} numbers and the shape {list(shape)}")
    return values.reshape(shape)


def _fill_sparse(message: Any, dtype: np.dtype[Any], shape: tuple[int, ...], where: str, most: int) -> Array:
    """Return a sparse matrix [N, K] with its zeros. Compressed rows: row i has the entries [`rows[i]`, `rows[i + 1]`) of values and columns."""
    index = _DTYPES[INT64]
    values, rows, columns = (
        _view_array(getattr(message, name), kind, where)
        for name, kind in (("values", dtype), ("crow_indices", index), ("col_indices", index))
    )
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > most:
        raise RequestError(
            f"{where} is sparse and has the shape {list(shape)}; there is room for {most:,} numbers (serve.body_bytes)"
        )
    sound = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns) and not (np.diff(rows) < 0).any()
    if not sound or columns.min(initial=0) < 0 or columns.max(initial=-1) >= shape[1]:
        raise RequestError(f"{where} is sparse, and its rows and columns do not fit the shape {list(shape)}")
    matrix = np.zeros(shape, dtype)
    matrix[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return matrix


def _view_array(data: bytes, dtype: np.dtype[Any], where: str) -> Array:
    if len(data) % dtype.itemsize:
        raise RequestError(f"{where} has {len(data)} bytes, no whole number of {dtype.name}")
    return np.frombuffer(data, dtype=dtype)


def encode_outputs(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Encode a ForwardBackwardOutput: `logprobs` of every datum, [N] or [N, K], and metrics by name."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=metrics)
    # a record's datums have one K
    for trailing, datums in groupby(logprobs, lambda array: array.shape[1:]):
        arrays = list(datums)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data = b"".join(array.astype("<f4").tobytes() for array in arrays)
        field.offsets = (offsets_of([array.size for array in arrays]) * 4).astype("<i8").tobytes()
        field.dtype = FLOAT32
        field.trailing_shape.extend(trailing)
    return bytes(message.SerializeToString())


def encode_samples(completions: list[Completion], *, last: int) -> bytes:
    """Encode a SampleResponse of one prompt's completions; the first one's scores of the prompt, of its `last` tokens."""
    message = CLASSES["SampleResponse"]()
    for completion in completions:
        sequence = message.sequences.add(stop_reason=STOP if completion.finish == "stop" else LENGTH)
        sequence.tokens = completion.token_ids.astype("<i4").tobytes()
        sequence.logprobs = completion.logprobs.astype("<f4").tobytes()
        if (top := completion.top_logprobs) is not None:
            _fill(sequence.topk_sampled_logprobs, top.token_ids, top.logprobs)
    own, top = completions[0].prompt_logprobs, completions[0].top_prompt_logprobs
    if own is not None:
        message.prompt_logprobs = np.where(np.arange(len(own)) < len(own) - last, np.nan, own).astype("<f4").tobytes()
    if top is not None:
        scored = (np.arange(len(top.logprobs)) >= max(1, len(top.logprobs) - last))[:, None]
        _fill(message.topk_prompt_logprobs, np.where(scored, top.token_ids, 0), np.where(scored, top.logprobs, NOT_SCORED))
    return bytes(message.SerializeToString())


def _fill(message: Any, token_ids: Array, logprobs: Array) -> None:
    """Write the k most likely tokens at n positions, both [n, k], into a TopkLogprobs."""
    message.token_ids, message.logprobs = token_ids.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes()
    message.length, message.k = token_ids.shape
