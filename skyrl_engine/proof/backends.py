"""Two backends over the same batch: where they agree, where they do not, and by which factor."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from skyrl_engine.contracts.values.outputs import BatchOutput
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.proof.comparison import Measurement, finite_or_infinite, relative_difference
from skyrl_engine.proof.depth import Depth
from skyrl_engine.proof.diagnosis import in_words

_EQUAL_FACTORS = 1e-3
"""Relative difference of factors that count as one."""

_SCORES = ("logprobs", "logits", "entropy", "values")
"""Outputs that the model makes, before any loss."""


@frozen
class Side:
    """One backend's numbers. `name` is what people call it: "megatron, tp 2 x pp 2"."""

    name: str
    measured: Measurement

    @property
    def gradient_norm(self) -> float:
        return float(np.sqrt(sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in self.measured.gradients.values())))


@frozen
class ParameterDifference:
    """Gradients of one parameter: ||a - b|| / ||b||, the norms, and the factor that brings b's closest to a's.

    `problem` says why two cannot be compared, such as "not finite on the first"; their difference is infinite, their factor NaN.
    """

    name: str
    relative: float
    norm_a: float
    norm_b: float
    factor: float
    problem: str | None = None

    @property
    def direction(self) -> float:
        """Cosine between the two, 1 where they differ by nothing but a factor."""
        return self.factor * self.norm_b / self.norm_a if self.norm_a and self.norm_b else float(self.norm_a == self.norm_b)


@frozen
class FieldDifference:
    """A per-token output: the largest difference over all tokens, where it is, and the largest of |a - b| / (1 + |b|)."""

    name: str
    largest: float
    relative: float
    sample: int
    token: int


@frozen(eq=False)
class BackendDifference:
    """`a` against `b`. `facts` are numbers of the run that a factor may turn out to be.

    `depth` is where forward passes part, for those who have looked. `untried` are the lengths in tokens, by the name that the model's
    configuration has for them, at which the model's function changes and that the rows do not lie on both sides of.
    """

    a: Side
    b: Side
    fields: tuple[FieldDifference, ...]
    parameters: tuple[ParameterDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    facts: Mapping[str, float] = field(factory=dict)
    tolerance: float = 1e-5
    depth: Depth | None = None
    untried: Mapping[str, int] = field(factory=dict)

    @property
    def agrees(self) -> bool:
        relative = [self.loss, *(parameter.relative for parameter in self.parameters), *(field.relative for field in self.fields)]
        return not (self.only_a or self.only_b) and max(relative) <= self.tolerance

    @property
    def loss(self) -> float:
        """Relative difference of the losses, by the magnitude of their tokens."""
        a, b = self.a.measured, self.b.measured
        return finite_or_infinite(abs(a.loss - b.loss) / max(abs(b.loss), b.magnitude, 1e-300))

    @property
    def worst(self) -> Sequence[ParameterDifference]:
        """Parameters by their difference, largest first."""
        return sorted(self.parameters, key=lambda parameter: -parameter.relative)

    @property
    def forward_differs(self) -> bool:
        """True where a score of the model differs: every gradient then does, too."""
        return any(field.relative > self.tolerance for field in self.fields if field.name in _SCORES)

    @property
    def first_layer(self) -> str | None:
        """The layer at which the difference enters. None where all parameters agree, or nothing names one layer.

        In the forward pass that is what `depth` found. Gradients flow from the head to the embedding, so where they alone differ it is the
        divergent layer nearest to the head.
        """
        if self.depth is not None:
            return self.depth.layer
        for layer, parameters in reversed(self._layers()):
            if any(parameter.relative > self.tolerance for parameter in parameters):
                return layer
        return None

    @property
    def explanation(self) -> str:
        """One sentence: what cannot be compared, where the difference enters, or a common factor and what it is."""
        if self.agrees:
            return "the backends agree"
        wrong = [parameter for parameter in self.parameters if parameter.relative > self.tolerance]
        differing = [field.name for field in self.fields if field.relative > self.tolerance]
        agree = not differing and self.loss <= self.tolerance
        outputs = "outputs agree" if agree else f"the passes differ in {', '.join(differing) or 'the loss'}"
        if self.forward_differs:
            return outputs if self.depth is None else f"{outputs}; {self.depth.in_words}"
        for names, which in ((self.only_b, "first"), (self.only_a, "second")):
            if names:
                return f"the {which} backend has no gradient of {names[0]}{_and_more(names)}"
        if problems := [gradient for gradient in wrong if gradient.problem]:
            return f"the gradient of {problems[0].name} is {problems[0].problem}{_and_more(problems)}"
        if not wrong:
            return f"gradients agree, but {outputs}"
        factors = np.array([gradient.factor for gradient in wrong])
        which = "every parameter" if len(wrong) == len(self.parameters) else f"{len(wrong)} of {len(self.parameters)} parameters"
        layers = list(dict.fromkeys(layer_of(gradient.name) for gradient in wrong))
        where = f", all in {layers[0]}," if len(layers) == 1 and len(wrong) < len(self.parameters) else ""
        aligned = all(abs(gradient.direction - 1) < 1e-4 for gradient in wrong) and np.ptp(factors) <= _EQUAL_FACTORS * abs(
            factors.mean()
        )
        if aligned and abs(factors.mean() - 1) > _EQUAL_FACTORS:
            return f"gradients of {which}{where} differ by one factor: {in_words(float(factors.mean()), self.facts)}"
        return f"{outputs}, gradients of {which}{where} do not agree; counted from the head, {self.first_layer} is the first to diverge"

    def _layers(self) -> list[tuple[str, list[ParameterDifference]]]:
        return [
            (name, list(parameters))
            for name, parameters in groupby(self.parameters, key=lambda parameter: layer_of(parameter.name))
        ]


def difference(
    a: Side, b: Side, *, facts: Mapping[str, float], tolerance: float = 1e-5, untried: Mapping[str, int] | None = None
) -> BackendDifference:
    """Compare two passes over the same samples. Parameters are matched by their Hugging Face names, in the order of `b`."""
    ours, theirs = a.measured.gradients, b.measured.gradients
    return BackendDifference(
        a=a,
        b=b,
        fields=tuple(_fields(a.measured.output, b.measured.output)),
        parameters=tuple(_parameter(name, ours[name], gradient) for name, gradient in theirs.items() if name in ours),
        only_a=tuple(name for name in ours if name not in theirs),
        only_b=tuple(name for name in theirs if name not in ours),
        facts=facts,
        tolerance=tolerance,
        untried=untried or {},
    )


def facts_of(a: Topology, b: Topology, *, micro_batches: Mapping[str, int], tokens: int) -> dict[str, float]:
    """Numbers that backends have been seen to multiply gradients by, or divide them by."""
    facts: dict[str, float] = {}
    for side, topology in (("a", a), ("b", b)):
        sizes = {
            "data-parallel": topology.dp,
            "tensor-parallel": topology.tp,
            "pipeline": topology.pp,
            "context-parallel": topology.cp,
        }
        facts[f"world size of {side}"] = float(topology.world_size)
        facts[f"micro-batches of a rank of {side}"] = float(micro_batches[side])
        facts |= {f"{name} size of {side}": float(size) for name, size in sizes.items()}
    facts["loss-carrying tokens"] = float(tokens)
    return {name: value for name, value in facts.items() if value != 1.0}


def layer_of(parameter: str) -> str:
    """The layer a parameter belongs to: `model.layers.3` for whatever is in it, else the module that holds it."""
    parts = parameter.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: numbered + 1] if numbered is not None else parts[:-1])


