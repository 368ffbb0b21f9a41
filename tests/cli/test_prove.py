"""`skyrl-engine prove` on one rank; what goes between ranks is proven in tests/proof."""

import json
from pathlib import Path

import pytest

from skyrl_engine.cli.app import main


def test_all_rows_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--ranks", "1", "--loss", "cross_entropy", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] is True
    assert [row["case"] for row in report["rows"]] == [
        "padded, 1 row at a time, 1 rank",
        "padded, 2 rows at a time, 1 rank",
        "padded, 8 rows at a time, 1 rank",
        "padded, 120 tokens at a time, 1 rank",
        "padded, 3 rows at a time, shuffled, 1 rank",
        "packed, 40 tokens at a time, 1 rank",
        "packed, 120 tokens at a time, 1 rank",
        "packed, 80 tokens at a time, shuffled, 1 rank",
        "tree, 40 tokens at a time, 1 rank",
        "tree, 120 tokens at a time, 1 rank",
        "tree, 80 tokens at a time, shuffled, 1 rank",
    ]
    assert all(0 < row["difference"]["gradient"] < 1e-5 for row in report["rows"])


def test_another_backend_has_rows_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Against the same definition, which is the plain model in float64."""
    pytest.importorskip("megatron.core", reason="NOT PROVED HERE: this needs megatron-core")
    assert main(["prove", "--ranks", "1", "--loss", "cross_entropy", "--backend", "megatron", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] is True
    assert len(report["rows"]) == 11
    assert all(0 < row["difference"]["gradient"] < 1e-5 for row in report["rows"])


@pytest.mark.nightly
def test_a_planted_mistake_is_noticed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--ranks", "1", "--loss", "cross_entropy", "--plant", "per_microbatch_mean"]) == 0
    out = capsys.readouterr().out
    assert "WRONG   padded, 2 rows at a time, 1 rank " in out
    assert "gradient x8.00 = number of micro-batches" in out
    assert out.rstrip().endswith("per_microbatch_mean was planted, and 11 of 11 rows noticed.")


def test_a_mistake_that_nobody_notices_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no other rank to lose."""
    assert main(["prove", "--ranks", "1", "--loss", "cross_entropy", "--plant", "dropped_rank"]) == 1
    assert "dropped_rank was planted, and no row noticed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plant", "dropped_ranks"], "there is no mistake 'dropped_ranks'. Did you mean \"dropped_rank\"?"),
        (["--plant", "terms_per_microbatch", "--loss", "ppo"], "the objective has none"),
        (["--loss", "pppo"], "there is no loss 'pppo'"),
        (["--family", "gpt2"], "'gpt2' is not one of"),
    ],
)
def test_what_cannot_be_proven(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--ranks", "1", *arguments]) in (2, 3)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ['collator = "packed"', 'loss = "ppo"'])
def test_what_is_no_table_is_named(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(text + "\n")
    assert main(["prove", str(tmp_path / "run.toml")]) == 2
    assert f"run.toml:1: {text.split(maxsplit=1)[0]}: " in capsys.readouterr().err


def test_the_list_of_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--plant", "list"]) == 0
    assert "per_microbatch_mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tokens.logprobs.nonsense()", "failed in its call: AttributeError"),
        ("tokens.logprobs.sum()", "returned shape [] for"),
    ],
)
def test_a_loss_that_fails_is_named(body: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f'from skyrl_engine import loss\n\n\n@loss(needs=("logprobs",))\ndef wrong(tokens, config):\n    return {body}\n'
    )
    assert main(["prove", "--ranks", "1", "--loss", f"{file}:wrong"]) == 3
    assert f"loss 'wrong' of {file}" in (err := capsys.readouterr().err)
    assert message in err
