"""Hold any trainer to the promise that its gradient does not depend on how a batch is cut.

The trainer is a function that computes the gradient of one optimizer step over given rows in a given cut. Its gradients are compared with those
of a definition, or of its own whole batch; the cause of a difference is found as `skyrl-engine prove` finds it.

    proof = prove_trainer(gradients, rows, model=model, definition=define_token_mean(model, rows))
    print(proof)
    proof.assert_holds()
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.reducer import BatchStructure
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.errors import DataError, ResultError, UnsupportedError
from skyrl_engine.proof.comparison import Gradients, not_finite
from skyrl_engine.proof.diagnosis import Pieces, explain, flat
from skyrl_engine.proof.forwards import Forward, watch_forwards
from skyrl_engine.proof.plants import Cut
from skyrl_engine.proof.prover import TOLERANCE
from skyrl_engine.proof.row_kinds import Row, check_rows, find_trained_tokens, list_groups
from skyrl_engine.proof.trainer_cuts import TrainerCut, standard_cuts

SMALL = 1e-2
"""Part of the whole gradient's norm below which a parameter's own norm is not what its difference is divided by: what cancels to nothing, such
as the gradient of a bias of keys, is rounding alone, and rounding follows the whole."""


@frozen(eq=False)
class TrainerPass:
    """A trainer's result from ranks that this process cannot watch: the gradients, and every forward pass of every rank."""

    gradients: Gradients
    forwards: Sequence[Forward]


GradientFunction = Callable[[Sequence[Row], TrainerCut], "Gradients | TrainerPass"]


@frozen
class TrainerVerdict:
    """One cut's verdict. `difference` is the worst of any parameter, relative, None where the trainer refused the cut."""

    cut: TrainerCut
    difference: float | None
    holds: bool
    explanation: str = ""
    refused: bool = False

    def __str__(self) -> str:
        mark = "ok" if self.holds else "refused" if self.refused else "WRONG"
        line = f"{mark:8}{self.cut.name:53}"
        if self.difference is not None:
            line += f"  gradient {self.difference:7.1e}"
        return f"{line}  {self.explanation}".rstrip()


@frozen
class TrainerProof:
    """The verdicts on all cuts. It prints as a table."""

    verdicts: Sequence[TrainerVerdict]

    def __str__(self) -> str:
        wrong, refused = (len(part) for part in (self.wrong, [verdict for verdict in self.verdicts if verdict.refused]))
        total = len(self.verdicts)
        held = "The one cut that was computed gives" if total - refused == 1 else f"All {total - refused} cuts give"
        end = f"{wrong} of {total} cuts give another gradient." if wrong else f"{held} the same gradient."
        if refused:
            end += f" The trainer refused {refused}."
        return "\n".join([*map(str, self.verdicts), "", end])

    @property
    def wrong(self) -> Sequence[TrainerVerdict]:
        """The cuts that do not give the gradient, or were not computed as they say."""
        return [verdict for verdict in self.verdicts if not verdict.holds and not verdict.refused]

    def assert_holds(self) -> None:
        """Raise AssertionError with the table unless every cut holds that the trainer does not refuse, and one does at least."""
        if self.wrong or not any(verdict.holds for verdict in self.verdicts):
            raise AssertionError(f"the gradient depends on how the batch is cut, or no cut was computed:\n{self}")


