"""`skyrl-engine rollouts` over the journal of a small run: a list, attempts as text and as tokens, comparison, export, check."""

import json
import os
import re
import shutil

import numpy as np
import pytest
from attrs import evolve

from skyrl_engine.contracts.values.rollout import SEGMENT_OBSERVED, SEGMENT_PROMPT, SEGMENT_SAMPLED, Group, Trajectory, VersionSpans
from skyrl_engine.modeling.tiny import write_tokenizer
from skyrl_engine.rollout.arrow_codec import LearnedAttempt
from skyrl_engine.rollout.exported import read_rollouts
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.records import Entry
from skyrl_engine.rollout.segments import read_segment
from skyrl_engine.testing.rollout_cases import plain_group

WORDS = ("spell", "cat", "c", "a", "t", "wrong", "again", "dog")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A run of two steps, whose manifest names its tokenizer; returns it and the ids of the words."""
    root = tmp_path_factory.mktemp("rollouts")
    tokenizer = write_tokenizer(root / "model", WORDS)
    run = root / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"format": 1, "sessions": [], "config": {"model": {"path": str(root / "model")}}}))
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in WORDS}
    with open_journal(run / "rollouts", run="told") as journal:
        journal.append(group(0, ids, ["c a t", "c a a"], rewards=(1.0, 0.25)))
        journal.append(group(1, ids, ["a a a", "a a a"], rewards=(0.0, 0.0), dropped="zero_variance"))
        drawn = np.full(4, -0.25, dtype=np.float32)
        journal.record_step(
            1,
            [0],
            [LearnedAttempt(0, 0, np.full(4, 0.5, dtype=np.float32), drawn), LearnedAttempt(0, 1, -2 * drawn, drawn + drawn)],
        )
        again = group(2, ids, ["c a t", "wrong"], rewards=(1.0, 0.0), key="task-0", version=1)
        first, second = again.trajectories
        failed = evolve(second, status="failed", cause="timed out after 60 s in step 3", success=None)
        cut = evolve(second, member=2, status="truncated", stops=("length",))
        journal.append(evolve(again, trajectories=(first, failed, cut)))
        journal.record_step(2, [2])
    return run, ids


def group(ticket, ids, texts, *, rewards, dropped=None, key=None, version=0):
    """Attempts of two turns: a prompt, the text, an answer of the environment, and a last word."""
    members = []
    for member, (text, reward) in enumerate(zip(texts, rewards, strict=True)):
        stretches = [("spell cat", SEGMENT_PROMPT), (text, SEGMENT_SAMPLED), ("again", SEGMENT_OBSERVED), ("t", SEGMENT_SAMPLED)]
        lengths = [len(words.split()) for words, _ in stretches]
        sampled = sum(length for length, (_, kind) in zip(lengths, stretches, strict=True) if kind == SEGMENT_SAMPLED)
        earned = np.zeros(sampled)
        earned[-1] = reward
        members.append(
            Trajectory(
                ticket=ticket,
                member=member,
                token_ids=np.array([ids[word] for words, _ in stretches for word in words.split()], dtype=np.int32),
                kinds=np.array([kind for _, kind in stretches], dtype=np.uint8),
                segment_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                logprobs=np.full(sampled, -0.25, dtype=np.float32),
                versions=VersionSpans.one(version, sampled),
                rewards=earned,
                success=reward == 1.0,
                start_version=version,
                stops=("stop", "stop"),
                parts={"exact": float(reward == 1.0)},
            )
        )
    return Group(ticket, "spelling", f"task-{ticket}" if key is None else key, version, tuple(members), dropped)


def test_steps_are_listed(command, recording):
    outcome = command("rollouts", "list", recording[0], "--json")
    assert outcome.code == 0
    rows = json.loads(outcome.out)
    assert [(row["step"], row["groups"], row["dropped"], row["attempts"], row["failed"], row["truncated"]) for row in rows] == [
        (1, 1, 1, 4, 0, 0),
        (2, 1, 0, 3, 1, 1),
    ]
    assert (rows[0]["reward"], rows[0]["lowest"], rows[0]["highest"]) == (0.3125, 0.0, 1.0)
    assert rows[1]["reward"] == 0.5
    table = command("rollouts", "list", recording[0])
    assert table.out.splitlines()[1].split() == ["1", "1", "1", "4", "0", "0", "0.3125", "0", "1"]


def test_the_report_shows_three_attempts_of_three_steps(command, recording):
    outcome = command("rollouts", "report", recording[0])
    assert outcome.code == 0
    head, *lines = outcome.out.splitlines()
    assert head.split() == ["step", "attempt", "reward", "tokens", "of", "which", "sampled"]
    assert [line.split()[:7] for line in lines] == [
        ["1", "best", "1", "4", "exact", "1", "c"],
        ["1", "median", "0.25", "4", "exact", "0", "c"],
        ["1", "worst", "0.25", "4", "exact", "0", "c"],
        ["2", "best", "1", "4", "exact", "1", "c"],
        ["2", "median", "0", "2", "exact", "0", "wrong"],
        ["2", "worst", "0", "2", "exact", "0", "wrong"],
    ]


def test_without_a_choice_the_newest_step_is_shown(command, recording):
    outcome = command("rollouts", "show", recording[0])
    assert outcome.code == 0
    assert "step 2, spelling: task task-0, attempt 0 of group 2" in outcome.out
    assert "step 1" not in outcome.out
    assert (
        outcome.out.index("--- prompt\nspell cat")
        < outcome.out.index("--- sampled\nc a t")
        < outcome.out.index("--- observed\nagain")
    )
    assert "reward   1 (mean of the group: 0.5)" in outcome.out
    assert "timed out after 60 s in step 3" in outcome.out
    assert "4 sampled of 7, by version 1" in outcome.out


@pytest.mark.parametrize(
    ("options", "first", "others"),
    [
        (("--worst",), "attempt 0 of group 1", 2),
        (("--best",), "attempt 0 of group 0", 2),
        (("--step", "1", "--best"), "attempt 0 of group 0", 2),
        (("--truncated",), "attempt 2 of group 2", 0),
        (("--failed",), "attempt 1 of group 2", 0),
        (("--grep", "WRONG"), "attempt 1 of group 2", 1),
        (("--grep", "c a a"), "attempt 1 of group 0", 0),
    ],
)
def test_attempts_are_chosen(command, recording, options, first, others):
    outcome = command("rollouts", "show", recording[0], *options)
    names = [line for line in outcome.out.splitlines() if line.startswith("step ")]
    assert first in names[0]
    assert len(names) == others + 1


@pytest.mark.parametrize(
    ("options", "groups", "steps"),
    [
        (("list",), 0, 0),
        (("show", "--best", "--limit", "1"), 1, 1),
        (("show", "--worst", "--limit", "3"), 2, 2),
        (("show", "--step", "1", "--best", "--limit", "2"), 1, 1),
        (("show", "--failed"), 1, 1),
    ],
)
def test_rows_are_read_of_what_is_shown_alone(command, recording, monkeypatch, options, groups, steps):
    """A group, and what a step learned, once for the attempts of it that follow each other."""
    read = []
    read_rows = Entry._read_rows
    monkeypatch.setattr(Entry, "_read_rows", lambda self, *given: (read.append(self.event), read_rows(self, *given))[1])
    outcome = command("rollouts", options[0], recording[0], *options[1:])
    assert outcome.code == 0
    assert (read.count("group"), read.count("trained")) == (groups, steps)


def test_what_a_filter_dropped_is_told(command, recording):
    assert "dropped" in command("rollouts", "show", recording[0], "--step", "1", "--worst", "--limit", "1").out
    assert "dropped" not in command("rollouts", "show", recording[0], "--best", "--limit", "1").out


def test_more_attempts_than_are_shown_are_counted(command, recording):
    assert command("rollouts", "show", recording[0], "--worst", "--limit", "1").out.endswith("5 more; --limit shows them\n")
    assert "No attempt is of that kind." in command("rollouts", "show", recording[0], "--grep", "nothing of it").out
    late = command("rollouts", "show", recording[0], "--step", "99")
    assert (late.code, "holds no rollouts of step 99. `skyrl-engine rollouts list` names the steps" in late.last_line) == (4, True)


def test_tokens_have_their_log_probabilities_versions_and_rewards(command, recording):
    run, ids = recording
    outcome = command("rollouts", "show", run, "--tokens", "--limit", "1")
    lines = [line.split() for line in outcome.out.splitlines()]
    assert ["0", "prompt", str(ids["spell"]), "spell"] in lines
    assert ["2", "sampled", str(ids["c"]), "c", "-0.2500", "1"] in lines
    assert ["6", "sampled", str(ids["t"]), "t", "-0.2500", "1", "1"] in lines


def test_what_was_learned_from_an_attempt_is_told(command, recording):
    outcome = command("rollouts", "show", recording[0], "--step", "1", "--best", "--limit", "2", "--tokens")
    facts = [line.split(maxsplit=1) for line in outcome.out.splitlines() if line]
    assert [rest for name, *rest in facts if name == "advantage"] == [["0.5"], ["0.5"]]
    assert [rest for name, *rest in facts if name == "gap"] == [["mean 0, largest 0 nats"], ["mean 0.25, largest 0.25 nats"]]
    (line,) = [line.split() for line in outcome.out.splitlines() if line.split()[:2] == ["6", "sampled"] and "0.25" in line.split()]
    assert line[-5:] == ["-0.2500", "0", "0.25", "0.5", "-2.5e-01"]


def test_without_a_tokenizer_ids_are_shown(command, recording, tmp_path):
    run, ids = recording
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "rollouts").symlink_to(run / "rollouts")
    outcome = command("rollouts", "show", moved, "--limit", "1")
    assert outcome.code == 0
    assert "token ids are shown: the run names no model" in outcome.err
    assert f"{ids['spell']} {ids['cat']}" in outcome.out


def test_two_steps_are_compared_on_their_shared_tasks(command, recording):
    outcome = command("rollouts", "diff", recording[0], "--steps", "1", "2")
    assert outcome.code == 0
    rows = [line.split() for line in outcome.out.splitlines()]
    assert ["spelling:", "task-0", "0.625", "0.5", "4", "3"] in rows
    assert ["all", "tasks", "0.3125", "0.5", "4", "3"] in rows
    assert outcome.out.index("attempt 0 of group 0") < outcome.out.index("attempt 0 of group 2")
    missing = command("rollouts", "diff", recording[0], "--steps", "1", "9")
    assert (missing.code, "holds no rollouts of step 9. `skyrl-engine rollouts list` names the steps" in missing.last_line) == (
        4,
        True,
    )


def test_steps_without_a_shared_task_are_told(command, tmp_path):
    with open_journal(tmp_path / "run" / "rollouts", run="x") as journal:
        for ticket in (0, 1):
            journal.append(plain_group(ticket, start_version=ticket))
            journal.record_step(ticket + 1, [ticket])
    assert "The steps share no task." in command("rollouts", "diff", tmp_path / "run", "--steps", "1", "2").out


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_an_export_is_read_back_and_is_data(command, recording, tmp_path, to):
    out = tmp_path / f"rollouts.{to}"
    outcome = command("rollouts", "export", recording[0], "--to", to, "--out", out)
    assert (outcome.code, outcome.out) == (0, f"rows: 7\nfile: {out}\n")
    groups = list(read_rollouts(out))
    assert [(group.ticket, group.dropped, len(group.trajectories)) for group in groups] == [
        (0, None, 2),
        (1, "zero_variance", 2),
        (2, None, 3),
    ]
    assert command("rollouts", "export", recording[0], "--to", to, "--out", out).code == 4


def test_good_attempts_alone_are_exported(command, recording, tmp_path):
    out = tmp_path / "good.jsonl"
    command("rollouts", "export", recording[0], "--to", "jsonl", "--out", out, "--min-reward", "0.9")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["ticket"], row["member"], row["prompt"], row["response"], row["step"]) for row in rows] == [
        (0, 0, "spell cat", "c a t again t", 1),
        (2, 0, "spell cat", "c a t again t", 2),
    ]
    assert rows[0]["loss_mask"] == [1, 1, 1, 0, 1]


def test_sft_takes_an_export_as_data(command, recording, tmp_path):
    run, _ = recording
    out = tmp_path / "good.jsonl"
    command("rollouts", "export", run, "--to", "jsonl", "--out", out, "--min-reward", "0.9")
    model = json.loads((run / "run.json").read_text())["config"]["model"]["path"]
    outcome = command("data", "preview", f"model.path={model}", f"data.train={out}")
    assert outcome.code == 0, outcome.err
    assert "rollouts" in outcome.out


def test_a_whole_journal_is_whole(command, recording):
    outcome = command("rollouts", "check", recording[0])
    assert (outcome.code, outcome.out.splitlines()[0]) == (0, "3 groups of 7 attempts, 2 steps trained")
    assert outcome.out.splitlines()[-1].startswith("whole")


def test_a_torn_end_is_no_mistake_and_the_rest_is(command, tmp_path):
    run = tmp_path / "run"
    for session in range(2):
        with open_journal(run / "rollouts", run="x", resumed=session or None) as journal:
            journal.append(plain_group(session, start_version=session))
            journal.record_step(session + 1, [session])
    first, last = sorted((run / "rollouts").glob("*.arrow"))
    os.truncate(last, last.stat().st_size - 1)
    outcome = command("rollouts", "check", run)
    assert outcome.code == 0
    assert "the next session cuts that off" in outcome.out
    os.truncate(first, first.stat().st_size - 1)
    outcome = command("rollouts", "check", run)
    assert outcome.code == 1
    assert re.search(rf"{first.name}: bytes [\d,]+ to [\d,]+ cannot be read: torn", outcome.out)
    assert outcome.out.splitlines()[-1] == "wrong"


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            lambda journal: [journal.record_step(1, [0]), journal.record_step(2, [0])],
            "group 0 was trained on 2 times, in the steps 1, 2",
        ),
        (lambda journal: journal.record_step(1, [5]), "step 1 trained on group 5, of which there is no record"),
        (
            lambda journal: [journal.record_step(1, [0]), journal.record_step(4, [1])],
            "no record says what the steps 2 to 3 trained on",
        ),
        (lambda journal: journal.record_step(3, [0]), "no record says what the steps 1 to 2 trained on"),
        (lambda journal: journal.record_step(1, [1]), "step 1 trained on group 1, which version 1 sampled"),
        (lambda journal: journal.record_step(1, [2]), "step 1 trained on group 2, of which too many attempts failed"),
    ],
)
def test_mistakes_of_a_trainer_are_found(command, tmp_path, write, words):
    with open_journal(tmp_path / "run" / "rollouts", run="x") as journal:
        journal.append(plain_group(0))
        journal.append(plain_group(1, start_version=1))
        journal.append(plain_group(2, dropped="failed"), failed=True)
        write(journal)
    outcome = command("rollouts", "check", tmp_path / "run")
    assert (outcome.code, words in outcome.out) == (1, True), outcome.out


def test_segments_of_other_runs_and_missing_ones_are_found(command, tmp_path):
    for name, count in (("run", 3), ("other", 1)):
        for _ in range(count):
            with open_journal(tmp_path / name / "rollouts", run=name, resumed=0) as journal:
                journal.append(plain_group(0))
    folder = tmp_path / "run" / "rollouts"
    (folder / "segment-00000002.arrow").unlink()
    (tmp_path / "other" / "rollouts" / "segment-00000001.arrow").rename(folder / "segment-00000004.arrow")
    outcome = command("rollouts", "check", tmp_path / "run")
    assert "segment 2 is gone" in outcome.out
    assert "segments are of several runs: other, run" in outcome.out


def test_a_run_without_rollouts_is_told(command, tmp_path):
    for verb in (("list",), ("show",), ("check",), ("diff", "--steps", "1", "2"), ("export", "--to", "jsonl", "--out", "x")):
        outcome = command("rollouts", verb[0], tmp_path, *verb[1:])
        assert (outcome.code, "holds no rollouts" in outcome.last_line) == (4, True)


def test_every_command_says_what_is_lost(command, recording, tmp_path):
    """A checkpoint says which segments there were; a damaged record is reported, and all others are shown."""
    run = tmp_path / "run"
    shutil.copytree(recording[0], run)
    (segment,) = (run / "rollouts").glob("*.arrow")
    content = bytearray(segment.read_bytes())
    content[read_segment(segment).entries[1].end - 30] ^= 1
    segment.write_bytes(content)
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text(json.dumps({"segments": {segment.name: 9, "segment-00000002.arrow": 99}}))
    out = tmp_path / "out.jsonl"
    for verb in (["list"], ["show"], ["report"], ["diff", "--steps", "1", "2"], ["export", "--to", "jsonl", "--out", out]):
        outcome = command("rollouts", verb[0], run, *verb[1:])
        assert "a checksum differs, 1 record lost" in outcome.err, verb
        assert "not all rollouts are there: segment 2 is gone" in outcome.err, verb
    outcome = command("rollouts", "check", run)
    assert outcome.code == 1
    assert "segment 2 is gone" in outcome.out
    assert "a checksum differs, 1 record lost" in outcome.out
    shutil.rmtree(run / "rollouts")
    for verb in ("list", "show", "check"):
        outcome = command("rollouts", verb, run)
        assert outcome.code == 4
        assert "are lost: all segments are gone (2 by the last checkpoint)" in outcome.last_line


def test_a_checkpoint_that_cannot_be_read_keeps_nobody_from_looking(command, recording, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(recording[0], run)
    for number, text in enumerate(("", "[]", '{"segments": 3}', '{"segments": {"segment-00000001.arrow": "x"}}')):
        checkpoint = run / "checkpoints" / f"step-{number + 1:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer.json").write_text(text)
        assert command("rollouts", "check", run).code == 0
