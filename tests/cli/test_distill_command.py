"""`distill`: what its options make of a configuration, and which of them do not go together."""

from typing import Any

import pytest

from skyrl_engine.cli import app

ON_SAMPLES = ["--teacher", "t", "--prompts", "p.jsonl"]
ON_ROWS = ["--data", "rows.jsonl"]


def make_tables(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> dict[str, Any]:
    """The tables that options make; nothing is resolved and nothing started."""
    values: dict[str, Any] = {}

    def keep(raw: Any, *, dry_run: bool) -> int:
        values.update(raw.table, dry_run=dry_run)
        return 0

    monkeypatch.setattr("skyrl_engine.cli.distill.print_and_run", keep)
    assert app.main(["distill", "--model", "m", *arguments]) == 0
    return values


def test_a_teacher_makes_a_run_on_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    values = make_tables(monkeypatch, [*ON_SAMPLES, "--groups", "3", "--dry-run", "rl.temperature=0.7"])
    assert (values["trainer"], values["teacher"], values["dry_run"]) == ("rl", {"path": "t"}, True)
    assert values["environments"] == [{"use": "prompts", "data": "p.jsonl"}]
    assert (values["rl"]["preset"], values["rl"]["groups"], values["rl"]["temperature"]) == ("on_policy_distill", 3, 0.7)
    other = make_tables(monkeypatch, ["--teacher", "t", "--env", "reasoning_gym:spell_backward", "--loss", "teacher_kl"])
    assert other["environments"] == [{"use": "reasoning_gym", "task": "spell_backward"}]
    assert other["loss"] == {"use": "teacher_kl"}


def test_rows_make_a_run_of_fine_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    values = make_tables(monkeypatch, [*ON_ROWS, "--batch-size", "4", "loss.divergence=reverse"])
    assert (values["trainer"], values["data"], values["training"]) == ("sft", {"train": "rows.jsonl"}, {"batch_size": 4})
    assert values["loss"] == {"use": "top_k_divergence", "divergence": "reverse"}


def test_a_teacher_beside_rows_is_compared_over_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    values = make_tables(monkeypatch, [*ON_ROWS, "--teacher", "t", "--steps", "3"])
    assert (values["trainer"], values["teacher"], values["data"]) == ("sft", {"path": "t"}, {"train": "rows.jsonl"})
    assert values["loss"] == {"use": "divergence"}
    assert make_tables(monkeypatch, [*ON_ROWS, "--teacher", "t", "--loss", "teacher_kl"])["loss"] == {"use": "teacher_kl"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is nothing to learn on"),
        ([*ON_SAMPLES, *ON_ROWS], "instead of --data"),
        (["--teacher", "t"], "there is nothing to learn on"),
        (["--prompts", "p.jsonl"], "Give --teacher"),
        ([*ON_SAMPLES, "--env", "e"], "Give one of --prompts FILE"),
        ([*ON_SAMPLES, "--batch-size", "4"], "--batch-size goes with --data"),
        ([*ON_ROWS, "teacher.url=http://h/v1", "teacher.model=t"], "Give teacher.top_k=..., or --loss teacher_kl"),
        ([*ON_ROWS, "--group-size", "4"], "--group-size goes with --prompts or --env"),
        ([*ON_ROWS, "--prompts", "p.jsonl"], "instead of --data"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["distill", "--model", "m", *arguments]) == 2
    assert words in capsys.readouterr().err
