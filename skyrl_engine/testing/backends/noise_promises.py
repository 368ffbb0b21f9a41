"""Promises of a backend about noise on input embeddings in training (NEFTune)."""

from skyrl_engine.errors import EngineError
from skyrl_engine.testing.backends.batches import NOISE
from skyrl_engine.testing.backends.gradient_comparison import require_same_gradients
from skyrl_engine.testing.backends.held_backend import PassOrder
from skyrl_engine.testing.backends.subject import (
    NUMBERS,
    BackendCase,
    BackendSubject,
    backend_promise,
    exempt_with,
    exempt_without,
    require_words,
)
from skyrl_engine.testing.promise import Broken, Promise


@backend_promise(
    "Noise on input embeddings is what a micro-batch says, over padded rows and packed ones, and none where it says nothing",
    exempt=exempt_without("embedding_noise"),
)
def embedding_noise(subject: BackendSubject, case: BackendCase) -> None:
    declared = subject.describe(case.sizes.options, case.sizes.ranks).capabilities
    if "embedding_noise" not in declared:
        return
    cut = case.cut(micro_batches=2)
    for rows in ("padded", "packed") if "packed" in declared else ("padded",):
        with subject.open_ranks(case, rows=rows, neftune_alpha=NOISE) as ranks:
            for noise in (True, False):
                ranks.forward_backward(PassOrder(cut, rows=rows, noise=noise))
                got = ranks.gradients()[0]
                ranks.zero_grad()
                require_same_gradients(
                    got,
                    subject.bench.definition(case.model, NUMBERS, noise=noise).gradients,
                    f"of transformers' own model {'with' if noise else 'without'} noise on its embeddings, over {rows} rows",
                    "Add `MicroBatch.noise` in that pass alone, as modeling.embedding_noise does",
                    facts={},
                )


@backend_promise("Noise on input embeddings, which it does not declare, is refused in words", exempt=exempt_with("embedding_noise"))
def undeclared_embedding_noise(subject: BackendSubject, case: BackendCase) -> None:
    try:
        with subject.open_ranks(case, neftune_alpha=NOISE) as ranks:
            ranks.forward_backward(case.whole(noise=True))
    except EngineError as error:
        require_words(error)
        return
    raise Broken(
        "ignores model.neftune_alpha, which it does not declare",
        "Add `MicroBatch.noise` and declare 'embedding_noise', or raise UnsupportedError in setup",
    )


NOISE_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (embedding_noise, undeclared_embedding_noise)
