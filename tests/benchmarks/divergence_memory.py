"""Memory of a step that compares with a teacher over the whole vocabulary, against that of plain fine-tuning on the same rows.

Peak memory of the second forward and backward pass less the gradients that it leaves; weights, those of the teacher too, and moments are
held before and do not count. One micro-batch of 1,024 tokens, a student of width 64 and a teacher of width 128, both of one layer, on the CPU
in float32. The bar is 1.3 times plain fine-tuning, at vocabularies of 32,000 and 152,064. Counts of bytes, so that no machine is quicker.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring.allocations import highest
from measuring.bars import compare_with_bar

from skyrl_engine import Engine
from skyrl_engine.contracts import ModelConfig, SampleColumns
from skyrl_engine.contracts.kinds.needs import TEACHER_MODEL
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

BAR = 1.3
VOCABULARIES = (32_000, 152_064)
ROWS, WIDTH = 8, 128
PLAIN: Mapping[str, Any] = {"use": "cross_entropy"}
KINDS: Mapping[str, Mapping[str, Any]] = {
    kind: {"use": "divergence", "divergence": kind} for kind in ("forward", "reverse", "jensen_shannon")
}


def write_models(folder: Path, vocabulary: int) -> None:
    """Write `student` and `teacher`."""
    for name, width in (("student", 64), ("teacher", 128)):
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1, "vocab_size": vocabulary}
        tokenizer = write_tokenizer(folder / name, ["one two three"])
        with quiet_progress():
            write_model(folder / name, **sizes, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)


def beyond_gradients(folder: Path, vocabulary: int, loss: Mapping[str, Any]) -> int:
    """Bytes at the highest point of a forward and backward pass, less those of the gradients."""
    tables = {
        "model": {"path": str(folder / "student")},
        "collator": {"use": "padded"},
        "loss": dict(loss),
        "run": {"device": "cpu"},
        "optimizer": {"schedule": "constant"},
    }
    draw = np.random.default_rng(0)
    columns = SampleColumns.from_lists(
        input_ids=[draw.integers(3, vocabulary, WIDTH).tolist() for _ in range(ROWS)], num_actions=[WIDTH - 1] * ROWS
    )
    with Engine.open(tables) as engine:
        if loss["use"] != PLAIN["use"]:
            engine.add_frozen(FrozenModel(TEACHER_MODEL, ModelConfig(str(folder / "teacher"))))
        plan = engine.plan(columns, micro_batch_rows=ROWS)
        engine.train(plan, per_token_outputs=False)
        peak = highest(lambda: engine.forward_backward(plan, per_token_outputs=False).result(), folder / "trace.json")
        return peak - sum(gradient.nbytes for gradient in engine.gradients().values())


def main() -> None:
    print(f"torch {torch.__version__}")
    for vocabulary in VOCABULARIES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_models(folder, vocabulary)
            plain = beyond_gradients(folder, vocabulary, PLAIN)
            print(f"vocabulary {vocabulary:,}: fine-tuning {plain / 2**20:.0f} MiB")
            for kind, loss in KINDS.items():
                taught = beyond_gradients(folder, vocabulary, loss)
                print(
                    f"  {kind}: {taught / 2**20:.0f} MiB, {taught / plain:.2f} times {compare_with_bar(taught / plain, at_most=BAR)}"
                )


if __name__ == "__main__":
    main()