def prove_trainer(
    gradients: GradientFunction,
    rows: Sequence[Row],
    *,
    cuts: Sequence[TrainerCut] | None = None,
    model: torch.nn.Module | None = None,
    definition: Pieces | None = None,
    tolerance: float | None = None,
) -> TrainerProof:
    """Compare the gradient of one optimizer step over `rows` in every cut.

    `gradients(rows, cut)` returns an array, float32 or float64, for every trained parameter by name, as the optimizer would get it; it leaves
    weights as they are, and raises UnsupportedError for a cut that it cannot do. `rows` are of one kind of `row_kinds`: supervised with
    `input_ids` and `labels`, a label belonging to the token at its own place; preferences; or rollouts. `cuts` are `standard_cuts` by default.

    Forward passes of `model` are watched, so that a cut which the trainer ignores is no proof. Where they happen elsewhere, on other ranks
    say, `model` is None and the function returns a `TrainerPass`.

    `definition` is what gradients are compared with, such as `define_token_mean`. None: the trainer's own gradient of all rows in one
    micro-batch; a mistake that this shares with all cuts is not noticed. `tolerance` is relative: by default 1e-5 in float32, 1e-10 in float64.

    Raises DataError for rows or cuts that cannot be used, ResultError for gradients that cannot be compared, both with the place.
    """
    check_rows(rows)
    asked = standard_cuts(rows) if cuts is None else cuts
    if not asked:
        raise DataError("there is no cut to prove", remedy="Name at least one TrainerCut, or leave out `cuts`")
    for cut in asked:
        cut.check(len(rows))
    subject = _Subject(gradients, model)
    whole = TrainerCut(micro_batch_rows=len(rows))
    pieces = _find_pieces(subject, rows, whole) if definition is None else definition
    reference = _check_reference(_add_up(pieces))
    verdicts = []
    for cut in asked:
        try:
            made = subject.compute(rows, cut)
        except UnsupportedError as error:
            verdicts.append(TrainerVerdict(cut, None, holds=False, explanation=str(error), refused=True))
            continue
        _check_names(made.gradients, reference, cut)
        limit = _tolerance_of(made.gradients) if tolerance is None else tolerance
        verdicts.append(_judge(made, pieces, reference, rows, cut, limit))
    return TrainerProof(verdicts)


def read_gradients(model: torch.nn.Module) -> Gradients:
    """Return a copy of the gradient of every trained parameter, by name; zeros where it has none yet.

    Raises ResultError for types in which a proof is blind, such as bfloat16.
    """
    gradients = {}
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            _check_type(name, str(gradient.dtype).removeprefix("torch."))
            gradients[name] = gradient.detach().cpu().numpy().copy()
    return gradients


@frozen(eq=False)
class _Subject:
    """The trainer, and the model that is watched in it."""

    gradients: GradientFunction
    model: torch.nn.Module | None

    def compute(self, rows: Sequence[Row], cut: TrainerCut) -> TrainerPass:
        if self.model is None:
            made = self.gradients(rows, cut)
            if not isinstance(made, TrainerPass):
                raise ResultError(
                    f"{cut.name}: nobody saw how the trainer computed the cut",
                    remedy="Give prove_trainer the model, whose forward passes it watches, or return a TrainerPass that tells them",
                )
        else:
            with watch_forwards(self.model) as forwards:
                found = self.gradients(rows, cut)
            made = found if isinstance(found, TrainerPass) else TrainerPass(found, forwards)
        if not made.gradients:
            raise ResultError(f"{cut.name}: the trainer returned no gradient", remedy="Return those of all trained parameters")
        return evolve(made, gradients={name: np.array(values) for name, values in made.gradients.items()})


def _judge(
    made: TrainerPass, pieces: Pieces, reference: Gradients, rows: Sequence[Row], cut: TrainerCut, tolerance: float
) -> TrainerVerdict:
    difference = _measure_difference(made.gradients, reference)
    if ignored := cut.explain_departure(rows, made.forwards):
        return TrainerVerdict(cut, difference, holds=False, explanation=ignored)
    if difference <= tolerance:
        return TrainerVerdict(cut, difference, holds=True)
    parts = Pieces(["loss"], [reference], np.ones(1))
    why = explain(made.gradients, parts, pieces, _describe_cut(rows, cut), 100 * tolerance)
    return TrainerVerdict(cut, difference, holds=False, explanation=why)


def _find_pieces(subject: _Subject, rows: Sequence[Row], whole: TrainerCut) -> Pieces:
    """Split the trainer's own gradient of the whole batch into what each row adds: its gradient alone, times a factor by least squares.

    Rollouts of one prompt are taken together, because one alone has no advantage. Raises ResultError where the whole is no sum.
    """
    batch = subject.compute(rows, whole)
    if ignored := whole.explain_departure(rows, batch.forwards):
        raise ResultError(f"the whole batch in one micro-batch: {ignored}", remedy="Give a definition to compare with")
    reference = _check_reference(batch.gradients)
    alone = []
    groups = list_groups(rows)
    for places in groups:
        own = [rows[place] for place in places]
        cut = TrainerCut(micro_batch_rows=len(own))
        carries = any(find_trained_tokens(row).any() for row in own)
        made = subject.compute(own, cut).gradients if carries else _no_gradient(reference)
        _check_names(made, reference, cut)
        alone.append(_check_finite(made))
    names, ones = [str(places[0]) for places in groups], np.ones(len(groups))
    factors, residue = Pieces(names, alone, ones).fit(reference)
    if residue > 100 * _tolerance_of(reference):
        raise ResultError(
            f"{residue:.0%} of the trainer's gradient of all rows in one micro-batch is no sum of the gradients of its rows",
            remedy="Switch off dropout and whatever else is random, clips or looks at other rows; or give a definition",
        )
    scaled = [{name: factor * values for name, values in piece.items()} for factor, piece in zip(factors, alone, strict=True)]
    carrying = np.array([any(values.any() for values in piece.values()) for piece in alone])
    return Pieces(names, scaled, np.where(carrying, np.abs(factors), 0.0))


