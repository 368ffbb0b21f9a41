"""A few samples of a run's first mini-batch, kept for people to look at: tokens and loss weights as training saw them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, frozen

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.contracts.values.roles import ROLE
from skyrl_engine.run.durable import write_durably

FORMAT = 1
KEPT = 4
"""Samples, or pairs, that are kept."""
LONGEST = 2_048
"""Tokens of a sample that are kept."""


@frozen
class KeptSample:
    """A sample: `token_ids` and `loss_weights` of its first tokens, of `tokens` in all; `unit` numbers what belongs together, and `role` is 0
    for the chosen half of a preference, 1 for the rejected one, None elsewhere.
    """

    unit: int
    role: int | None
    tokens: int
    token_ids: tuple[int, ...]
    loss_weights: tuple[float, ...]


def keep_samples(path: Path, columns: SampleColumns, mini_batch: IntArray) -> None:
    """Write the first samples of a mini-batch, whole units of them. Raises OSError."""
    units = list(dict.fromkeys(columns.unit_ids[mini_batch].tolist()))[:KEPT]
    places = mini_batch[np.isin(columns.unit_ids[mini_batch], units)]
    chosen = columns.take(places)
    roles = chosen.sample_values.get(ROLE)
    samples = []
    for place, (begin, end) in enumerate(pairwise(chosen.token_offsets.tolist())):
        weights = np.zeros(end - begin)
        first, last = chosen.action_offsets[place : place + 2]
        weights[len(weights) - (last - first) :] = chosen.loss_weight[first:last]
        samples.append(
            KeptSample(
                units.index(int(chosen.unit_ids[place])),
                None if roles is None else int(roles[place]),
                end - begin,
                tuple(chosen.input_ids[begin : begin + min(end - begin, LONGEST)].tolist()),
                tuple(weights[:LONGEST].tolist()),
            )
        )
    write_durably(path, json.dumps({"format": FORMAT, "samples": [asdict(sample) for sample in samples]}) + "\n")


def read_samples(path: Path) -> list[KeptSample]:
    """Return the kept samples; none where there is no file, or one that cannot be read."""
    try:
        document: Any = json.loads(path.read_text())
        return [
            KeptSample(
                int(sample["unit"]),
                None if sample["role"] is None else int(sample["role"]),
                int(sample["tokens"]),
                tuple(map(int, sample["token_ids"])),
                tuple(map(float, sample["loss_weights"])),
            )
            for sample in document["samples"]
        ]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
