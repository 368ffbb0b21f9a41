"""Findings of the prover in other trainers, beside ours, in `nox -s peers`: the table of the page docs/explanation/what-we-found-in-others.md,
and each of its findings, reproduced.

A finding that is gone fails, and says which row to take out. `--write` puts the table that was measured into the page.
"""

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import torch
from attrs import frozen
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from skyrl_engine.modeling.tiny import write_tokenizer
from skyrl_engine.proof.diagnosis import Pieces
from skyrl_engine.proof.engine_trainer import adapt_engine
from skyrl_engine.proof.row_kinds import Row
from skyrl_engine.proof.trainer import GradientFunction, TrainerVerdict, prove_trainer, read_gradients
from skyrl_engine.proof.trainer_cuts import TrainerCut
from skyrl_engine.proof.trainer_definitions import define_dpo, define_grpo, define_token_mean
from skyrl_engine.proof.transformers_trainer import adapt_transformers_trainer
from skyrl_engine.proof.trl_trainers import adapt_dpo_trainer, adapt_grpo_trainer, adapt_sft_trainer
from skyrl_engine.testing.ranks.world import start_shared_world
from skyrl_engine.testing.ranks.world_transport import OwnRanksTransport

sys.path.insert(0, str(Path(__file__).parents[1] / "running"))
from trainer_rows import COMPLETIONS, PREFERENCES, ROLLOUTS, ROWS, load_llama

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "what-we-found-in-others.md"
BEGIN, END = "<!-- measured by tests/proof/findings_in_others.py -->\n", "<!-- end of what was measured -->\n"
BETA = 0.3

CUTS: Mapping[str, Mapping[int, TrainerCut]] = {
    "at once": {6: TrainerCut(micro_batch_rows=6), 8: TrainerCut(micro_batch_rows=8)},
    "by 2": dict.fromkeys((6, 8), TrainerCut(micro_batch_rows=2)),
    "by 1": dict.fromkeys((6, 8), TrainerCut(micro_batch_rows=1)),
    "uneven": {6: TrainerCut(micro_batch_rows=4), 8: TrainerCut(micro_batch_rows=3)},
    "padded left": dict.fromkeys((6, 8), TrainerCut(micro_batch_rows=2, extra_padding=3, padding_side="left")),
    "packed": dict.fromkeys((6, 8), TrainerCut(micro_batch_rows=2, form="packed")),
    "2 ranks": {6: TrainerCut(micro_batch_rows=3, ranks=2), 8: TrainerCut(micro_batch_rows=4, ranks=2)},
}
"""The table's columns: the cut of six rows or of eight."""

Verdicts = Mapping[str, TrainerVerdict]


@frozen(eq=False)
class Models:
    """A tiny Llama and its reference, and their folders."""

    folder: Path
    model: Any
    reference: Any
    tokenizer: Any

    @classmethod
    def write(cls, folder: Path) -> "Models":
        for name in ("model", "reference"):
            (folder / name).mkdir()
        tokenizer = write_tokenizer(folder / "model", ["a few words"])
        model = load_llama(folder / "model")
        reference = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        torch.manual_seed(0)
        with torch.no_grad():
            for weights in reference.parameters():
                weights.add_(torch.randn_like(weights), alpha=0.02)
        reference.save_pretrained(folder / "reference")
        return cls(folder, model, reference, tokenizer)

    def ours(self, loss: Mapping[str, Any], reducer: Mapping[str, Any]) -> Any:
        """Return a context that gives the gradient function of `Engine`."""
        tables = {
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "loss": loss,
            "reducer": reducer,
        }
        return adapt_engine(tables, reference=str(self.folder / "reference") if loss["use"] == "dpo" else None)


@frozen(eq=False)
class Subject:
    """A row of the table: a trainer with its settings. `measure` is the definition, None: its own gradient of all rows at once."""

    name: str
    trainer: Any
    rows: Sequence[Row]
    measure: Pieces | None
    columns: Sequence[str] = tuple(CUTS)

    def prove(self) -> Verdicts:
        opened = self.trainer if hasattr(self.trainer, "__enter__") else nullcontext(self.trainer)
        with opened as gradients:
            cuts = [CUTS[column][len(self.rows)] for column in self.columns]
            verdicts = prove_trainer(gradients, self.rows, cuts=cuts, definition=self.measure).verdicts
        return dict(zip(self.columns, verdicts, strict=True))


