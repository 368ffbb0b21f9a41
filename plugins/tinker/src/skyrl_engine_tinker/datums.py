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
        cls, request: Any, asked: LossRequest, reads: Mapping[str, ColumnForm], limits: DatumLimits, *, before: int = 0
    ) -> "DatumBatch":
        """Read the datums of a ForwardBackwardRequest for a loss that reads these columns.

        A sample is a datum's N tokens and its last target, all but the first token are response. The request's first datum is number `before`
        of the client's list, by which errors name a datum and samples are numbered. Raises RequestError naming the datum.
        """
        tokens = _tokens(request.data, limits, before)
        inputs = _Inputs(request.data, [len(each) for each in tokens], limits, before)
        targets = inputs.of(TARGETS, whole=True)
        if not asked.several:
            inputs.refuse_wide(TARGETS, targets, asked.name)
        for number, each in enumerate(targets, before):
            _refuse_foreign(each, limits.vocabulary, f"target {{place}} of datum {number}")
        inputs.refuse_unknown(_list_known_inputs(asked, reads), asked.name)
        columns = {column: inputs.column(asked, column, form) for column, form in reads.items()}
        if asked.several:
            inputs.refuse_other_shapes(WEIGHTS, targets)
        follow = all(np.array_equal(each[:-1], own[1:]) for each, own in zip(targets, tokens, strict=True))
        labelled = not (asked.several or follow)
        if labelled:
            columns[TARGETS] = np.concatenate(targets)[:, None].astype(np.int64)
        weighs = asked.defaults is None and WEIGHTS not in reads and any(WEIGHTS in datum.loss_fn_inputs for datum in request.data)
        lengths = np.array([len(each) for each in tokens], dtype=np.int64)
        last = [np.asarray(each).reshape(len(each), -1)[-1:, 0].astype(np.int32) for each in targets]
        made = SampleColumns.create(
            input_ids=np.concatenate([part for pair in zip(tokens, last, strict=True) for part in pair]),
            token_offsets=offsets_of(lengths + 1),
            action_offsets=offsets_of(lengths),
            loss_weight=inputs.join(WEIGHTS, "number", 1.0) if weighs else None,
            columns=columns,
            sample_ids=np.arange(before, before + len(tokens)),
        )
        return cls(made, TARGETS if labelled else None, tuple(each.shape for each in targets))

    def logprobs(self, output: BatchOutput) -> list[Array]:
        """Log-probabilities of every datum at its targets, in their shape, float32."""
        if all(len(shape) == 1 for shape in self.shapes):
            return list(output.on_actions("logprobs"))
        places = range(max(shape[1] for shape in self.shapes if len(shape) > 1))
        wide = [list(output.on_actions(f"logprobs_at:{TARGETS}[{place}]")) for place in places]
        datums = (np.stack(each, 1) for each in zip(*wide, strict=True))
        return [each[:, 0] if len(shape) == 1 else each[:, : shape[1]] for each, shape in zip(datums, self.shapes, strict=True)]


