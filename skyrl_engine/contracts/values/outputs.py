"""Outputs of a rank: flat per-token values keyed by sample id, and metrics that declare their reduction. Nothing else leaves it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from attrs import Factory, field, frozen
from attrs.validators import in_

from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged, join_segments, offsets_of, take_segments
from skyrl_engine.contracts.values.returned import describe_returned, require_returned, require_table, require_vector
from skyrl_engine.contracts.values.topology import RankCoords
from skyrl_engine.errors import ContractError, ResultError

if TYPE_CHECKING:
    import torch

Reduction = Literal["sum", "mean", "min", "max"]
PADDING_SAMPLE = -1
FIRST_RANK = RankCoords()

ENGINE_METRICS = frozenset(
    (
        "loss",
        "grad_norm",
        "learning_rate",
        "samples",
        "tokens",
        "loss_tokens",
        "padding_share",
        "shared_share",
        "epoch",
        "compile_seconds",
        "tokens_per_second",
        "evaluation_loss",
    )
)
"""Names under which the engine reports its own metrics; a loss gives its metrics other names."""

ENGINE_PREFIXES = (
    *("loss/", "by_source/", "sample_share/", "token_share/"),
    *("objective/", "corrections/", "reward/", "rollout/", "policy/", "time/", "evaluation/"),
)
"""Beginnings of such names."""


@frozen(eq=False)
class LateNumber:
    """A number that a device still computes. `read` waits for it, and may be called again."""

    read: Callable[[], float]

    def __float__(self) -> float:
        return self.read()


class LateFields(Mapping[str, Ragged]):
    """Fields of an output that a device still computes: their names are known, and the first one asked for waits for all.

    They travel between processes as they are when they have been waited for.
    """

    def __init__(self, names: Iterable[str], read: Callable[[], Mapping[str, Ragged]]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> Ragged:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._read()),)


def _number(value: Any) -> Any:
    """Keep what a device still computes, out of the graph; anything else is a number now."""
    if isinstance(value, LateNumber):
        return value
    if hasattr(value, "detach"):
        value = value.detach()
        if value.numel() == 1:
            return value
    return float(value)


@frozen
class Metric:
    """One number on its way to the report.

    `reduction` says how parts combine. A mean travels as sum and `count` and is divided once, at the end; for the others `count` is
    unused. Give a tensor as it is: the host waits for it when `value` or `count` is read, which the engine does behind the backward pass.
    Both are plain floats to whoever reads them, and where the metric travels between ranks.
    """

    reduction: Reduction = field(validator=in_(("sum", "mean", "min", "max")))
    _value: Any = field(converter=_number, eq=float)
    _count: Any = field(default=1.0, converter=_number, eq=float)

    @property
    def value(self) -> float:
        """The number, the sum of a mean; waits where a device still computes it."""
        return float(self._value)

    @property
    def count(self) -> float:
        """The number of things summed in a mean; waits where a device still computes it."""
        return float(self._count)

    def replace_tensors(self, replace: "Callable[[Any], LateNumber | float]") -> "Metric":
        """This metric with `replace(tensor)` in the place of each tensor that it holds."""
        value, count = (replace(held) if hasattr(held, "detach") else held for held in (self._value, self._count))
        return Metric(self.reduction, value, count)

    def __reduce__(self) -> tuple[Any, ...]:
        return Metric, (self.reduction, self.value, self.count)

    def __repr__(self) -> str:
        return f"Metric(reduction={self.reduction!r}, value={self.value!r}, count={self.count!r})"

    @classmethod
    def mean(cls, total: "float | torch.Tensor", count: "float | torch.Tensor") -> "Metric":
        """A mean from its sum and the number of things summed."""
        return cls("mean", total, count)

    @classmethod
    def sum(cls, value: "float | torch.Tensor") -> "Metric":
        return cls("sum", value)

    @classmethod
    def min(cls, value: "float | torch.Tensor") -> "Metric":
        return cls("min", value)

    @classmethod
    def max(cls, value: "float | torch.Tensor") -> "Metric":
        return cls("max", value)

    @classmethod
    def combine(cls, parts: Iterable["Metric"]) -> "Metric":
        """All parts as one; they declare the same reduction. A NaN in any part shows in the result."""
        metrics = list(parts)
        assert metrics, "nothing to combine"
        reduction = metrics[0].reduction
        assert all(metric.reduction == reduction for metric in metrics), "one metric with several reductions"
        values = np.array([metric.value for metric in metrics], dtype=np.float64)
        match reduction:
            case "sum":
                return cls("sum", values.sum())
            case "mean":
                return cls("mean", values.sum(), sum(metric.count for metric in metrics))
            case "min":
                return cls("min", values.min())  # NumPy's, not Python's: a NaN must show whatever its place
            case "max":
                return cls("max", values.max())

    @property
    def result(self) -> float:
        """The number to report; NaN for a mean over nothing."""
        if self.reduction != "mean":
            return self.value
        return self.value / self.count if self.count else float("nan")


def combine_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics by name over several parts; a name may be missing from some of them.

    Raises ContractError, naming the metric, when parts declare different reductions for it.
    """
    metrics_of_name: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            metrics_of_name.setdefault(name, []).append(metric)
    for name, metrics in metrics_of_name.items():
        reductions = sorted({metric.reduction for metric in metrics})
        if len(reductions) > 1:
            raise ContractError(
                f"the metric {name!r} is declared as {' and as '.join(reductions)}",
                remedy="Let every part that reports a metric declare the same reduction, or give the two different names",
            )
    return {name: Metric.combine(metrics) for name, metrics in metrics_of_name.items()}


