"""A promise of backends about the weights after setup: every rank has those of the model's files, however its code makes parameters."""

import numpy as np

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import EngineError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.testing.backends.score_promises import SCORES
from skyrl_engine.testing.backends.state_promises import transformers_weights
from skyrl_engine.testing.backends.subject import NUMBERS, BackendCase, BackendSubject, backend_promise
from skyrl_engine.testing.promise import Broken, Promise

REMEDY = "Load or broadcast every parameter and buffer on every rank, whatever device it was made on; skip none by is_meta"


@backend_promise(
    "After setup every rank holds and scores with what the model's files hold, also where parameters are made outside of "
    'torch.device("meta")',
    layouts="several ranks",
    models=("outside meta",),
)
def placed_weights(subject: BackendSubject, case: BackendCase) -> None:
    spec = ModelConfig(subject.bench.model(case.model))
    try:
        described = subject.describe(case.sizes.options, case.sizes.ranks)
        described.refuse_model(load_config(spec), spec)
        described.rehearse(spec, "padded")
    except EngineError:
        return
    due = transformers_weights(spec.path)
    with subject.open_ranks(case) as ranks:
        weights_by_rank, returned = ranks.weights(), ranks.forward(case.whole())
    for rank, weights in enumerate(weights_by_rank):
        wrong = [name for name, weight in due.items() if name not in weights or not np.array_equal(weights[name], weight)]
        if wrong:
            raise Broken(f"{wrong[0]} of rank {rank} is not what the model's files hold ({len(wrong)} such tensors)", REMEDY)
    logprobs = subject.bench.definition(case.model, NUMBERS).logprobs
    for rank, output in enumerate(returned):
        if not ranks.topology.coords(rank).collects:
            continue
        for place, number in enumerate(output.sample_ids.tolist()):
            got, expected = output.fields["logprobs"][place], logprobs.get(number, np.zeros(0))
            if got.shape != expected.shape or not np.allclose(got, expected, rtol=0, atol=SCORES):
                distance = float(np.abs(got - expected).max(initial=0)) if got.shape == expected.shape else float("inf")
                raise Broken(
                    f"rank {rank} scores sample {number} otherwise than transformers' own model, by {distance:.1e} nats", REMEDY
                )


PLACEMENT_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (placed_weights,)
