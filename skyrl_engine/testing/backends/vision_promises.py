"""Promises of a backend that declares 'vision': images are seen, each by its own sample, and the vision tower learns."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from skyrl_engine.errors import DataError, EngineError, SampleError
from skyrl_engine.testing.backends.gradient_comparison import require_same_gradients
from skyrl_engine.testing.backends.held_backend import Cut, PassOrder
from skyrl_engine.testing.backends.ranks import BackendRanks
from skyrl_engine.testing.backends.subject import NUMBERS, BackendCase, BackendSubject, backend_promise, require_words
from skyrl_engine.testing.pictures import Variant
from skyrl_engine.testing.promise import Broken, Promise, Undecidable

LOGPROBS = 1e-4
"""Largest difference of a log-probability from transformers', in nats."""

SEEN = 1e-2
"""Other pixels move some log-probability of a document by at least so much: a hundred times what rounding does."""

WITH_PICTURES = (0, 1, 3, 6)


def _takes_images(subject: BackendSubject, layout: BackendCase) -> bool:
    return "vision" in subject.describe(layout.sizes.options, layout.sizes.ranks).capabilities


def _exempt_without_images(subject: BackendSubject) -> str | None:
    layouts = (BackendCase(layout) for layout in subject.layouts)
    return (
        None
        if any(_takes_images(subject, case) for case in layouts)
        else "the backend does not declare 'vision' on a claimed layout"
    )


def _exempt_with_images(subject: BackendSubject) -> str | None:
    layouts = (BackendCase(layout) for layout in subject.layouts)
    return (
        "the backend declares 'vision' on every claimed layout" if all(_takes_images(subject, case) for case in layouts) else None
    )


def _cuts(case: BackendCase) -> tuple[tuple[str, Cut], tuple[str, Cut]]:
    """Return two cuts: one micro-batch per rank, and small ones, so that some micro-batches and ranks have no image."""
    return (
        ("in one micro-batch on each rank", case.cut()),
        ("where some micro-batches have no image", case.cut(micro_batches=4)),
    )


def _rows(subject: BackendSubject) -> Iterator[Any]:
    yield "padded"
    if subject.declares("packed"):
        yield "packed"


def _logprobs(ranks: BackendRanks, work: PassOrder) -> dict[int, np.ndarray]:
    """Return log-probabilities of scored tokens, by document."""
    logprobs: dict[int, np.ndarray] = {}
    for rank, output in enumerate(ranks.forward(work)):
        if ranks.topology.coords(rank).collects:
            logprobs |= {number: output.fields["logprobs"][place] for place, number in enumerate(output.sample_ids.tolist())}
    return logprobs


def _measure_distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max(initial=0.0)) if one.shape == other.shape else float("inf")


@backend_promise(
    "Log-probabilities are transformers' own for one image, several of different sizes, none, and all of them mixed",
    models=("vision",),
    exempt=_exempt_without_images,
)
def images(subject: BackendSubject, case: BackendCase) -> None:
    if not _takes_images(subject, case):
        return
    due = subject.bench.definition(case.model, NUMBERS, pictures="own").logprobs
    for rows in _rows(subject):
        with subject.open_ranks(case, rows=rows) as ranks:
            for when, cut in _cuts(case):
                got = _logprobs(ranks, PassOrder(cut, rows=rows, pictures="own"))
                for number, values in due.items():
                    if number not in got:
                        raise Undecidable(f"sample {number} does not come back at all")
                    if not _measure_distance(got[number], values) <= LOGPROBS:  # also true for NaN
                        what = {0: "one image", 1: "two images", 3: "one image", 6: "two images"}.get(number, "no image")
                        raise Broken(
                            f"log-probabilities of sample {number}, with {what}, are not those of transformers {when}, in {rows} rows",
                            "Lay every image's features on its own tokens, and turn by three-dimensional positions (rotary_positions)",
                        )


@backend_promise(
    "Other pixels give other log-probabilities, to the samples whose images they are and to no others",
    models=("vision",),
    exempt=_exempt_without_images,
)
def images_matter(subject: BackendSubject, case: BackendCase) -> None:
    if not _takes_images(subject, case):
        return
    changes: tuple[tuple[Variant, tuple[int, ...]], ...] = (("negated", WITH_PICTURES), ("swapped", (0, 3)))
    with subject.open_ranks(case) as ranks:
        before = _logprobs(ranks, case.whole(pictures="own"))
        for variant, changed in changes:
            after = _logprobs(ranks, case.whole(pictures=variant))
            for number, values in before.items():
                distance = _measure_distance(after.get(number, values[:0]), values)
                if number in changed and not distance > SEEN:
                    raise Broken(
                        f"nothing of sample {number} changes where its pixels are {variant} (by {distance:.1e})",
                        "Give the model pixel_values and image_grid_thw",
                    )
                if number not in changed and not distance <= LOGPROBS:
                    raise Broken(
                        f"sample {number} changes where the pixels of others are {variant}",
                        "Give every sample its own images: ragged_offsets say which they are",
                    )


@backend_promise(
    "The gradient over images is transformers' own, vision tower included, also where a rank or a micro-batch has none",
    models=("vision",),
    exempt=_exempt_without_images,
)
def image_gradients(subject: BackendSubject, case: BackendCase) -> None:
    if not _takes_images(subject, case):
        return
    due = subject.bench.definition(case.model, NUMBERS, pictures="own").gradients
    for rows in _rows(subject):
        together, apart = _cuts(case)
        when, cut = apart if rows == "padded" else together
        with subject.open_ranks(case, rows=rows) as ranks:
            ranks.forward_backward(PassOrder(cut, rows=rows, pictures="own"))
            gradients = ranks.gradients()[0]
        try:
            require_same_gradients(
                gradients,
                due,
                f"of transformers' own model, under {case.sizes}, {when}, in {rows} rows",
                "Train the vision tower with the rest; run it without an image too, with a part in the gradient that is 0",
                facts={},
            )
        except Broken as broken:
            if broken.factor is not None:  # the tower's like all else
                raise Undecidable("the whole gradient is off by a factor already") from broken
            raise


@backend_promise(
    "Image tokens without their image are a SampleError that names the sample",
    layouts="one data-parallel rank",
    models=("vision",),
    exempt=_exempt_without_images,
)
def miscounted_images(subject: BackendSubject, case: BackendCase) -> None:
    if not _takes_images(subject, case):
        return
    try:
        with subject.open_ranks(case) as ranks:
            ranks.forward(case.whole(pictures="missing"))
    except DataError as error:
        require_words(error)
        if not isinstance(error, SampleError) or error.sample != 0:
            raise Broken(
                f"does not say that it is sample 0 whose image is missing: {error.cause}",
                "Raise SampleError with the sample's id of sample_ids",
            ) from error
        return
    raise Broken(
        "says nothing where a sample has image tokens and no image",
        "Compare them by skyrl_engine.modeling.images.placed_images",
    )


@backend_promise("Images, which it does not declare, are refused in words", models=("vision",), exempt=_exempt_with_images)
def undeclared_images(subject: BackendSubject, case: BackendCase) -> None:
    if _takes_images(subject, case):
        return
    try:
        with subject.open_ranks(case) as ranks:
            ranks.forward(case.whole(pictures="own"))
    except EngineError as error:
        require_words(error)
        return
    raise Broken("takes images although it does not declare 'vision'", "Declare it, or raise UnsupportedError in setup")


VISION_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (
    images,
    images_matter,
    image_gradients,
    miscounted_images,
    undeclared_images,
)
