"""Observers with one fault each, made from a right one, which writes a line per step and goes on where a resumed run does."""

import csv
import json
import threading
import time
from pathlib import Path

import numpy as np

from skyrl_engine import hookimpl


class Plain:
    def __init__(self):
        self.path = Path()

    @hookimpl
    def skyrl_engine_session_started(self, event):
        self.path = event.directory / "steps.csv"
        rows = self.rows_until(event.start_step)
        with self.path.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(rows)

    def rows_until(self, step):
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as stream:
            return [row for row in csv.reader(stream) if int(row[0]) <= step]

    @hookimpl
    def skyrl_engine_step_finished(self, event):
        self.write(event.step, event.metrics["loss"])

    def write(self, *values):
        with self.path.open("a", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerow(values)


class WritesNaN(Plain):
    """JSON's readers stop at it, in Python alone they do not."""

    @hookimpl
    def skyrl_engine_session_started(self, event):
        self.path = event.directory / "steps.jsonl"
        rows = [] if not self.path.exists() else self.path.read_text(encoding="utf-8").splitlines()
        kept = [row for row in rows if json.loads(row)["step"] <= event.start_step]
        self.path.write_text("".join(f"{row}\n" for row in kept), encoding="utf-8")

    def write(self, *values):
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(dict(zip(("step", "loss"), values, strict=True))) + "\n")


class MisspellsAHook(Plain):
    @hookimpl
    def skyrl_engine_step_done(self, event):
        pass


class TakesTheStep(Plain):
    @hookimpl
    def skyrl_engine_step_finished(self, step):
        pass


class ReadsMetricsOfAnotherTrainer(Plain):
    @hookimpl
    def skyrl_engine_step_finished(self, event):
        self.write(event.step, event.metrics["reward/mean"])


class RefusesWhatIsNotFinite(Plain):
    @hookimpl
    def skyrl_engine_step_finished(self, event):
        for name, value in event.metrics.items():
            if value != value:  # noqa: PLR0124
                raise ValueError(name)
        self.write(event.step, event.metrics["loss"])


class CountsFromTheFirstStep(Plain):
    """Divides by the steps that a session had."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    @hookimpl
    def skyrl_engine_step_finished(self, event):
        self.steps += 1
        self.write(event.step, event.metrics["loss"])

    @hookimpl
    def skyrl_engine_session_finished(self, event):
        self.mean = 1 / self.steps


class TakesMetricsOut(Plain):
    @hookimpl
    def skyrl_engine_step_finished(self, event):
        self.write(event.step, event.metrics.pop("loss"))


class RoundsRewards(Plain):
    @hookimpl
    def skyrl_engine_rollouts_finished(self, event):
        for group in event.groups:
            for attempt in group.trajectories:
                attempt.info["seen"] = True


class SignsTheManifest(Plain):
    @hookimpl
    def skyrl_engine_session_started(self, event):
        super().skyrl_engine_session_started(event)
        event.manifest["sessions"].append("seen")


class AddsAPath(Plain):
    @hookimpl
    def skyrl_engine_manifest_extra(self):
        return {"folder": Path("runs")}


class AddsANumberOfNumPy(Plain):
    @hookimpl
    def skyrl_engine_manifest_extra(self):
        return {"limit": np.float32(0.5)}


class AddsTuples(Plain):
    @hookimpl
    def skyrl_engine_manifest_extra(self):
        return {"tags": ("a", "b")}


class AddsTheTime(Plain):
    @hookimpl
    def skyrl_engine_manifest_extra(self):
        return {"at": time.perf_counter()}


class AddsAList(Plain):
    @hookimpl
    def skyrl_engine_manifest_extra(self):
        return ["a"]


class UploadsAtOnce(Plain):
    @hookimpl
    def skyrl_engine_evaluation_finished(self, event):
        time.sleep(1.2)


class WaitsForEver(Plain):
    @hookimpl
    def skyrl_engine_checkpoint_saved(self, event):
        threading.Event().wait()


class ReadsTheRecords(Plain):
    """Takes the loss from the last record of metrics.jsonl, where there is one."""

    def write(self, *values):
        records = self.path.with_name("metrics.jsonl")
        super().write(*values, len(records.read_bytes()) if records.exists() else 0)


class TellsStepsTwice(Plain):
    """Goes on in its file, in which steps behind the checkpoint are."""

    def rows_until(self, step):
        return super().rows_until(step + 1000)


class BeginsAnew(Plain):
    def rows_until(self, step):
        return []


class LeavesAThread(Plain):
    @hookimpl
    def skyrl_engine_session_started(self, event):
        super().skyrl_engine_session_started(event)
        threading.Thread(target=time.sleep, args=(20,), daemon=True, name="uploader").start()


class NothingToHear:
    """Implements no hook."""


class TellsTheTime(Plain):
    """A right one, whose file is another each time."""

    def write(self, *values):
        super().write(*values, time.perf_counter())


class OfTwoHooks:
    """A right one that writes nothing."""

    @hookimpl
    def skyrl_engine_rollouts_finished(self, event):
        self.last = max((attempt.rewards.sum() for group in event.groups for attempt in group.trajectories), default=0.0)

    @hookimpl
    def skyrl_engine_manifest_extra(self):
        return {"watched": ["rewards"], "limit": 0.5}