def list_subjects(models: Models) -> list[Subject]:
    model, tokenizer, ranks = models.model, models.tokenizer, start_shared_world
    tokens = define_token_mean(model, ROWS)
    pairs = define_dpo(model, models.reference, PREFERENCES, beta=BETA)
    by_token = define_grpo(model, ROLLOUTS, reduction="token_mean")
    by_sequence = define_grpo(model, ROLLOUTS, reduction="sequence_mean")
    by_length = define_grpo(model, ROLLOUTS, reduction="fixed_length", longest=max(COMPLETIONS))
    one_process = tuple(name for name in CUTS if name != "2 ranks")

    def sft(**arguments: Any) -> GradientFunction:
        return adapt_sft_trainer(model, tokenizer, start_ranks=ranks, **arguments)

    def dpo(**arguments: Any) -> GradientFunction:
        return adapt_dpo_trainer(model, tokenizer, reference=models.reference, beta=BETA, start_ranks=ranks, **arguments)

    def grpo(**arguments: Any) -> GradientFunction:
        return adapt_grpo_trainer(model, tokenizer, start_ranks=ranks, **arguments)

    return [
        Subject("`Trainer`", adapt_transformers_trainer(model, start_ranks=ranks), ROWS, tokens),
        Subject("`SFTTrainer`", sft(), ROWS, tokens),
        Subject('`SFTTrainer`, `loss_type="dft"`', sft(loss_type="dft"), ROWS, None, one_process),
        Subject(
            "`SFTTrainer`, `average_tokens_across_devices=False`",
            sft(average_tokens_across_devices=False),
            ROWS,
            tokens,
            ("by 2", "2 ranks"),
        ),
        Subject("ours: `cross_entropy`, `token_mean`", models.ours({"use": "cross_entropy"}, {"use": "token_mean"}), ROWS, tokens),
        Subject("`DPOTrainer`", dpo(), PREFERENCES, pairs),
        Subject(
            '`DPOTrainer`, `loss_type=["sigmoid", "sft"]`',
            dpo(loss_type=["sigmoid", "sft"]),
            PREFERENCES,
            whole(dpo(loss_type=["sigmoid", "sft"]), PREFERENCES),
            one_process,
        ),
        Subject(
            '`DPOTrainer`, `loss_type="aot"`',
            dpo(loss_type="aot"),
            PREFERENCES,
            whole(dpo(loss_type="aot"), PREFERENCES),
            one_process,
        ),
        Subject(
            "ours: `dpo`, `sequence_mean`", models.ours({"use": "dpo", "beta": BETA}, {"use": "sequence_mean"}), PREFERENCES, pairs
        ),
        Subject('`GRPOTrainer`, `loss_type="grpo"`', grpo(loss_type="grpo"), ROLLOUTS, by_sequence),
        Subject('`GRPOTrainer`, `loss_type="bnpo"`', grpo(loss_type="bnpo"), ROLLOUTS, by_token),
        Subject('`GRPOTrainer`, `loss_type="dapo"`', grpo(loss_type="dapo"), ROLLOUTS, by_token),
        Subject('`GRPOTrainer`, `loss_type="dr_grpo"`', grpo(loss_type="dr_grpo"), ROLLOUTS, by_length),
        Subject("ours: `ppo`, `sequence_mean`", models.ours({"use": "ppo"}, {"use": "sequence_mean"}), ROLLOUTS, by_sequence),
        Subject("ours: `ppo`, `token_mean`", models.ours({"use": "ppo"}, {"use": "token_mean"}), ROLLOUTS, by_token),
        Subject(
            "ours: `ppo`, `sequence_mean_token_sum_norm`",
            models.ours({"use": "ppo"}, {"use": "sequence_mean_token_sum_norm", "max_sequence_length": max(COMPLETIONS)}),
            ROLLOUTS,
            by_length,
        ),
    ]


def whole(gradients: GradientFunction, rows: Sequence[Row]) -> Pieces:
    """Return a trainer's gradient of all rows at once as the measure, where it is no sum over rows."""
    made = gradients(rows, TrainerCut(micro_batch_rows=len(rows)))
    return Pieces(["0"], [made.gradients], np.ones(1))