def refuse_other_metrics(label: str, metrics: Mapping[str, Any]) -> None:
    """Raise ResultError for what is no `Metric`, and for a name under which the engine reports its own."""
    if not isinstance(metrics, Mapping):
        raise ResultError(
            f"{label} returned {describe_returned(metrics)} as metrics", remedy="Return a dict from names to Metric, empty for none"
        )
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise ResultError(
                f"{label} returned the metric {name!r} as {type(metric).__name__}",
                remedy="Return a Metric, such as Metric.mean(total, count), which says how its parts combine",
            )
        if not isinstance(name, str):
            raise ResultError(f"{label} returned a metric called {name!r}", remedy="Give it a name of letters")
        if name in ENGINE_METRICS or name.startswith(ENGINE_PREFIXES):
            raise ResultError(
                f"{label} returned a metric called {name!r}, under which the engine reports its own", remedy="Give it another name"
            )


def results_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers to report, by name."""
    return {name: metric.result for name, metric in metrics.items()}


@frozen(eq=False)
class RankOutput:
    """Outputs of some samples on one rank.

    `fields[name]` are float32 values, flat over scored tokens with one segment per sample (empty where the call was asked for no
    per-token outputs); `LateFields` where a device still computes them. `scored` int32, with the same offsets, is each value's place on its
    sample's action axis; `action_lengths` int64[n] is that axis' length. A sample id of `PADDING_SAMPLE` (-1) marks a padding sample.
    """

    sample_ids: IntArray
    action_lengths: IntArray
    scored: Ragged
    fields: Mapping[str, Ragged] = Factory(dict)
    metrics: Mapping[str, Metric] = Factory(dict)
    coords: RankCoords = FIRST_RANK

    def __attrs_post_init__(self) -> None:
        assert len(self.sample_ids) == len(self.action_lengths) == len(self.scored), "arrays of different numbers of samples"
        if isinstance(self.fields, LateFields):
            return  # made with these offsets, and not to be waited for here
        offsets = self.scored.offsets
        for name, ragged in self.fields.items():
            same = ragged.offsets is offsets or np.array_equal(ragged.offsets, offsets)
            assert same, f"{name} does not hold one value per scored token"

    @classmethod
    def empty(cls, coords: RankCoords = FIRST_RANK) -> "RankOutput":
        """No sample at all: what a rank without collected outputs returns."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, Ragged(np.zeros(0, dtype=np.int32), offsets_of([])), coords=coords)

    @classmethod
    def concat(
        cls, parts: Sequence["RankOutput"], coords: RankCoords = FIRST_RANK, *, order: IntArray | None = None
    ) -> "RankOutput":
        """Micro-batches of one rank, or ranks of one call, as one output; samples in the order given, metrics combined.

        `order` numbers samples over all parts, end to end, each at most once: they are put in that order, and those that do not occur are
        dropped. Parts that hold samples hold the same fields; a part without samples may hold any.
        """
        if not parts:
            return cls.empty(coords)
        filled = [part for part in parts if len(part.sample_ids)] or [parts[0]]
        names = filled[0].fields.keys()
        for part in filled:
            assert part.fields.keys() == names, f"parts hold different fields: {sorted(names)} and {sorted(part.fields)}"
        arrays = [[part.scored.values, *(part.fields[name].values for name in names)] for part in filled]
        offsets = [part.scored.offsets for part in filled]
        ids = np.concatenate([part.sample_ids for part in filled])
        lengths = np.concatenate([part.action_lengths for part in filled])
        if order is None:
            scored, *values = (np.concatenate(pieces) for pieces in zip(*arrays, strict=True))
            joined = offsets_of(np.concatenate([array[1:] - array[:-1] for array in offsets]))  # np.diff costs more
        else:
            ids, lengths = ids[order], lengths[order]
            (scored, *values), joined = join_segments(arrays, offsets, order)
        return cls(
            sample_ids=ids,
            action_lengths=lengths,
            scored=Ragged(scored, joined),
            fields={name: Ragged(field_values, joined) for name, field_values in zip(names, values, strict=True)},
            metrics=combine_metrics([part.metrics for part in parts]),
            coords=coords,
        )

    def take(self, samples: npt.ArrayLike) -> "RankOutput":
        """The chosen samples (positions, not ids) in the chosen order; metrics are kept as they are."""
        chosen = np.asarray(samples, dtype=np.int64)
        (scored, *values), offsets = take_segments(
            [self.scored.values, *(ragged.values for ragged in self.fields.values())], self.scored.offsets, chosen
        )
        return RankOutput(
            self.sample_ids[chosen],
            self.action_lengths[chosen],
            Ragged(scored, offsets),
            {name: Ragged(taken, offsets) for name, taken in zip(self.fields, values, strict=True)},
            self.metrics,
            self.coords,
        )


