"""Peak memory of a training step does not grow with tokens x vocabulary.

Counted in the profiler's allocation events. What lives between steps (weights, moments) is added to the highest point inside one step
(gradients, activations, one chunk).

Claim: from vocabulary 32,000 to 152,064 the peak grows by less than what the tables that have a row per token own (weight, gradient and two
moments each) plus one chunk of logits. With tied weights there is one such table, the head; without, the input embedding is another. Without
chunks, 1,024 positions would add 1,024 x 120,064 x 4 bytes = 469 MiB for one copy of the logits alone, and the test could not pass. Not
covered: with tied weights of a wide model, autograd makes the input embedding's own dense gradient before adding it to the head's.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_tasks import start
from measuring.allocations import highest

from skyrl_engine.contracts import MicroBatch, Ragged
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.backends.batches import Document, WeightedObjective

HIDDEN, TOKENS, LOGITS_PER_CHUNK = 64, 1024, 2**22
SMALL, LARGE = 32_000, 152_064


def peak_bytes(directory: Path, vocabulary: int, *, tied: bool) -> int:
    """Weights and moments plus the highest sum of live allocations in the second training step."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 1}
    write_model(directory / "model", tie_word_embeddings=tied, vocab_size=vocabulary, **sizes)
    backend = start(
        str(directory / "model"),
        logits_per_chunk=LOGITS_PER_CHUNK,
    )
    ids = torch.randint(0, vocabulary, (TOKENS // 128, 128))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    lengths = Ragged.from_list([[128]] * (TOKENS // 128), np.int64)
    everything = Document(0, ids.flatten(), torch.ones(TOKENS))
    batch = [MicroBatch(inputs, torch.arange(TOKENS), ids.flatten().roll(-1), lengths, [everything])]

    objective = WeightedObjective(per_token_outputs=False)

    def step() -> None:
        backend.forward_backward(batch, objective)
        backend.optim_step()

    step()
    kept = [*backend._scorer.parameters(), *(value for state in backend._optimizer.state.values() for value in state.values())]
    peak = highest(step, directory / "trace.json")
    backend.close()
    return sum(tensor.nbytes for tensor in kept) + peak


@pytest.mark.proof
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tied", [pytest.param(True, id="tied"), pytest.param(False, id="untied", marks=pytest.mark.nightly)])
def test_peak_memory_follows_the_tables_and_one_chunk(tmp_path: Path, tied: bool) -> None:
    difference = peak_bytes(tmp_path / "large", LARGE, tied=tied) - peak_bytes(tmp_path / "small", SMALL, tied=tied)
    table = (LARGE - SMALL) * HIDDEN * 4
    owned = 4 * table * (1 if tied else 2)
    print(f"tied {tied}: peak grew by {difference / 2**20:.0f} MiB, the tables own {owned / 2**20:.0f} MiB")
    assert difference < owned + 4 * LOGITS_PER_CHUNK
