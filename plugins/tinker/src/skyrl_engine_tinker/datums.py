"""Datums of a request as columns of the engine: position i of a datum's N tokens predicts its target i, or each of its K targets."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from skyrl_engine.contracts import ENGINE_METRICS, BatchOutput, ColumnForm, Metric, SampleColumns, offsets_of
from skyrl_engine_tinker import losses
from skyrl_engine_tinker.codecs import Array, tensor, tokens_of
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.loss_request import LossRequest

TARGETS = "target_tokens"
WEIGHTS = "weights"


@frozen
class DatumLimits:
    """The largest datum in tokens, the most numbers of a column, and the vocabulary's size where it is known."""

    longest: int
    numbers: int
    vocabulary: int | None


@frozen(eq=False)
class DatumBatch:
    """Columns of a request's datums, the column of labels (None: the tokens that follow), and every datum's shape of targets."""

    columns: SampleColumns
    labels: str | None
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, request: Any, loss: LossRequest, reads: Mapping[str, ColumnForm], limits: DatumLimits, *, before: int = 0
    ) -> "DatumBatch":
        """Read the datums of a ForwardBackwardRequest for a loss that reads these columns.

        A sample is a datum's N tokens and its last target, all but the first token are response. The request's first datum is number `before`
        of the client's list, by which errors name a datum and samples are numbered. Raises RequestError naming the datum.
        """
        tokens = _read_tokens(request.data, limits, before)
        inputs = _Inputs(request.data, [len(ids) for ids in tokens], limits, before)
        targets = inputs.of(TARGETS, whole=True)
        if not loss.several:
            inputs.refuse_wide(TARGETS, targets, loss.name)
        for number, ids in enumerate(targets, before):
            _refuse_foreign(ids, limits.vocabulary, f"target {{index}} of datum {number}")
        inputs.refuse_unknown(_list_known_inputs(loss, reads), loss.name)
        columns = {column: inputs.column(loss, column, form) for column, form in reads.items()}
        if loss.several:
            inputs.refuse_other_shapes(WEIGHTS, targets)
        follow = all(np.array_equal(ids[:-1], own[1:]) for ids, own in zip(targets, tokens, strict=True))
        labelled = not (loss.several or follow)
        if labelled:
            columns[TARGETS] = np.concatenate(targets)[:, None].astype(np.int64)
        weighs = loss.defaults is None and WEIGHTS not in reads and any(WEIGHTS in datum.loss_fn_inputs for datum in request.data)
        lengths = np.array([len(ids) for ids in tokens], dtype=np.int64)
        last = [np.asarray(ids).reshape(len(ids), -1)[-1:, 0].astype(np.int32) for ids in targets]
        samples = SampleColumns.create(
            input_ids=np.concatenate([part for pair in zip(tokens, last, strict=True) for part in pair]),
            token_offsets=offsets_of(lengths + 1),
            action_offsets=offsets_of(lengths),
            loss_weight=inputs.join(WEIGHTS, "number", 1.0) if weighs else None,
            columns=columns,
            sample_ids=np.arange(before, before + len(tokens)),
        )
        return cls(samples, TARGETS if labelled else None, tuple(ids.shape for ids in targets))

    def logprobs(self, output: BatchOutput) -> list[Array]:
        """Log-probabilities of every datum at its targets, in their shape, float32."""
        if all(len(shape) == 1 for shape in self.shapes):
            return list(output.on_actions("logprobs"))
        target_indices = range(max(shape[1] for shape in self.shapes if len(shape) > 1))
        wide = [list(output.on_actions(f"logprobs_at:{TARGETS}[{index}]")) for index in target_indices]
        datums = (np.stack(logprobs, 1) for logprobs in zip(*wide, strict=True))
        return [
            logprobs[:, 0] if len(shape) == 1 else logprobs[:, : shape[1]]
            for logprobs, shape in zip(datums, self.shapes, strict=True)
        ]


