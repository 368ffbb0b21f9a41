"""Losses and corrections under the promises that they share: both give a number per token, computed and named in their own ways."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from attrs import frozen
from hypothesis import strategies as st

from skyrl_engine.errors import EngineError
from skyrl_engine.testing.promise import Promise, Undecidable, any_of, exempt_nobody, no_explicit_cases
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import explicit, rollouts
from skyrl_engine.testing.tokens.evaluation import Evaluation, is_same_evaluation
from skyrl_engine.testing.tokens.token_batches import CutBatch, TokenBatch


@frozen(eq=False)
class TokenKind:
    """A kind of plugin that gives one number per token.

    `evaluate(label, product, batch, dtype=...)` runs it as the engine does. `results` names what it gives for a batch, `products` several
    plugins, `remedy` what to do about a number that depends on the cut. `batch_local` says why a subject does not claim promises about
    cuts, and `unless`, which ends remedies, how to declare it.
    """

    evaluate: Callable[..., Evaluation]
    noun: str
    results: str
    products: str
    remedy: str
    batch_local: Callable[[Subject[Any]], str | None] = exempt_nobody
    unless: str = ""

    def evaluate_subject(self, subject: Subject[Any], batch: TokenBatch, **options: Any) -> Evaluation:
        """Evaluate a new product of the subject on the batch. Raises EngineError."""
        return self.evaluate(subject.label, subject.make(), batch, **options)

    def evaluate_or_undecidable(self, subject: Subject[Any], batch: TokenBatch, product: Any = None, **options: Any) -> Evaluation:
        """Evaluate for a promise that does not concern failures; `product` is a new one unless given.

        Raises Undecidable where the product fails or is not finite.
        """
        try:
            evaluation = self.evaluate(subject.label, subject.make() if product is None else product, batch, **options)
        except EngineError as error:
            raise Undecidable(error.cause) from error
        if not evaluation.finite:
            raise Undecidable(f"the {self.noun} is not finite")
        return evaluation

    def require_repeatable(self, subject: Subject[Any], batch: TokenBatch) -> None:
        """Raise Undecidable where the same batch is answered differently: differing numbers say nothing then; `replicas` is about that."""
        if not is_same_evaluation(self.evaluate_or_undecidable(subject, batch), self.evaluate_or_undecidable(subject, batch)):
            raise Undecidable(f"the {self.noun} of the same batch is another every time")


@frozen(eq=False)
class SharedPromise:
    """A promise of every `TokenKind`. `sentence` is filled in with the kind's words; `about_cuts`: batch-local plugins do not claim it.

    `exempt` gives the reason why a subject does not claim it, of whatever kind.
    """

    check: Callable[[TokenKind, Subject[Any], Any], None]
    sentence: str
    cases: Callable[[Subject[Any]], "st.SearchStrategy[Any]"]
    about_cuts: bool
    effort: float
    first: Callable[[Subject[Any]], Iterable[Any]]
    exempt: Callable[[Subject[Any]], str | None]

    def of(self, kind: TokenKind) -> Promise[Subject[Any], Any]:
        """Return the promise in the words of this kind of plugin."""
        return Promise(
            self.check.__name__,
            self.sentence.format(results=kind.results, products=kind.products, noun=kind.noun),
            partial(self.check, kind),
            self.cases,
            any_of(kind.batch_local, self.exempt) if self.about_cuts else self.exempt,
            self.effort,
            self.first,
        )


def shared_promise(
    sentence: str,
    *,
    cases: Callable[[Subject[Any]], "st.SearchStrategy[Any]"],
    about_cuts: bool = False,
    effort: float = 1.0,
    first: Callable[[Subject[Any]], Iterable[Any]] = no_explicit_cases,
    exempt: Callable[[Subject[Any]], str | None] = exempt_nobody,
) -> Callable[[Callable[[TokenKind, Subject[Any], Any], None]], SharedPromise]:
    """Make a shared promise from its check; it takes the function's name."""

    def decorate(check: Callable[[TokenKind, Subject[Any], Any], None]) -> SharedPromise:
        return SharedPromise(check, sentence, cases, about_cuts, effort, first, exempt)

    return decorate


def needs_of(subject: Subject[Any]) -> tuple[str, ...]:
    """Return the needs that the product declares."""
    return tuple(subject.make().needs)


def draw_ordinary(subject: Subject[Any]) -> "st.SearchStrategy[TokenBatch]":
    """Draw batches as training meets them."""
    return rollouts.draw_batches(needs_of(subject))


def draw_some_long(subject: Subject[Any]) -> "st.SearchStrategy[TokenBatch]":
    """Draw batches of which some have more tokens than fit a byte."""
    return rollouts.draw_batches(needs_of(subject), long=True)


def draw_anything(subject: Subject[Any]) -> "st.SearchStrategy[TokenBatch]":
    """Draw batches that also hold probabilities of 1, near 0, and far from another policy's."""
    ranges: tuple[rollouts.Range, ...] = ("ordinary", "extreme")
    return st.sampled_from(ranges).flatmap(lambda range_: rollouts.draw_batches(needs_of(subject), range_=range_))


def draw_cuts(subject: Subject[Any]) -> "st.SearchStrategy[CutBatch]":
    """Draw batches cut into micro-batches."""
    return rollouts.draw_cut_batches(needs_of(subject))


def list_anything(subject: Subject[Any]) -> "list[TokenBatch]":
    """Return batches with other policies 100 nats away and advantages of 100, with more sequences, larger units and more candidates than are
    drawn, and with candidates that have all of the probability.
    """
    needs = needs_of(subject)
    return [
        explicit.make_far(needs),
        *explicit.list_certain(needs),
        *explicit.list_wide(needs),
        explicit.make_threes(needs),
        explicit.make_threes(needs, empty=False),
        explicit.make_many(needs),
    ]


def list_cuts(subject: Subject[Any]) -> "list[CutBatch]":
    """Return batches of more sequences and larger units than are drawn, and of policies farther away, cut into micro-batches."""
    needs = needs_of(subject)
    return [*explicit.cut_in_threes(needs), explicit.cut_many(needs), explicit.cut_apart(needs)]