@frozen(eq=False)
class BatchOutput:
    """Outputs of a whole batch in the caller's sample order. Arrays as in `RankOutput`; `metrics` are reduced over ranks."""

    sample_ids: IntArray
    action_lengths: IntArray
    scored: Ragged
    fields: Mapping[str, Ragged] = Factory(dict)
    metrics: Mapping[str, Metric] = Factory(dict)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def on_actions(self, name: str, fill: float = 0.0) -> Ragged:
        """Field `name` expanded to the action axis, float32[A] with offsets over actions; unscored tokens hold `fill`."""
        offsets = offsets_of(self.action_lengths)
        values: AnyArray = np.full(offsets[-1], fill, dtype=np.float32)
        places = np.repeat(offsets[:-1], self.scored.lengths) + self.scored.values
        values[places] = self.fields[name].values
        return Ragged(values, offsets)

    def to_list(self) -> list[dict[str, Any]]:
        """One dict per sample with plain lists, for people; never used on the hot path. Merger `list` keeps what it makes."""
        return [
            {"sample_id": int(sample_id), **{name: ragged[i].tolist() for name, ragged in self.fields.items()}}
            for i, sample_id in enumerate(self.sample_ids)
        ]


def as_rank_output(label: str, method: str, result: object) -> RankOutput:
    """Take what a backend's pass returned. Raises ResultError, naming backend and method, for what is no RankOutput of such arrays."""
    output = require_returned(label, method, result, RankOutput)
    _require_arrays(label, method, output)
    require_returned(label, f"coords of {method}", output.coords, RankCoords)
    return output


def as_batch_output(label: str, result: object) -> BatchOutput:
    """Take what a merger returned. Raises ResultError, naming the merger, for what is no BatchOutput of such arrays."""
    output = require_returned(label, "merge", result, BatchOutput)
    _require_arrays(label, "merge", output)
    return output


def _require_arrays(label: str, method: str, output: RankOutput | BatchOutput) -> None:
    require_vector(label, method, "sample_ids", output.sample_ids, np.int64)
    count = len(output.sample_ids)
    require_vector(label, method, "action_lengths", output.action_lengths, np.int64, count)
    scored = require_returned(label, f"scored of {method}", output.scored, Ragged)
    require_vector(label, method, "scored.values", scored.values, np.int32)
    require_table(label, method, "metrics", output.metrics, Metric)
    segments = {"scored": scored, **require_table(label, method, "fields", output.fields, Ragged)}
    for name, ragged in segments.items():
        if len(ragged) != count or not (ragged.offsets is scored.offsets or np.array_equal(ragged.offsets, scored.offsets)):
            raise ResultError(
                f"{label} returned {name} of {len(ragged)} segments for {count} samples from {method}, or other segments than scored",
                remedy=f"Return one segment per sample, and in {name} one value per scored token",
            )
        if name != "scored" and (ragged.values.dtype != np.float32 or ragged.values.ndim != 1):
            raise ResultError(
                f"{label} returned {describe_returned(ragged.values)} as values of {name} from {method}",
                remedy="Return float32 values, one per scored token",
            )
