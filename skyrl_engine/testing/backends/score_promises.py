"""Promises of a backend's passes: scores equal their definition, outputs belong to their samples, and requests change no number."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from skyrl_engine.contracts.kinds.needs import LOGPROBS_AT, TOP_1_AGREEMENT
from skyrl_engine.contracts.values.outputs import PADDING_SAMPLE, RankOutput
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.errors import EngineError
from skyrl_engine.testing.backends.batches import DIVERGENCES, DefinedResult
from skyrl_engine.testing.backends.gradient_comparison import require_same_gradients
from skyrl_engine.testing.backends.held_backend import Arrays, PassOrder
from skyrl_engine.testing.backends.ranks import BackendRanks
from skyrl_engine.testing.backends.subject import (
    NUMBERS,
    BackendCase,
    BackendSubject,
    backend_promise,
    exempt_with,
    exempt_without,
    is_right_loss,
    require_words,
)
from skyrl_engine.testing.promise import Broken, Inapplicable, Promise, Undecidable

SCORES = 2e-5
"""Largest difference of a log-probability or entropy, in nats, or of a value: float32 after a few layers."""


@backend_promise(
    "forward gives the objective's value by definition: right scores, at the right positions", models=("qwen3", "llama")
)
def scores(subject: BackendSubject, case: BackendCase) -> None:
    with subject.open_ranks(case) as ranks:
        for micro_batches in (1, 3):
            got = ranks.loss(ranks.forward(PassOrder(case.cut(micro_batches=micro_batches))))
            _require_loss(subject, case, got, f"with {micro_batches} micro-batches on each rank")


def _require_loss(subject: BackendSubject, case: BackendCase, got: float, when: str, **options: Any) -> None:
    if is_right_loss(subject, case, got, **options):
        return
    due = subject.bench.definition(case.model, NUMBERS, **options).loss
    raise Broken(
        f"the objective is {got:.6g} {when}, under {case.sizes}, where transformers' own model gives {due:.6g}",
        "Score labels[i] at positions[i], in that order, and call the objective with every micro-batch once",
        factor=got / due,
    )


@backend_promise("Outputs hold every sample of the rank once, and every sample its own values")
def outputs(subject: BackendSubject, case: BackendCase) -> None:
    cut = case.cut(micro_batches=2)
    due = subject.bench.definition(case.model, NUMBERS).scores
    with subject.open_ranks(case) as ranks:
        for mode in (ranks.forward, ranks.forward_backward):
            returned = mode(PassOrder(cut))
            if not is_right_loss(subject, case, ranks.loss(returned)):
                raise Undecidable("the loss is not the right one already")
            for output in _collect_outputs(ranks, returned):
                _require_samples(output, tuple(n for numbers in cut[output.coords.dp] for n in numbers))
                for name, values in due.items():
                    _require_values(output, name, values)


def _collect_outputs(ranks: BackendRanks, returned: Sequence[RankOutput]) -> Iterator[RankOutput]:
    """Return the outputs that a merger keeps."""
    for rank, output in enumerate(returned):
        coords = ranks.topology.coords(rank)
        if output.coords != coords:
            raise Broken(
                f"rank {rank} returns outputs as if it were at {output.coords}", "Return RankOutput.concat(parts, self.coords)"
            )
        if coords.collects:
            yield output


def _require_samples(output: RankOutput, due: tuple[int, ...]) -> None:
    got = [sample for sample in output.sample_ids.tolist() if sample != PADDING_SAMPLE]
    if sorted(got) != sorted(due):
        raise Broken(
            f"rank {output.coords.rank} returns the samples {sorted(got)}, and was given {sorted(due)}",
            "Concatenate what the objective returned for every micro-batch",
        )


def _require_values(output: RankOutput, name: str, due: Any) -> None:
    if name not in output.fields:
        raise Broken(f"the outputs hold no {name}", "Return what the objective returned, as it is")
    for place, number in enumerate(output.sample_ids.tolist()):
        got = output.fields[name][place]
        expected = due.get(number, np.zeros(0))
        if got.shape != expected.shape or not np.allclose(got, expected, rtol=0, atol=SCORES):
            owner = next(
                (sample for sample, values in due.items() if values.shape == got.shape and np.allclose(values, got, atol=SCORES)),
                None,
            )
            whose = "" if owner is None else f", which are those of sample {owner}"
            raise Broken(
                f"sample {number} comes back with other {name} than its own{whose}",
                "Return what the objective returned, as it is: ids and values belong together",
            )


@backend_promise("Without per-token outputs the loss and the gradient are the same, bit for bit, and no token comes back")
def gate(subject: BackendSubject, case: BackendCase) -> None:
    results = {}
    for per_token_outputs in (True, False):
        with subject.open_ranks(case) as ranks:
            returned = ranks.forward_backward(case.whole(per_token_outputs=per_token_outputs))
            results[per_token_outputs] = ranks.loss(returned), ranks.gradients()[0]
    if any(len(output.scored.values) or output.fields for output in returned):
        raise Broken("returns values per token although none were asked for", "Return what the objective returned, as it is")
    (loss, gradients), (gated_loss, gated) = results[True], results[False]
    if loss != gated_loss or (name := _find_first_different(gradients, gated)) is not None:
        what = f"the loss is {gated_loss!r}, not {loss!r}" if loss != gated_loss else f"the gradient of {name} is another"
        raise Broken(f"without per-token outputs {what}", "Leave outputs to the objective; compute the same in both cases")


def _find_first_different(one: Arrays, other: Arrays) -> str | None:
    if one.keys() != other.keys():
        return min(one.keys() ^ other.keys())
    return next((name for name, value in one.items() if not np.array_equal(value, other[name])), None)


@backend_promise(
    "forward scores in evaluation mode, as forward_backward does without dropout, and changes neither gradient nor weights"
)
def evaluation(subject: BackendSubject, case: BackendCase) -> None:
    with subject.open_ranks(case) as ranks:
        trained = ranks.loss(ranks.forward_backward(case.whole()))
        gradients, weights = ranks.gradients()[0], ranks.weights()[0]
        scored = ranks.loss(ranks.forward(case.whole()))
        if abs(scored - trained) > 1e-6 * abs(trained):
            raise Broken(
                f"forward gives the objective {scored:.7g}, forward_backward {trained:.7g} on the same weights",
                "Let both passes score in the same way",
            )
        for what, before, after in (("gradient", gradients, ranks.gradients()[0]), ("weights", weights, ranks.weights()[0])):
            if (name := _find_first_different(before, after)) is not None:
                raise Broken(f"forward changes the {what} of {name}", "Score under torch.no_grad, and touch nothing else")
    try:
        with subject.open_ranks(case, "dropout") as ranks:
            first = ranks.loss(ranks.forward(case.whole()))
            ranks.forward_backward(case.whole())  # which leaves the model in training mode
            second = ranks.loss(ranks.forward(case.whole()))
    except EngineError as error:  # a backend may refuse what it would not train as written
        require_words(error)
        return
    if first != second:
        raise Broken(
            f"forward of the same samples gives {first:.6g} and then {second:.6g}: dropout is on",
            "Put the model into evaluation mode in forward, and back into training mode in forward_backward",
        )


@backend_promise("forward_backward trains with the model's dropout, and data-parallel ranks draw masks of their own")
def dropout(subject: BackendSubject, case: BackendCase) -> None:
    """Every data-parallel rank has the same documents: equal masks are then equal log-probabilities."""
    same = PassOrder(tuple((NUMBERS,) for _ in range(case.sizes.topology.dp)))
    try:
        with subject.open_ranks(case, "dropout") as ranks:
            scored = ranks.loss(ranks.forward(same))
            returned = [ranks.forward_backward(same) for _ in range(2)]
    except EngineError as error:  # a backend may refuse what it would not train as written
        require_words(error)
        return
    one, other = (ranks.loss(call_outputs) for call_outputs in returned)
    if one == other or scored in (one, other):
        what = "as forward does" if scored in (one, other) else "twice"
        raise Broken(
            f"forward_backward of a model with dropout gives the objective {one:.7g} {what}",
            "Put the model into training mode in forward_backward, and seed nothing there",
        )
    seen: dict[bytes, RankOutput] = {}
    for output in _collect_outputs(ranks, returned[0]):
        values = output.fields["logprobs"].values.tobytes()
        if values in seen:
            raise Broken(
                f"ranks {seen[values].coords.rank} and {output.coords.rank} draw the same dropout masks",
                "Seed each data-parallel rank with a number of its own",
            )
        seen[values] = output


@backend_promise('With model.dropout = "off", forward_backward trains without the dropout that the model states')
def dropout_off(subject: BackendSubject, case: BackendCase) -> None:
    with subject.open_ranks(case, "dropout", dropout="off") as ranks:
        scored = ranks.loss(ranks.forward(case.whole()))
        trained = ranks.loss(ranks.forward_backward(case.whole()))
    if abs(scored - trained) > 1e-6 * abs(trained):
        raise Broken(
            f"forward gives the objective {scored:.7g}, forward_backward {trained:.7g} of a model whose dropout is switched off",
            "Load the model by skyrl_engine.modeling, or set every share of dropout to 0 where ModelConfig.dropout is off",
        )


@backend_promise("The objective is given every score that it needs, and one the model does not compute is refused in words")
def needs(subject: BackendSubject, case: BackendCase) -> None:
    for requested in (("logprobs",), ("logprobs", "entropy")):
        with subject.open_ranks(case) as ranks:
            received = ranks.collect_requested_scores(case.whole(needs=requested))
        for rank, names in enumerate(received):
            if ranks.topology.coords(rank).last_stage and (missing := set(requested) - set(names)):
                raise Broken(
                    f"rank {rank} calls the objective without {min(missing)}, which it needs", "Compute what objective.needs names"
                )
    with subject.open_ranks(case) as ranks:
        try:
            ranks.forward(case.whole(needs=("logprobs", "reward")))
        except EngineError as error:
            require_words(error)
            return
    raise Broken(
        "says nothing where the objective needs 'reward', which no model computes",
        "Raise UnsupportedError in forward and forward_backward",
    )


@backend_promise("Scores are those at the objective's temperature")
def temperature(subject: BackendSubject, case: BackendCase) -> None:
    with subject.open_ranks(case) as ranks:
        if not is_right_loss(subject, case, ranks.loss(ranks.forward(case.whole()))):
            raise Undecidable("the loss is not the right one already")
        for mode in (ranks.forward, ranks.forward_backward):
            got = ranks.loss(mode(case.whole(temperature=0.7)))
            _require_loss(subject, case, got, "at temperature 0.7", temperature=0.7)
        gradients = ranks.gradients()[0]
    if case.sizes.topology.dp == 1:
        require_same_gradients(
            gradients,
            subject.bench.definition(case.model, NUMBERS, temperature=0.7).gradients,
            "of softmax(logits / temperature)",
            "Divide the logits by objective.temperature, inside of what is differentiated",
            facts={"temperature": 0.7},
        )


@backend_promise(
    "Packed rows give the loss and the gradient of padded ones: no document sees its neighbour", exempt=exempt_without("packed")
)
def packed_rows(subject: BackendSubject, case: BackendCase) -> None:
    results = {}
    for rows in ("padded", "packed"):
        with subject.open_ranks(case, rows="packed") as ranks:
            loss = ranks.loss(ranks.forward_backward(case.whole(rows=rows)))
            results[rows] = loss, ranks.gradients()[0]
    (loss, gradients), (got, packed) = results["padded"], results["packed"]
    remedy = "Keep the documents of a row apart by sequence_lengths, and let position_ids start again in each"
    if abs(got - loss) > 1e-5 * abs(loss):
        raise Broken(f"the objective is {got:.6g} over packed rows, {loss:.6g} over padded ones", remedy, factor=got / loss)
    require_same_gradients(packed, gradients, "of padded rows, over packed ones", remedy, facts={})


@backend_promise("Packed rows, which it does not declare, are refused in words or right", exempt=exempt_with("packed"))
def undeclared_packed_rows(subject: BackendSubject, case: BackendCase) -> None:
    try:
        with subject.open_ranks(case, rows="packed") as ranks:
            got = ranks.loss(ranks.forward(case.whole(rows="packed")))
    except EngineError as error:
        require_words(error)
        return
    if not is_right_loss(subject, case, got):
        raise Broken(
            "takes packed rows, which it does not declare, and lets documents see each other",
            "Raise UnsupportedError in setup where environment.rows announces them",
        )


@backend_promise(
    "Rows of trees give the loss and the gradient of padded rows: a token sees the prefix that it shares, and no sibling",
    exempt=exempt_without("tree"),
)
def tree_rows(subject: BackendSubject, case: BackendCase) -> None:
    if "tree" not in subject.describe(case.sizes.options, case.sizes.ranks).capabilities:
        raise Inapplicable(f"the backend does not declare 'tree' on {case.sizes}")
    results = {}
    for rows in ("padded", "tree"):
        with subject.open_ranks(case, rows="tree") as ranks:
            loss = ranks.loss(ranks.forward_backward(case.whole(rows=rows, branching=True)))
            results[rows] = loss, ranks.gradients()[0]
    (loss, gradients), (got, trees) = results["padded"], results["tree"]
    remedy = "Let a token see its segment up to itself and all segments above it, by micro_batch.tree, and take positions from position_ids"
    if abs(got - loss) > 1e-5 * abs(loss):
        raise Broken(f"the objective is {got:.6g} over rows of trees, {loss:.6g} over padded ones", remedy, factor=got / loss)
    require_same_gradients(trees, gradients, "of padded rows, over rows of trees", remedy, facts={})


@backend_promise("Rows of trees, which it does not declare, are refused in words or right", exempt=exempt_with("tree"))
def undeclared_tree_rows(subject: BackendSubject, case: BackendCase) -> None:
    losses = []
    try:
        for rows in ("padded", "tree"):
            with subject.open_ranks(case, rows=rows) as ranks:
                losses.append(ranks.loss(ranks.forward(case.whole(rows=rows, branching=True))))
    except EngineError as error:
        require_words(error)
        return
    if abs(losses[1] - losses[0]) > 1e-5 * abs(losses[0]):
        raise Broken(
            "takes rows of trees, which it does not declare, and lets samples see each other",
            "Raise UnsupportedError in setup where environment.rows announces them",
        )


@backend_promise("Values, and the gradient through them, are those of the model's value head", exempt=exempt_without("value_head"))
def values(subject: BackendSubject, case: BackendCase) -> None:
    for requested in (("values",), ("entropy", "logprobs", "values")):
        with subject.open_ranks(case, "critic", value_head=True) as ranks:
            _require_definition(
                ranks,
                case,
                subject.bench.definition("critic", NUMBERS, needs=requested),
                requested,
                "Apply the head called score to the hidden state at the position before the token, and train it with what is below it",
            )


@backend_promise("A label is scored as it is given, whatever token follows")
def labels(subject: BackendSubject, case: BackendCase) -> None:
    with subject.open_ranks(case) as ranks:
        _require_definition(
            ranks,
            case,
            subject.bench.definition(case.model, NUMBERS, needs=(f"{LOGPROBS_AT}:other",)),
            ("logprobs",),
            "Score micro_batch.labels, not the tokens of micro_batch.inputs",
            other_labels=True,
        )


@backend_promise("Logits, and the gradient through them, are those of the labels", exempt=exempt_without("logits"))
def logits(subject: BackendSubject, case: BackendCase) -> None:
    for requested in (("logits", "logprobs"), ("entropy", "logits", "logprobs")):
        with subject.open_ranks(case) as ranks:
            _require_definition(
                ranks,
                case,
                subject.bench.definition(case.model, NUMBERS, needs=requested),
                requested,
                "Give the number that softmax takes at the label: the head's output, scaled or capped as the model does it",
            )


@backend_promise("Normalisers, and the gradient through them, are those of the logits", exempt=exempt_without("logsumexp"))
def logsumexp(subject: BackendSubject, case: BackendCase) -> None:
    _require_scores(
        subject, case, "logsumexp", "Give the logsumexp of what softmax takes, the temperature inside, over the whole vocabulary"
    )


@backend_promise(
    "Means of log-probabilities over the vocabulary, and the gradient through them, are right",
    exempt=exempt_without("mean_logprob"),
)
def mean_logprob(subject: BackendSubject, case: BackendCase) -> None:
    _require_scores(
        subject, case, "mean_logprob", "Divide by the number of tokens of the whole vocabulary, not of a rank's part of it"
    )


@backend_promise(
    "Logarithms of sums of squared probabilities, and the gradient through them, are right",
    exempt=exempt_without("log_sum_squares"),
)
def log_sum_squares(subject: BackendSubject, case: BackendCase) -> None:
    _require_scores(
        subject, case, "log_sum_squares", "Square the probabilities of the whole vocabulary, add them up, and take the logarithm"
    )


@backend_promise(
    "Log-probabilities at the token ids of a column, and the gradient through them, are right",
    exempt=exempt_without("logprobs_at"),
)
def logprobs_at(subject: BackendSubject, case: BackendCase) -> None:
    """Ask for one column and for two; ids may occur twice, and the label may be among them."""
    remedy = (
        "Score micro_batch.candidates[column] at the positions of the labels, in their order, and add up gradients of equal ids"
    )
    _require_scores(subject, case, f"{LOGPROBS_AT}:near", remedy)
    _require_scores(subject, case, f"{LOGPROBS_AT}:near", remedy, (f"{LOGPROBS_AT}:far",))


@backend_promise("Divergences from a teacher beside, and the gradient through them, are right", exempt=exempt_without("divergence"))
def divergence(subject: BackendSubject, case: BackendCase) -> None:
    """Take a teacher of another architecture, over padded and packed rows, in one micro-batch and in three, on layouts that declare it."""
    if "divergence" not in subject.describe(case.sizes.options, case.sizes.ranks).capabilities:
        return
    remedy = "Compare with micro_batch.teacher at every position, both heads over the whole vocabulary, and differentiate the student's alone"
    forward, reverse, jensen_shannon = (comparison.need for comparison in DIVERGENCES)
    of_rows: Sequence[RowKind] = ("padded", "packed") if subject.declares("packed") else ("padded",)
    for rows, requested, temperature, micro_batches in (
        (of_rows[0], ("logprobs", TOP_1_AGREEMENT, forward), 1.0, 1),
        (of_rows[-1], (reverse, jensen_shannon), 0.5, 3),
    ):
        due = subject.bench.definition(case.model, NUMBERS, needs=requested, temperature=temperature, teacher="llama")
        with subject.open_ranks(case, teacher="llama", rows=rows) as ranks:
            cut = case.cut(micro_batches=micro_batches)
            _require_definition(ranks, case, due, requested, remedy, cut=cut, temperature=temperature, rows=rows)


def _require_scores(subject: BackendSubject, case: BackendCase, score: str, remedy: str, others: tuple[str, ...] = ()) -> None:
    """Require the score and its gradient next to log-probabilities, and among all scores of the vocabulary under a temperature."""
    for requested, temperature in ((("logprobs", score, *others), 1.0), (("entropy", "logprobs", score, *others), 0.5)):
        with subject.open_ranks(case) as ranks:
            due = subject.bench.definition(case.model, NUMBERS, needs=requested, temperature=temperature)
            _require_definition(ranks, case, due, requested, remedy, temperature=temperature)


def _require_definition(
    ranks: BackendRanks, case: BackendCase, due: DefinedResult, requested: Sequence[str], remedy: str, **options: Any
) -> None:
    """Require the defined objective for these scores, and the defined gradient where a single rank sums it."""
    got = ranks.loss(ranks.forward_backward(PassOrder(**{"cut": case.cut(), "needs": tuple(requested), **options})))
    what = " and ".join(requested)
    if abs(got - due.loss) > 1e-5 * abs(due.loss):
        raise Broken(f"an objective of {what} is {got:.6g}, where the model's own weights give {due.loss:.6g}", remedy)
    if case.sizes.topology.dp == 1:
        trained = {name: gradient for name, gradient in ranks.gradients()[0].items() if name in due.gradients}
        require_same_gradients(trained, due.gradients, f"of an objective of {what}", remedy, facts={})


def _has_value_head(subject: BackendSubject) -> str | None:
    return "the backend declares 'value_head'" if subject.declares("value_head") else None


@backend_promise("A value head, which it does not declare, is refused in words", exempt=_has_value_head)
def undeclared_value_head(subject: BackendSubject, case: BackendCase) -> None:
    try:
        with subject.open_ranks(case, "critic", value_head=True) as ranks:
            ranks.forward(case.whole(needs=("values",)))
    except EngineError as error:
        require_words(error)
        return
    raise Broken("gives values although it does not declare 'value_head'", "Declare it, or raise UnsupportedError in setup")


SCORE_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (
    scores,
    outputs,
    gate,
    evaluation,
    dropout,
    dropout_off,
    needs,
    temperature,
    packed_rows,
    undeclared_packed_rows,
    tree_rows,
    undeclared_tree_rows,
    labels,
    values,
    logits,
    logsumexp,
    mean_logprob,
    log_sum_squares,
    logprobs_at,
    divergence,
    undeclared_value_head,
)