def write_cell(verdict: TrainerVerdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.refused:
        return "refused"
    assert verdict.difference is not None
    if verdict.holds:
        return "holds"
    return f"{verdict.difference:.0%}" if verdict.difference >= 0.005 else f"{verdict.difference:.0e}"


def write_table(found: Mapping[str, Verdicts]) -> str:
    lines = [f"| trainer | {' | '.join(CUTS)} |", f"|---|{'---|' * len(CUTS)}"]
    lines += [f"| {name} | {' | '.join(write_cell(verdicts.get(column)) for column in CUTS)} |" for name, verdicts in found.items()]
    return "\n".join(lines) + "\n"


def expect(here: bool, finding: str) -> None:
    if not here:
        raise AssertionError(f"gone: {finding}. Take it out of {PAGE.name}, and out of this program")


def check_findings(found: Mapping[str, Verdicts]) -> None:
    """Check what the page says of the table: ours holds wherever it is not refused, and so does each cell without a finding."""

    def differs(name: str, *columns: str) -> None:
        for column in columns:
            verdict = found[name].pop(column)
            expect(not verdict.holds and not verdict.refused, f"{name} depends on the cut, {column}")
            print(f"{name}, {column}: {verdict.difference:.2e}, {verdict.explanation}", flush=True)

    differs("`DPOTrainer`", "uneven")
    differs('`DPOTrainer`, `loss_type="aot"`', "uneven")
    differs('`DPOTrainer`, `loss_type=["sigmoid", "sft"]`', "by 2", "by 1", "uneven", "padded left")
    differs('`GRPOTrainer`, `loss_type="bnpo"`', "by 2", "by 1", "padded left", "2 ranks")
    differs("`SFTTrainer`, `average_tokens_across_devices=False`", "2 ranks")
    for name, verdicts in found.items():
        for column, verdict in verdicts.items():
            assert verdict.holds or verdict.refused, f"{name}, {column}, is no finding of the page: {verdict}"


def attend_across_borders(models: Models) -> float:
    """Return the difference of a packed gradient in plain transformers from its definition, with the cache that is the default."""

    def train(rows: Sequence[Row], cut: TrainerCut) -> Any:
        model = models.model
        model.zero_grad()
        tokens = sum(sum(label != -100 for label in row["labels"]) for row in rows)
        for members in cut.divide(len(rows))[0]:
            chosen = [rows[place] for place in members]
            logits = model(
                input_ids=torch.tensor([[token for row in chosen for token in row["input_ids"]]]),
                position_ids=torch.tensor([[place for row in chosen for place in range(len(row["input_ids"]))]]),
            ).logits[:, :-1]
            labels = torch.tensor([label for row in chosen for label in row["labels"]])[1:]
            (torch.nn.functional.cross_entropy(logits[0], labels, reduction="sum") / tokens).backward()
        return read_gradients(model)

    cut = TrainerCut(micro_batch_rows=2, form="packed")
    definition = define_token_mean(models.model, ROWS)
    (verdict,) = prove_trainer(train, ROWS, cuts=[cut], model=models.model, definition=definition).verdicts
    expect(not verdict.holds, f"transformers {version('transformers')} attends across samples packed by position_ids")
    assert "no multiple of any sample's" in verdict.explanation
    return verdict.difference or 0.0


def read_other_scales() -> float:
    """Return the largest error of a matrix of 32 x 48 normal numbers in 4 bits, beyond that of the same numbers as one row."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    made = [
        dequantize_4bit(*quantize_4bit(shaped, blocksize=64, quant_type="nf4")).view(32, 48)
        for shaped in (weights, weights.view(1, -1))
    ]
    distance = float((made[0] - made[1]).abs().max())
    expect(distance > 0.1, f"bitsandbytes {version('bitsandbytes')} reads other scales where a row is no whole number of blocks")
    return distance


def repeat_rows() -> list[list[int]]:
    """Return the rows that two ranks of accelerate get of five, one at a time."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    ranks = [[row for (row,) in BatchSamplerShard(BatchSampler(range(5), 1, drop_last=False), 2, rank)] for rank in (0, 1)]
    expect(
        sorted(ranks[0] + ranks[1]) == [0, 0, 1, 2, 3, 4], f"accelerate {version('accelerate')} fills ranks up with the first rows"
    )
    return ranks


def read_page() -> tuple[str, str, str]:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    table, after = rest.split(END)
    return before, table, after


@contextmanager
def quiet() -> Iterator[None]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    ranks = patch("skyrl_engine.workers.ray_transport.RayTransport", lambda spec, *_: OwnRanksTransport(spec))
    with warnings.catch_warnings(), ranks:
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as name, quiet():
        models = Models.write(Path(name))
        plain: Mapping[str, Callable[[], Any]] = {
            "transformers, packed by position_ids with a cache": lambda: attend_across_borders(models),
            "bitsandbytes, 32 x 48 in 4 bits": read_other_scales,
            "accelerate, five rows on two ranks": repeat_rows,
        }
        for what, measure in plain.items():
            print(f"{what}: {measure()}", flush=True)
        found = {}
        for subject in list_subjects(models):
            found[subject.name] = subject.prove()
            print(subject.name, *found[subject.name].values(), sep="\n", flush=True)
    table = write_table(found)
    print(table, flush=True)
    before, stated, after = read_page()
    if write:
        PAGE.write_text(before + BEGIN + table + END + after, encoding="utf-8")
    else:
        assert stated == table, f"{PAGE.name} states another table: run this program with --write, and read the page again"
    check_findings(found)


if __name__ == "__main__":
    main()