def wire_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Metrics of a pass as the API names them, `name:reduction`: the summed `loss`, and what the loss itself measured."""
    own = {name: metric for name, metric in metrics.items() if name == "loss" or not (name in ENGINE_METRICS or ":" in name)}
    return {f"{name}:{metric.reduction}": metric.result for name, metric in own.items()}


def _read_tokens(data: Sequence[Any], limits: DatumLimits, before: int) -> list[Array]:
    """Token ids of every datum, int32[N]. Raises RequestError where they exceed the limits."""
    if not len(data):
        raise RequestError("the request has no datum")
    tokens = [tokens_of(datum.model_input, f"datum {number}") for number, datum in enumerate(data, before)]
    for number, ids in enumerate(tokens, before):
        if len(ids) > limits.longest:
            raise RequestError(f"datum {number} has {len(ids):,} tokens; this server takes {limits.longest:,}")
        _refuse_foreign(ids, limits.vocabulary, f"token {{index}} of datum {number}")
    return tokens


@frozen
class _Inputs:
    """The inputs of all datums by name, each checked against its datum's `lengths`. The first datum is number `before` of the client's list."""

    data: Sequence[Any]
    lengths: Sequence[int]
    limits: DatumLimits
    before: int

    def column(self, loss: LossRequest, column: str, form: ColumnForm) -> Array:
        """The column that a loss reads, from the input of its name. Raises RequestError for a datum that lacks it."""
        name = next((own for own, other in losses.COLUMNS.items() if other == column and loss.defaults), column)
        return self.join(name, form, None if loss.defaults is None else loss.defaults.get(name), loss.name)

    def join(self, name: str, form: ColumnForm, default: float | None, reader: str = "") -> Array:
        """[A] or [A, k] of one input, end to end; datums with fewer numbers per token have 0 for the rest."""
        arrays = self.of(name, whole=form == "token ids", default=default, reader=reader)
        if form == "number":
            self.refuse_wide(name, arrays, reader)
            return np.concatenate(arrays)
        width = max(array.shape[1] if array.ndim > 1 else 1 for array in arrays)
        if sum(self.lengths) * width > self.limits.numbers:
            raise RequestError(
                f"{name} are {sum(self.lengths):,} times {width:,} numbers; this server takes {self.limits.numbers:,} (serve.body_bytes)"
            )
        joined = np.zeros((sum(self.lengths), width), np.int64 if form == "token ids" else np.float32)
        for number, (begin, array) in enumerate(zip(offsets_of(self.lengths)[:-1], arrays, strict=True), self.before):
            if form == "token ids":
                _refuse_foreign(array, self.limits.vocabulary, f"number {{index}} of {name} of datum {number}")
            wide = array if array.ndim > 1 else array[:, None]
            joined[begin : begin + len(array), : wide.shape[1]] = wide
        return joined

    def of(self, name: str, *, whole: bool, default: float | None = None, reader: str = "every loss") -> list[Array]:
        """The input of every datum, [N] or [N, K]: whole numbers, or finite float32."""
        arrays, room = [], self.limits.numbers
        for number, (datum, length) in enumerate(zip(self.data, self.lengths, strict=True), self.before):
            where = f"{name} of datum {number}"
            if name not in datum.loss_fn_inputs:
                if default is None:
                    raise RequestError(f"datum {number} lacks {name}, which {reader} reads")
                shape = _get_shape(datum.loss_fn_inputs[TARGETS], length) if name == WEIGHTS else length
                arrays.append(np.full(shape, default, np.float32))
                continue
            values = tensor(datum.loss_fn_inputs[name], where, room)
            # sparse ones are small on the wire, every one of them
            room = max(room - values.size, 0)
            if values.ndim not in (1, 2) or len(values) != length or not values.size:
                raise RequestError(f"{where} has the shape {list(values.shape)} for {length} tokens")
            if whole and values.dtype.kind != "i":
                raise RequestError(f"{where} are {values.dtype.name}; token ids are whole numbers")
            if not np.isfinite(values).all():
                raise RequestError(f"{where} is not finite at index {int(np.argmin(np.isfinite(values)))}")
            arrays.append(values if whole else values.astype(np.float32))
        return arrays

    def refuse_wide(self, name: str, arrays: Sequence[Array], reader: str) -> None:
        for number, array in enumerate(arrays, self.before):
            if array.ndim > 1:
                raise RequestError(f"{name} of datum {number} are {list(array.shape)}; {reader} takes one per token")

    def refuse_other_shapes(self, name: str, due: Sequence[Array]) -> None:
        for number, (datum, array) in enumerate(zip(self.data, due, strict=True), self.before):
            if name in datum.loss_fn_inputs and _get_shape(datum.loss_fn_inputs[name], len(array)) != array.shape:
                raise RequestError(
                    f"{name} of datum {number} are {list(datum.loss_fn_inputs[name].shape)}, and its {TARGETS} {list(array.shape)}"
                )

    def refuse_unknown(self, known_names: Sequence[str], reader: str) -> None:
        """Refuse inputs that nobody reads: somebody believes that they count."""
        for number, datum in enumerate(self.data, self.before):
            if unread := sorted(set(datum.loss_fn_inputs) - {*known_names, TARGETS}):
                raise RequestError(
                    f"datum {number} has the input {unread[0]!r}, which {reader} does not read; it reads {', '.join(known_names) or 'no other'}"
                )


def _list_known_inputs(loss: LossRequest, reads: Mapping[str, ColumnForm]) -> list[str]:
    return sorted({WEIGHTS, *reads} if loss.defaults is None else loss.defaults)


def _get_shape(message: Any, length: int) -> tuple[int, ...]:
    """The shape of a tensor on the wire; one without is a vector."""
    return tuple(message.shape) or (length,)


def _refuse_foreign(ids: Array, vocabulary: int | None, where: str) -> None:
    """Raise RequestError for token ids that the model does not know; `where` holds the placeholder {index}."""
    is_wrong = (ids < 0) | (ids >= (np.iinfo(np.int32).max if vocabulary is None else vocabulary))
    if is_wrong.any():
        index = int(np.argmax(is_wrong))
        raise RequestError(
            f"{where.format(index=index)} is {int(ids.flat[index])}; the model knows {vocabulary or 'non-negative'} token ids"
        )