def _describe_cut(rows: Sequence[Row], cut: TrainerCut) -> Cut:
    """Return the cut as the diagnosis reads it. The actions of a row are its tokens after the first."""
    micro_batch = np.zeros(len(rows), dtype=np.int64)
    rank = np.zeros(len(rows), dtype=np.int64)
    number = 0
    for own, micro_batches in enumerate(cut.divide(len(rows))):
        for members in micro_batches:
            micro_batch[list(members)], rank[list(members)] = number, own
            number += 1
    weights = [find_trained_tokens(row) for row in rows]
    ids = np.arange(len(rows), dtype=np.int64)
    structure = BatchStructure(
        loss_weight=np.concatenate(weights).astype(np.uint8),
        action_offsets=offsets_of(np.array([len(weight) for weight in weights])),
        group_ids=ids,
        unit_ids=ids,
        micro_batch=micro_batch,
    )
    return Cut(structure, rank)


def _measure_difference(gradients: Gradients, reference: Gradients) -> float:
    """Return the worst relative difference of any parameter; infinite where a number is not finite."""
    floor = SMALL * float(np.linalg.norm(flat(reference)))
    if not_finite(gradients):
        return float("inf")
    return max(
        float(np.linalg.norm(gradients[name].astype(np.float64) - values)) / max(float(np.linalg.norm(values)), floor)
        for name, values in reference.items()
    )


def _tolerance_of(gradients: Gradients) -> float:
    for name, values in gradients.items():
        _check_type(name, values.dtype.name)
    return TOLERANCE["float32" if any(values.dtype == np.float32 for values in gradients.values()) else "float64"]


def _check_type(name: str, dtype: str) -> None:
    if dtype not in TOLERANCE:
        raise ResultError(
            f"the gradient of {name} is {dtype}, in which rounding hides what a proof looks for",
            remedy="Let the trainer compute in float32 or float64",
        )


def _check_names(gradients: Gradients, reference: Gradients, cut: TrainerCut) -> None:
    for name in sorted({*gradients, *reference}):
        if name not in gradients or name not in reference:
            lacking, other = ("trainer's gradients", "reference") if name not in gradients else ("reference", "trainer")
            raise ResultError(
                f"{cut.name}: the {lacking} lack {name}, which the {other} has",
                remedy="Return every trained parameter by its name in model.named_parameters(), zeros where it has no gradient",
            )
        if gradients[name].shape != reference[name].shape:
            raise ResultError(
                f"{cut.name}: the gradient of {name} has the shape {gradients[name].shape}, and {reference[name].shape} in the reference",
                remedy="Return whole gradients, as in one process",
            )


def _check_reference(gradients: Gradients) -> Gradients:
    if not any(values.any() for values in _check_finite(gradients).values()):
        raise ResultError(
            "the gradient that cuts are compared with is 0 everywhere, so there is nothing to prove",
            remedy="Train at least one parameter, and read gradients before the trainer clears them",
        )
    return gradients


def _check_finite(gradients: Gradients) -> Gradients:
    if wrong := not_finite(gradients):
        raise ResultError(
            f"the gradient of {wrong[0]} that cuts are compared with is not finite",
            remedy="Look at the rows and at the model's weights",
        )
    return gradients


def _add_up(pieces: Pieces) -> Gradients:
    return {name: np.sum([piece[name] for piece in pieces.gradients], axis=0) for name in pieces.gradients[0]}


def _no_gradient(like: Gradients) -> Gradients:
    return {name: np.zeros_like(values) for name, values in like.items()}
