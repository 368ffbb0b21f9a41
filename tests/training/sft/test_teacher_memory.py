"""A step that compares with a teacher over the whole vocabulary needs about as much memory as plain fine-tuning on the same rows.

Bytes that tensors held at the highest point of a pass, less the gradients it leaves; counted, so that they are the same on every machine.
`nox -s bench` prints them for vocabularies of 32,000 and 152,064.
"""

from pathlib import Path

import pytest
from divergence_memory import BAR, KINDS, PLAIN, VOCABULARIES, beyond_gradients, write_models


@pytest.mark.proof
@pytest.mark.parametrize(
    ("vocabulary", "kinds"),
    [(VOCABULARIES[0], ["jensen_shannon"]), pytest.param(VOCABULARIES[1], list(KINDS), marks=pytest.mark.nightly)],
)
def test_a_teacher_costs_at_most_the_bar(tmp_path: Path, vocabulary: int, kinds: list[str]) -> None:
    """By day measure the divergence that holds most at a time. Logits of both models at all positions would be 20 times as much at 152,064."""
    write_models(tmp_path, vocabulary)
    plain = beyond_gradients(tmp_path, vocabulary, PLAIN)
    for kind in kinds:
        assert beyond_gradients(tmp_path, vocabulary, KINDS[kind]) < BAR * plain, kind
