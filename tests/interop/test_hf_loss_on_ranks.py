"""`hf_loss` on two ranks, real processes under gloo: in transformers' Trainer and in a plain loop under DistributedDataParallel.

The gradient of the optimizer step is that of the mean over the tokens of all ranks: sum of -log p over all rows, divided by their number. The
ranks' rows have different numbers of tokens, so that a mean of the ranks' means is another gradient. float32:
1e-5 of the whole gradient, since sums of ranks are added in another order.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from trainer_rows import ROWS, TRAINED, load_llama

RANK = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from skyrl_engine.interop import hf_collator, hf_loss

folder, way = Path(sys.argv[1]), sys.argv[2]
rows = torch.load(folder / "rows.pt")
model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
found = []


def read():
    found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))


class Read(TrainerCallback):
    def on_pre_optimizer_step(self, *_given, **_named):
        read()


if way == "trainer":
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), per_device_train_batch_size=1, gradient_accumulation_steps=3, max_steps=1, learning_rate=0.0,
        max_grad_norm=0.0, train_sampling_strategy="sequential", remove_unused_columns=False, save_strategy="no", report_to=[], use_cpu=True,
        ddp_backend="gloo", disable_tqdm=True,
    )
    Trainer(
        model, arguments, train_dataset=rows, data_collator=hf_collator(), compute_loss_func=hf_loss(), callbacks=[Read()]
    ).train()
else:
    dist.init_process_group("gloo")
    collate, compute_loss = hf_collator("packed"), hf_loss()
    replica = DistributedDataParallel(model)
    # 4 rows and 2
    micro_batches = [collate(rows[:3]), collate(rows[3:4])] if dist.get_rank() == 0 else [collate(rows[4:5]), collate(rows[5:])]
    tokens = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches))
    dist.all_reduce(tokens)
    for batch in micro_batches:
        labels = batch.pop("labels")
        loss = compute_loss(replica(**batch), labels, tokens)
        (loss * dist.get_world_size()).backward()
    read()
rank = torch.distributed.get_rank()
torch.save(found[0], folder / f"gradient-{rank}.pt")
"""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["trainer", "loop"])
def test_two_ranks_take_the_step_of_all_rows(way: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = load_llama(tmp_path / "model")
    torch.save(ROWS, tmp_path / "rows.pt")
    due = sum(
        cross_entropy(
            model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1],
            torch.tensor(row["labels"][1:]),
            ignore_index=-100,
            reduction="sum",
        )
        for row in ROWS
    )
    (due / TRAINED).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), way],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            said, _ = process.communicate(timeout=600)
            assert process.returncode == 0, said
    finally:
        for process in ranks:
            process.kill()
    for rank in range(2):
        got = torch.load(tmp_path / f"gradient-{rank}.pt")
        assert float((got - expected).norm() / expected.norm()) <= 1e-5
