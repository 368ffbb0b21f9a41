"""Event files of a run that was killed and resumed, read back by TensorBoard's own reader, and the promises of observers."""

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams
from tracked_runs import CONFIG, TOTAL, assert_no_secret, tell_killed_and_resumed

from skyrl_engine.testing import ObserverConformance


class TestTensorboard(ObserverConformance):
    plugin = "tensorboard"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "mine"
    tell_killed_and_resumed("tensorboard", {"table_every": 2, "table_rows": 2}, directory)
    return directory


@pytest.fixture(scope="module")
def events(run: Path) -> EventAccumulator:
    # every record of the files, which the reader otherwise drops where it takes a restart for one
    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}, purge_orphaned_data=False)
    return accumulator.Reload()


def test_every_step_is_there_once(events: EventAccumulator) -> None:
    every = list(range(1, TOTAL + 1))
    assert sorted((event.step, event.value) for event in events.Scalars("loss")) == [(step, 0.5 + step) for step in every]
    assert sorted(event.step for event in events.Scalars("seconds")) == every
    assert all(math.isnan(event.value) for event in events.Scalars("reward/mean"))
    assert sorted(event.step for event in events.Scalars("evaluation/loss")) == [2, 4, 6]


def test_tables_and_paths_are_texts(run: Path, events: EventAccumulator) -> None:
    def texts(tag: str) -> list[tuple[int, str]]:
        return sorted((event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag))

    attempts = texts("attempts")
    assert [step for step, _ in attempts] == [1, 3, 5]
    assert attempts[0][1].startswith("| environment | task | attempt | reward |")
    assert len(attempts[0][1].splitlines()) == 4
    assert texts("checkpoint") == [(step, f"`{run}/checkpoints/step-{step:08d}`") for step in (2, 4, 6)]
    assert texts("report") == [(0, f"`{run}/report.html`")]


def test_the_configuration_is_there_without_secrets(run: Path, events: EventAccumulator) -> None:
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    stated = hparams.parse_session_start_info_plugin_data(content).hparams
    assert stated["optimizer.learning_rate"].number_value == CONFIG["optimizer"]["learning_rate"]
    assert stated["generator.api_key"].string_value == "(hidden)"
    assert stated["environments.0.url"].string_value == "https://(hidden)@host/v1?token=(hidden)"
    assert_no_secret(run)
