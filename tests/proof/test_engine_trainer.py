"""Our engine, held to the promise by the program that holds other trainers to it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_rows import PREFERENCES, ROLLOUTS, ROWS, load_llama

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.tiny import write_tokenizer
from skyrl_engine.proof.engine_trainer import adapt_engine
from skyrl_engine.proof.trainer import TrainerProof, prove_trainer
from skyrl_engine.proof.trainer_cuts import TrainerCut, standard_cuts
from skyrl_engine.proof.trainer_definitions import define_dpo, define_grpo, define_token_mean

LEFT = "the engine's rows are padded on the right. Take cuts that pad on the right"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one that differs from it."""
    model, reference = (tmp_path_factory.mktemp(name) for name in ("model", "reference"))
    write_tokenizer(model, ["a few words"])
    load_llama(model)
    moved = load_llama(reference)
    with torch.no_grad():
        for weights in moved.parameters():
            weights.mul_(1.01)
    moved.save_pretrained(reference)
    return model, reference


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def configure(folder: Path, loss: dict[str, Any], reducer: str) -> dict[str, dict[str, Any]]:
    return {"model": {"path": str(folder), "dtype": "float32"}, "loss": loss, "reducer": {"use": reducer}}


def assert_all_hold_but_left(proof: TrainerProof) -> None:
    assert not proof.wrong, proof
    assert [verdict.explanation for verdict in proof.verdicts if verdict.refused] == [LEFT], proof


@pytest.mark.usefixtures("without_ray")
def test_supervised_training_holds(folders: tuple[Path, Path]) -> None:
    cuts = [*standard_cuts(ROWS), *(TrainerCut(micro_batch_rows=size, ranks=2) for size in (3, 2))]
    definition = define_token_mean(load(folders[0]), ROWS)
    with adapt_engine(configure(folders[0], {"use": "cross_entropy"}, "token_mean")) as gradients:
        assert_all_hold_but_left(prove_trainer(gradients, ROWS, cuts=cuts, definition=definition))


def test_a_reducer_of_micro_batches_is_named(folders: tuple[Path, Path]) -> None:
    cut = TrainerCut(micro_batch_rows=2)
    definition = define_token_mean(load(folders[0]), ROWS)
    with adapt_engine(configure(folders[0], {"use": "cross_entropy"}, "token_mean_legacy")) as gradients:
        (verdict,) = prove_trainer(gradients, ROWS, cuts=[cut], definition=definition).verdicts
    assert "gradient x1.00: samples count from x" in verdict.explanation


def test_preferences_hold(folders: tuple[Path, Path]) -> None:
    model, reference = map(load, folders)
    config = configure(folders[0], {"use": "dpo", "beta": 0.3}, "sequence_mean")
    definition = define_dpo(model, reference, PREFERENCES, beta=0.3)
    with adapt_engine(config, reference=str(folders[1])) as gradients:
        assert_all_hold_but_left(prove_trainer(gradients, PREFERENCES, definition=definition))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_rollouts_hold(folders: tuple[Path, Path], reduction: Any) -> None:
    definition = define_grpo(load(folders[0]), ROLLOUTS, reduction=reduction)
    with adapt_engine(configure(folders[0], {"use": "ppo"}, reduction)) as gradients:
        assert_all_hold_but_left(prove_trainer(gradients, ROLLOUTS, definition=definition))


def test_what_the_cut_chooses_is_refused() -> None:
    for tables in ({"collator": {"use": "padded"}}, {"run": {"ranks": 2}}):
        with pytest.raises(UnsupportedError, match="the cut chooses"), adapt_engine(tables):
            pass


def test_ranks_with_unequal_micro_batches_are_refused(folders: tuple[Path, Path]) -> None:
    cut = TrainerCut(micro_batch_rows=1, ranks=2)
    with adapt_engine(configure(folders[0], {"use": "cross_entropy"}, "token_mean")) as gradients:
        (verdict,) = prove_trainer(
            gradients, ROWS[:5], cuts=[cut], definition=define_token_mean(load(folders[0]), ROWS[:5])
        ).verdicts
    assert verdict.refused
    assert "equally many micro-batches" in verdict.explanation
