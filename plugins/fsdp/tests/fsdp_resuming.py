"""Checks that every divided model passes: training goes on exactly from a checkpoint, in its own layout and another; the export is whole."""

from pathlib import Path

import numpy as np
import torch
from fsdp_tasks import continue_training, export_weights, resume_checkpoint, save_checkpoint
from transformers import AutoModelForCausalLM

from skyrl_engine.contracts import AdamWSettings
from skyrl_engine.testing.backends.batches import documents
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.plugin import FsdpConfig

OPTIMIZER = AdamWSettings(learning_rate=1e-2)


def check_resume_and_export(ranks: World, directory: str, folder: Path, options: FsdpConfig) -> None:
    """Saved in `folder` and loaded equals uninterrupted, bit for bit; transformers loads what is exported, and it scores the same."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    for uninterrupted, resumed in ranks.run(continue_training, directory, OPTIMIZER, checkpoint, options, before=1, after=2):
        assert uninterrupted[0] == resumed[0]
        for name, weight in uninterrupted[1].items():
            np.testing.assert_array_equal(weight, resumed[1][name], err_msg=name)
    (weights, logprobs), *_ = ranks.run(export_weights, directory, folder / "export", options)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "export")
    for name, parameter in loaded.named_parameters():
        np.testing.assert_array_equal(weights[name], parameter.detach().numpy(), err_msg=name)
    row = documents()[0]
    with torch.no_grad():
        due = loaded(input_ids=row.ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, row.ids[1:, None])[:, 0]
    np.testing.assert_allclose(logprobs, due[row.weights[1:] != 0].numpy(), atol=1e-5)


def check_other_layout(ranks: World, directory: str, folder: Path, wrote: FsdpConfig, reads: FsdpConfig) -> None:
    """Another layout reads in `folder` what one saved there: weights and moments bit for bit."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (_, weights, moments), *_ = ranks.run(save_checkpoint, directory, OPTIMIZER, checkpoint, wrote)
    for _, resumed, own in ranks.run(resume_checkpoint, directory, OPTIMIZER, checkpoint, reads):
        for due, got in ((weights, resumed), (moments, own)):
            assert due.keys() == got.keys()
            for name, values in due.items():
                np.testing.assert_array_equal(got[name], values, err_msg=name)