def wire_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Metrics of a pass as the API names them, `name:reduction`: the summed `loss`, and what the loss itself measured."""
    own = {name: each for name, each in metrics.items() if name == "loss" or not (name in ENGINE_METRICS or ":" in name)}
    return {f"{name}:{each.reduction}": each.result for name, each in own.items()}


def _tokens(data: Sequence[Any], limits: DatumLimits, before: int) -> list[Array]:
    """int32[N] of every datum, held against the limits."""
    if not len(data):
        raise RequestError("the request has no datum")
    tokens = [tokens_of(datum.model_input, f"datum {number}") for number, datum in enumerate(data, before)]
    for number, each in enumerate(tokens, before):
        if len(each) > limits.longest:
            raise RequestError(f"datum {number} has {len(each):,} tokens; this server takes {limits.longest:,}")
        _refuse_foreign(each, limits.vocabulary, f"token {{place}} of datum {number}")
    return tokens


@frozen
class _Inputs:
    """The inputs of all datums by name, each checked against its datum's `lengths`. The first datum is number `before` of the client's list."""

    data: Sequence[Any]
    lengths: Sequence[int]
    limits: DatumLimits
    before: int

    def column(self, asked: LossRequest, column: str, form: ColumnForm) -> Array:
        """The column that a loss reads, from the input of its name. Raises RequestError for a datum that lacks it."""
        name = next((own for own, other in losses.COLUMNS.items() if other == column and asked.defaults), column)
        return self.join(name, form, None if asked.defaults is None else asked.defaults.get(name), asked.name)

    def join(self, name: str, form: ColumnForm, default: float | None, reader: str = "") -> Array:
        """[A] or [A, k] of one input, end to end; datums with fewer numbers per token have 0 for the rest."""
        found = self.of(name, whole=form == "token ids", default=default, reader=reader)
        if form == "number":
            self.refuse_wide(name, found, reader)
            return np.concatenate(found)
        width = max(each.shape[1] if each.ndim > 1 else 1 for each in found)
        if sum(self.lengths) * width > self.limits.numbers:
            raise RequestError(
                f"{name} are {sum(self.lengths):,} times {width:,} numbers; this server takes {self.limits.numbers:,} (serve.body_bytes)"
            )
        joined = np.zeros((sum(self.lengths), width), np.int64 if form == "token ids" else np.float32)
        for number, (begin, each) in enumerate(zip(offsets_of(self.lengths)[:-1], found, strict=True), self.before):
            if form == "token ids":
                _refuse_foreign(each, self.limits.vocabulary, f"number {{place}} of {name} of datum {number}")
            wide = each if each.ndim > 1 else each[:, None]
            joined[begin : begin + len(each), : wide.shape[1]] = wide
        return joined

    def of(self, name: str, *, whole: bool, default: float | None = None, reader: str = "every loss") -> list[Array]:
        """The input of every datum, [N] or [N, K]: whole numbers, or finite float32."""
        found, room = [], self.limits.numbers
        for number, (datum, length) in enumerate(zip(self.data, self.lengths, strict=True), self.before):
            where = f"{name} of datum {number}"
            if name not in datum.loss_fn_inputs:
                if default is None:
                    raise RequestError(f"datum {number} lacks {name}, which {reader} reads")
                shape = _shape(datum.loss_fn_inputs[TARGETS], length) if name == WEIGHTS else length
                found.append(np.full(shape, default, np.float32))
                continue
            values = tensor(datum.loss_fn_inputs[name], where, room)
            # sparse ones are small on the wire, every one of them
            room = max(room - values.size, 0)
            if values.ndim not in (1, 2) or len(values) != length or not values.size:
                raise RequestError(f"{where} has the shape {list(values.shape)} for {length} tokens")
            if whole and values.dtype.kind != "i":
                raise RequestError(f"{where} are {values.dtype.name}; token ids are whole numbers")
            if not np.isfinite(values).all():
                raise RequestError(f"{where} is not finite at place {int(np.argmin(np.isfinite(values)))}")
            found.append(values if whole else values.astype(np.float32))
        return found

    def refuse_wide(self, name: str, found: Sequence[Array], reader: str) -> None:
        for number, each in enumerate(found, self.before):
            if each.ndim > 1:
                raise RequestError(f"{name} of datum {number} are {list(each.shape)}; {reader} takes one per token")

    def refuse_other_shapes(self, name: str, due: Sequence[Array]) -> None:
        for number, (datum, each) in enumerate(zip(self.data, due, strict=True), self.before):
            if name in datum.loss_fn_inputs and _shape(datum.loss_fn_inputs[name], len(each)) != each.shape:
                raise RequestError(
                    f"{name} of datum {number} are {list(datum.loss_fn_inputs[name].shape)}, and its {TARGETS} {list(each.shape)}"
                )

    def refuse_unknown(self, known: Sequence[str], reader: str) -> None:
        """Refuse inputs that nobody reads: somebody believes that they count."""
        for number, datum in enumerate(self.data, self.before):
            if unread := sorted(set(datum.loss_fn_inputs) - {*known, TARGETS}):
                raise RequestError(
                    f"datum {number} has the input {unread[0]!r}, which {reader} does not read; it reads {', '.join(known) or 'no other'}"
                )


def _list_known_inputs(asked: LossRequest, reads: Mapping[str, ColumnForm]) -> list[str]:
    return sorted({WEIGHTS, *reads} if asked.defaults is None else asked.defaults)


def _shape(message: Any, length: int) -> tuple[int, ...]:
    """The shape of a tensor on the wire; one without is a vector."""
    return tuple(message.shape) or (length,)


def _refuse_foreign(ids: Array, vocabulary: int | None, where: str) -> None:
    """Raise RequestError for token ids that the model does not know; `where` names the {place}."""
    wrong = (ids < 0) | (ids >= (np.iinfo(np.int32).max if vocabulary is None else vocabulary))
    if wrong.any():
        place = int(np.argmax(wrong))
        raise RequestError(
            f"{where.format(place=place)} is {int(ids.flat[place])}; the model knows {vocabulary or 'non-negative'} token ids"
        )
