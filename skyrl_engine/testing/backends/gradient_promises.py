"""Promises of a backend about sums: the gradient that its step sees is the sum over micro-batches, ranks and calls."""

from attrs import evolve

from skyrl_engine.testing.backends.batches import MANY
from skyrl_engine.testing.backends.gradient_comparison import norm_of, require_same_gradients, sum_gradients
from skyrl_engine.testing.backends.held_backend import Arrays, PassOrder
from skyrl_engine.testing.backends.subject import NUMBERS, BackendCase, BackendSubject, backend_promise, is_right_loss
from skyrl_engine.testing.promise import Broken, Promise, Undecidable

FIRST, SECOND = NUMBERS[::2], NUMBERS[1::2]


def _gradient(subject: BackendSubject, case: BackendCase, *calls: PassOrder) -> Arrays:
    """Return the gradient after these calls, as rank 0 of a new backend reports it."""
    with subject.open_ranks(case) as ranks:
        for call in calls:
            ranks.forward_backward(call)
        return ranks.gradients()[0]


def _gradient_of_right_loss(subject: BackendSubject, case: BackendCase) -> Arrays:
    with subject.open_ranks(case) as ranks:
        loss = ranks.loss(ranks.forward_backward(case.whole()))
        if not is_right_loss(subject, case, loss):
            raise Undecidable("the loss is not the right one already")
        return ranks.gradients()[0]


def _facts(case: BackendCase) -> dict[str, float]:
    topology = case.sizes.topology
    sizes = {
        "number of data-parallel ranks": topology.dp,
        "tensor-parallel size": topology.tp,
        "pipeline size": topology.pp,
        "context-parallel size": topology.cp,
        "world size": topology.world_size,
    }
    return {name: float(size) for name, size in sizes.items() if size > 1}


@backend_promise(
    "The gradient of a micro-batch is that of the model by definition", layouts="one data-parallel rank", models=("qwen3", "llama")
)
def gradient(subject: BackendSubject, case: BackendCase) -> None:
    require_same_gradients(
        _gradient_of_right_loss(subject, case),
        subject.bench.definition(case.model, NUMBERS).gradients,
        f"of transformers' own model, under {case.sizes}",
        "Sum the gradients of weights that ranks hold copies of, and scale none",
        facts=_facts(case),
    )


@backend_promise("Gradients are summed over data-parallel ranks", layouts="several data-parallel ranks")
def ranks_add_up(subject: BackendSubject, case: BackendCase) -> None:
    definition = subject.bench.definition
    pieces = {
        f"what rank {rank} computed": definition(case.model, micro_batches[0]).gradients
        for rank, micro_batches in enumerate(case.cut())
    }
    require_same_gradients(
        _gradient_of_right_loss(subject, case),
        definition(case.model, NUMBERS).gradients,
        f"of the sum over {case.sizes.topology.dp} data-parallel ranks",
        "Sum over ranks where the library takes the mean: multiply by their number, or turn its division off",
        facts=_facts(case),
        pieces=pieces,
    )


@backend_promise("Gradients are summed over micro-batches: how a rank's samples are cut changes nothing")
def micro_batches_add_up(subject: BackendSubject, case: BackendCase) -> None:
    cut = case.cut(micro_batches=3)
    require_same_gradients(
        _gradient(subject, case, PassOrder(cut)),
        _gradient_of_right_loss(subject, case),
        "of the same samples in one micro-batch, where they come in three",
        "Divide by no number of micro-batches, and let no schedule do so",
        facts={"number of micro-batches of a rank": 3.0},
        pieces={f"micro-batch {index}": _gradient(subject, case, _select_micro_batch(case, index)) for index in range(3)},
    )


def _select_micro_batch(case: BackendCase, chosen: int) -> PassOrder:
    """Return a pass with only one of the three micro-batches of every rank."""
    return PassOrder(tuple((micro_batches[chosen],) for micro_batches in case.cut(micro_batches=3)))


@backend_promise(
    "Gradients are summed over more micro-batches than a pipeline holds: of long documents and short ones, and of none"
)
def many_micro_batches(subject: BackendSubject, case: BackendCase) -> None:
    """One micro-batch of every rank is without a document, at another place on each: what fills up a rank that has less to do."""
    shares = case.cut(range(MANY), micro_batches=10)
    cut = tuple((*share[: 3 + rank], (), *share[3 + rank :]) for rank, share in enumerate(shares))
    require_same_gradients(
        _gradient(subject, case, PassOrder(cut, many=True)),
        subject.bench.definition(case.model, range(MANY), many=True).gradients,
        f"of transformers' own model, under {case.sizes}, where a rank has {len(cut[0])} micro-batches",
        "Take every micro-batch of a rank's batch, whatever its width, also one without a document",
        facts=_facts(case),
    )


@backend_promise("Gradients are summed over calls of forward_backward before a step")
def calls_add_up(subject: BackendSubject, case: BackendCase) -> None:
    calls = [PassOrder(case.cut(numbers)) for numbers in (FIRST, SECOND)]
    alone = [_gradient(subject, case, call) for call in calls]
    require_same_gradients(
        _gradient(subject, case, *calls),
        sum_gradients(*alone),
        "of the sum over two calls",
        "Accumulate until optim_step, which clears the gradient",
        facts={"number of calls": 2.0},
        pieces={"the first call": alone[0], "the second call": alone[1]},
    )


@backend_promise("A step leaves nothing of its gradient over for the next one")
def nothing_left_over(subject: BackendSubject, case: BackendCase) -> None:
    remedy = "Clear the gradient, and every buffer of it, in optim_step"
    with subject.open_ranks(case) as ranks:
        ranks.forward_backward(case.whole())
        first = ranks.gradients()[0]
        ranks.optim_step()
        left = ranks.gradients()[0]
        if left and norm_of(left):
            raise Broken(
                f"a gradient of norm {norm_of(left):.3g} is still there after the step, {norm_of(first):.3g} before", remedy
            )
        ranks.forward_backward(case.whole())
        second = ranks.gradients()[0]
    require_same_gradients(
        second, first, "of the same samples before a step that changed no weight", remedy, facts={"number of steps": 2.0}
    )


@backend_promise("A micro-batch without a scored token adds nothing and holds no rank up")
def unscored_micro_batch(subject: BackendSubject, case: BackendCase) -> None:
    """Score one micro-batch at a time, all others without loss: by linearity, the gradients add up to that of all together."""
    micro_batches = 1 if case.sizes.topology.dp > 1 else 2
    halves = PassOrder(case.cut(micro_batches=micro_batches))
    places = [numbers for rank in halves.cut for numbers in rank]
    unscored = [evolve(halves, unscored=tuple(n for other in places if other is not place for n in other)) for place in places]
    require_same_gradients(
        sum_gradients(*(_gradient(subject, case, work) for work in unscored)),
        _gradient(subject, case, halves),
        "of the same samples, where only one micro-batch at a time has scored tokens",
        "Run decoder and head for such a micro-batch as for any other",
        facts={},
    )


GRADIENT_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (
    gradient,
    ranks_add_up,
    micro_batches_add_up,
    many_micro_batches,
    calls_add_up,
    nothing_left_over,
    unscored_micro_batch,
)
