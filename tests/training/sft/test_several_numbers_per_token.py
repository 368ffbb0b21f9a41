"""A teacher's k likeliest tokens, domains and weights in rows of data, trained on as the how-to pages say; numbers checked from outside."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_engine.cli import app
from skyrl_engine.errors import DataError
from skyrl_engine.run.metrics import read_metrics

PAGES = Path(__file__).parents[3] / "docs/how-to"
DOMAINS = {"code": 2.0, "chat": 0.5}


def blocks(page: str) -> str:
    """Every decorated function of a page, as one module."""
    code = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    return "\n".join(block for block in code if "@loss" in block or "@reducer" in block)


@pytest.fixture
def files(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A model without dropout, the functions of the pages, and 12 rows; the working directory holds them."""
    shutil.copytree(material / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    (tmp_path / "my_loss.py").write_text(blocks("write-a-loss.md"))
    (tmp_path / "my_reducer.py").write_text(blocks("write-a-reducer.md"))
    draw = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(12):
        response = draw.integers(3, 29, draw.integers(2, 6)).tolist()
        teacher = np.log(draw.dirichlet(np.ones(4), len(response))[:, :3])
        rows.append(
            {
                "prompt_ids": [3, 4],
                "response_ids": response,
                "loss_weight": 0.5 if number % 2 else [1.0] * (len(response) - 1) + [0.0],
                "teacher_ids": [draw.permutation(29)[:3].tolist() for _ in response],
                "teacher_logprobs": teacher.round(4).tolist(),
                "domain": ("code", "chat", "other")[number % 3],
            }
        )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return rows


def expected_loss(rows: list[dict[str, Any]]) -> float:
    """KL to the teacher over its likeliest tokens and the rest, weighed by token and domain: row by row on whole logits, in float64."""
    network = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64).eval()
    total = mass = 0.0
    for row in rows:
        ids = row["prompt_ids"] + row["response_ids"]
        with torch.no_grad():
            logprobs = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(len(row["response_ids"])):
            weights = row["loss_weight"]
            weight = (weights[place] if isinstance(weights, list) else weights) * DOMAINS.get(row["domain"], 1.0)
            model = logprobs[len(row["prompt_ids"]) + place - 1].exp()[row["teacher_ids"][place]]
            teacher = torch.tensor(row["teacher_logprobs"][place], dtype=torch.float64).exp()
            everyone = [*zip(teacher.tolist(), model.tolist(), strict=True), (1 - float(teacher.sum()), 1 - float(model.sum()))]
            total += weight * sum(t * np.log(t / m) for t, m in everyone)
            mass += weight
    return total / mass


def arguments(*more: str) -> list[str]:
    return [
        *("sft", "--model", "model", "--data", "rows.jsonl", "--steps", "3", "--batch-size", "12"),
        *("--output", "run", "--learning-rate", "0.01", "data.cache=./cache", "run.device=cpu", "--quiet", *more),
    ]


@pytest.mark.parametrize(("collator", "loss"), [("padded", "./my_loss.py:top_k_kl"), ("packed", "top_k_divergence")])
def test_distillation_of_a_teacher_with_weights_of_domains(files: list[dict[str, Any]], collator: str, loss: str) -> None:
    """The page's loss, and the one that comes with the engine. float32 sums in another order: 1e-5."""
    weights = [f"reducer.weights.{name}={weight}" for name, weight in DOMAINS.items()]
    chosen = ("--loss", loss, "--reducer", "./my_reducer.py:by_domain", f"collator.use={collator}", *weights)
    size = "training.micro_batch_tokens=24" if collator == "packed" else "training.micro_batch_rows=5"
    assert app.main(arguments(*chosen, size)) == 0
    first, _, last = (record["metrics"] for record in read_metrics(Path("run/metrics.jsonl")) if record["kind"] == "step")
    assert first["loss"] == pytest.approx(expected_loss(files), rel=1e-5)
    assert last["loss"] < first["loss"]
    columns = json.loads(Path("run/run.json").read_text())["data"]["train"]["columns"]
    assert columns == ["teacher_ids", "teacher_logprobs"]


@pytest.mark.usefixtures("files")
def test_a_run_refused_for_its_data_leaves_no_directory(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "from skyrl_engine import reducer\n@reducer(needs=('sample:topic',))\ndef mine(structure, config): ...\n"
    )
    Path("empty").mkdir()
    for output in ("run", "deep/er/run", "empty"):
        assert app.main([*arguments("--reducer", "./mine.py:mine"), "--output", output]) == DataError.exit_code
        assert "has no column 'topic', which reducer 'mine'" in capsys.readouterr().err
    assert not any(Path(name).exists() for name in ("run", "deep"))
    assert list(Path("empty").iterdir()) == [], "a folder that was there stays"


@pytest.mark.usefixtures("files")
def test_a_candidate_outside_of_the_vocabulary_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(re.sub(r'"teacher_ids": \[\[\d+', '"teacher_ids": [[99999', text))
    assert app.main(arguments("--loss", "./my_loss.py:top_k_kl")) != 0
    assert "the column 'teacher_ids' holds the token id 99999 at response token 0 of sample 0" in capsys.readouterr().err
    assert not Path("run").exists(), "refused before anything starts"
