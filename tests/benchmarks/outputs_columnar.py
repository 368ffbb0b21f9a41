"""CPU time of per-token outputs as a list of dicts of Python floats over that as columns: 1,024 responses of 2,048 tokens.

Two fields (log-probabilities and token losses) leave the micro-batches of one rank as tensors. Either they are collected as the engine does,
or every sample becomes a dict with `.tolist()` of its row. Three figures: what the rank does; the same and the batch put back into the caller's
order in the same process; and both with the outputs sent to another process in between. Rounds are interleaved in one process; a figure is
the ratio of the least CPU times. Run with `nox -s bench`.
"""

import pickle
from typing import Any

import numpy as np
import torch
from attrs import frozen
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine

from skyrl_engine.contracts.values.outputs import BatchOutput, RankOutput
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MiniBatchPlan, one_sample_per_row
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.objective.behind import Later
from skyrl_engine.objective.outputs import collect
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine_mergers.ordered import OrderedMerger

SAMPLES, TOKENS, ROWS = 1024, 2048, 8
ROUNDS = 7
BARS = {"on the rank": 20.0}
ELSEWHERE = 4.0
"""Cost of dicts over that of columns: plugins/mergers/README.md."""
Dicts = list[dict[str, Any]]
CPU = torch.device("cpu")


@frozen(eq=False)
class Outputs:
    """Results of one rank: micro-batches of `ROWS` samples in an order of its own, their tensors float32[ROWS * TOKENS] by field."""

    plan: BatchPlan
    samples: list[ScoredSamples]
    tensors: list[dict[str, torch.Tensor]]

    def as_columns(self) -> RankOutput:
        """The engine's rank returns this."""
        parts = zip(self.samples, self.tensors, strict=True)
        return RankOutput.concat([collect(samples, tensors, {}, Later(CPU), per_token_outputs=True) for samples, tensors in parts])

    def as_dicts(self) -> Dicts:
        """One dict per sample."""
        dicts = []
        for samples, tensors in zip(self.samples, self.tensors, strict=True):
            rows = {name: tensor.view(ROWS, TOKENS) for name, tensor in tensors.items()}
            for row, sample_id in enumerate(samples.sample_ids.tolist()):
                dicts.append({"sample_id": sample_id, **{name: values[row].tolist() for name, values in rows.items()}})
        return dicts

    def merged(self, output: RankOutput) -> BatchOutput:
        return OrderedMerger().merge([output], self.plan)


def sort_by_id(dicts: Dicts) -> Dicts:
    return sorted(dicts, key=lambda output: output["sample_id"])


def send(value: Any) -> Any:
    """To another process the way Ray sends it: arrays are copied once, into shared memory, and read from there; all else is pickled."""
    arrays: list[pickle.PickleBuffer] = []
    message = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    return pickle.loads(message, buffers=[bytearray(array.raw()) for array in arrays])


def make_outputs() -> Outputs:
    """Random values; every response token is scored."""
    generator = np.random.default_rng(0)
    ids = np.split(generator.permutation(SAMPLES), SAMPLES // ROWS)
    plan = BatchPlan(
        (MiniBatchPlan((tuple(one_sample_per_row(sample, TOKENS, TOKENS) for sample in ids),)),), Layout(), np.arange(SAMPLES)
    )
    places = Ragged(np.tile(np.arange(TOKENS, dtype=np.int32), ROWS), offsets_of([TOKENS] * ROWS))
    samples = [
        ScoredSamples(
            sample_ids=sample,
            group_ids=sample,
            unit_ids=sample,
            action_lengths=np.full(ROWS, TOKENS),
            scored=places,
            columns={},
            weights=np.ones(ROWS * TOKENS),
        )
        for sample in ids
    ]
    names = ("logprobs", "token_loss")
    tensors = [{name: torch.from_numpy(generator.random(ROWS * TOKENS, dtype=np.float32)) for name in names} for _ in ids]
    return Outputs(plan, samples, tensors)


def ratios(outputs: Outputs) -> dict[str, tuple[float, float]]:
    """Least CPU seconds of columns and of dicts, by what is done with them."""
    ways = {
        "on the rank": (outputs.as_columns, outputs.as_dicts),
        "to the caller's order, in one process": (
            lambda: outputs.merged(outputs.as_columns()),
            lambda: sort_by_id(outputs.as_dicts()),
        ),
        "to the caller's order, between processes": (
            lambda: outputs.merged(send(outputs.as_columns())),
            lambda: sort_by_id(send(outputs.as_dicts())),
        ),
    }
    measured = {}
    for name, (columns, dicts) in ways.items():
        least = interleave({"columns": columns, "dicts": dicts}, ROUNDS)
        measured[name] = least["columns"], least["dicts"]
    return measured


def main() -> None:
    print(f"{machine()}, NumPy {np.__version__}; {ROUNDS} rounds")
    for name, (columns, dicts) in ratios(make_outputs()).items():
        ratio = dicts / columns
        bar = compare_with_bar(ratio, at_least=BARS.get(name, ELSEWHERE))
        print(f"{name}: {columns * 1e3:.1f} ms as columns, {dicts * 1e3:.0f} ms as dicts, {ratio:.0f} times less {bar}")


if __name__ == "__main__":
    main()
