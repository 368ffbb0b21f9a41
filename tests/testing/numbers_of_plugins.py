"""Print a hash of what plugins compute for fixed batches: `numbers_of_plugins.py KIND:REFERENCE ...`. A run of it has the hashes of texts that
PYTHONHASHSEED gives it, and so the order of sets.
"""

import hashlib
import sys
from typing import Any

import numpy as np

from skyrl_engine.testing.advantages import batches
from skyrl_engine.testing.corrections.promises import CORRECTION
from skyrl_engine.testing.losses.kind import LOSS
from skyrl_engine.testing.reducers import structures
from skyrl_engine.testing.reducers.reading import reading_of
from skyrl_engine.testing.subject import Subject, selected
from skyrl_engine.testing.tokens import rollouts
from skyrl_engine.testing.tokens.kind import needs_of


def main() -> None:
    for each in sys.argv[1:]:
        kind, _, reference = each.partition(":")
        subject = Subject.of_plugin(selected(kind, reference, {}))
        digest = hashlib.sha256(b"".join(array.tobytes() for array in numbers(kind, subject))).hexdigest()
        print(each, digest, flush=True)


def numbers(kind: str, subject: Subject[Any]) -> "list[np.ndarray[Any, Any]]":
    """Return what the plugin computes."""
    if kind in ("loss", "correction"):
        batch = rollouts.varied(needs_of(subject))
        made = {"loss": LOSS, "correction": CORRECTION}[kind].evaluated(subject, batch)
        return [made.per_token, *made.gradients.values()]
    if kind == "reducer":
        reducer, reading = subject.make(), reading_of(subject, structures.in_threes())
        return [reducer.weights(reading.filled(each.structure)) for each in structures.explicit()]
    estimator = subject.make()
    given = estimator(batches.crowd(estimator.needs).batch())
    return [np.asarray(getattr(given, "advantages", given))]


if __name__ == "__main__":
    main()
