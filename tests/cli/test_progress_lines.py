"""Progress as lines: which steps are written, and what a line holds."""

from skyrl_engine.cli.progress import BESIDE_HEADER, HEADER, ProgressLines, duration, progress_row
from skyrl_engine.cli.render import show_progress
from skyrl_engine.run.progress import Progress


def step(number: int, total: int, loss: float = 1.5, **more: float) -> Progress:
    return Progress(number, total, loss=loss, **more)


def test_about_twenty_lines_for_a_long_run():
    lines: list[str] = []
    listen = ProgressLines(lines.append, clock=lambda: 0.0)
    listen(Progress(0, 1000))
    for number in range(1, 1001):
        listen(step(number, 1000))
    assert lines[0] == HEADER
    assert [line.split()[0] for line in lines[1:4]] == ["1/1000", "50/1000", "100/1000"]
    assert lines[-1].split()[0] == "1000/1000"
    assert len(lines) == 22


def test_slow_steps_are_all_written():
    lines: list[str] = []
    now = [0.0]
    listen = ProgressLines(lines.append, clock=lambda: now[0])
    for number in range(2, 6):
        now[0] += 31
        listen(step(number, 1000))
    assert [line.split()[0] for line in lines[1:]] == ["2/1000", "3/1000", "4/1000", "5/1000"]


def test_every_evaluation_is_written_once():
    lines: list[str] = []
    listen = ProgressLines(lines.append, clock=lambda: 0.0)
    listen(Progress(0, 100, evaluation_loss=2.0))
    listen(step(3, 100, evaluation_loss=2.0))
    listen(step(3, 100, evaluation_loss=1.25))
    assert [line.strip() for line in lines[1:]] == ["held-out loss 2.0000 after step 0", "held-out loss 1.2500 after step 3"]


def test_the_reward_of_every_evaluation_is_a_line():
    lines: list[str] = []
    listen = ProgressLines(lines.append)
    for rewarded in (Progress(0, 100, evaluation_reward=0.5), Progress(3, 100, loss=0.0, reward=0.25, evaluation_reward=0.75)):
        listen(rewarded)
    assert lines[0] == HEADER.replace("    loss", "  reward")
    assert [line.strip() for line in lines[1:]] == ["held-out reward 0.5000 after step 0", "held-out reward 0.7500 after step 3"]


def test_a_row_is_as_wide_as_the_header_and_marks_what_is_unknown():
    full = step(5, 60, loss=12.3456, tokens_per_second=12345.6, learning_rate=3e-4, grad_norm=0.5, seconds_left=65.0)
    assert progress_row(full).split() == ["5/60", "12.3456", "12,346", "3.00e-04", "0.5000", "1:05"]
    assert len(progress_row(full)) == len(HEADER)
    assert progress_row(Progress(5, 60)).split() == ["5/60", "-", "-", "-", "-", "-"]


def test_a_run_that_samples_beside_training_shows_what_waits():
    beside = Progress(6, 60, loss=1.0, reward=0.5, staleness=0.875, waited=0.125)
    assert progress_row(beside).split()[-2:] == ["0.88", "12%"]
    assert len(progress_row(beside)) == len(HEADER + BESIDE_HEADER)
    assert "staleness 0.9, waited 12%" in str(beside)
    lines = []
    ProgressLines(lines.append)(beside)
    assert lines[0].split()[-2:] == ["staleness", "waited"]


def test_durations():
    assert [duration(seconds) for seconds in (None, 0.4, 59.6, 754, 3723)] == ["-", "0:00", "1:00", "12:34", "1:02:03"]


def test_progress_goes_to_stderr_unless_quiet(capsys):
    for quiet in (True, False):
        with show_progress(quiet=quiet) as display:
            display.data("tokenizing", 1, 2)
            display.training(step(1, 2, loss=0.125))
        captured = capsys.readouterr()
        assert captured.out == ""
        assert ("0.1250" in captured.err) is not quiet