def _parameter(name: str, ours: npt.NDArray[np.floating], theirs: npt.NDArray[np.floating]) -> ParameterDifference:
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    norm_a, norm_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if problem := _problem(ours, theirs):
        return ParameterDifference(name, math.inf, norm_a, norm_b, math.nan, problem)
    factor = float(a @ b) / norm_b**2 if norm_b else 1.0
    return ParameterDifference(name, relative_difference(ours, theirs), norm_a, norm_b, factor)


def _problem(ours: npt.NDArray[np.floating], theirs: npt.NDArray[np.floating]) -> str | None:
    if ours.shape != theirs.shape:
        return f"of the shape {list(ours.shape)} on the first and {list(theirs.shape)} on the second"
    sides = [side for side, gradient in (("first", ours), ("second", theirs)) if not np.isfinite(gradient).all()]
    return f"not finite on the {' and the '.join(sides)}" if sides else None


def _and_more(named: Sequence[object]) -> str:
    return f", and so it is with {len(named) - 1} more" if len(named) > 1 else ""


def _fields(a: BatchOutput, b: BatchOutput) -> Iterator[FieldDifference]:
    place = {int(sample): row for row, sample in enumerate(a.sample_ids)}
    order = [place[int(sample)] for sample in b.sample_ids]
    for name in b.fields:
        if name not in a.fields:
            continue
        theirs = b.fields[name].values.astype(np.float64)
        apart = np.abs(a.fields[name].take(order).values - theirs)
        apart[~np.isfinite(apart)] = math.inf
        if not len(apart):
            continue
        worst = int(np.argmax(apart))
        row = int(np.searchsorted(b.scored.offsets, worst, side="right")) - 1
        with np.errstate(invalid="ignore"):
            relative = finite_or_infinite(float((apart / (1 + np.abs(theirs))).max()))
        yield FieldDifference(name, float(apart[worst]), relative, int(b.sample_ids[row]), int(b.scored.values[worst]))
