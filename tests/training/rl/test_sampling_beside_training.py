"""Generators in processes of their own, and sampling beside training: the bound holds, and nothing is lost or trained twice."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_day import now
from rl_runs import BESIDE_TRAINING, Rl, check_ledger, kill_run, numbers_of, numbers_without_waits, steps_of, weights_of

from skyrl_engine.errors import ConfigError, EngineError, RolloutError, UnsupportedError
from skyrl_engine.rollout.journal_index import read_groups, read_index
from skyrl_engine.training.rl.dry_run import facts, plan_rl
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.workers.replicas import ReplicaHost, SilenceLimits

JITTER = {"jitter": 0.03}
DRAINED = "rl.in_flight_updates=false"

DEAF = '''
"""The generator hf, which takes no update after its start."""
from skyrl_engine import hookimpl
from skyrl_engine_generators.generator import HfGenerator
from skyrl_engine_generators.options import HfOptions
from skyrl_engine_generators.plugin import HfPlugin


class Deaf(HfGenerator):
    def update(self, weights, version, target="policy"):
        for _ in weights.tensors():
            pass
        for held in self._sets.values():
            held.loop.version = version


class Plugin(HfPlugin):
    @hookimpl
    def skyrl_engine_make_generator(self, config):
        return Deaf(config or HfOptions())


deaf = Plugin()
'''


@pytest.mark.nightly
def test_replicas_sample_what_the_ranks_sample(rl: Rl) -> None:
    """In turns with training, two processes give the bits that the rank gives."""
    on_ranks = run_rl(rl("ranks")).directory
    apart = run_rl(rl("apart", "generator.placement=process", "generator.replicas=2")).directory
    assert weights_of(apart) == weights_of(on_ranks)
    assert numbers_of(apart) == numbers_of(on_ranks)
    assert not (apart / "generator" / "weights").exists(), "weights on their way do not stay"


def test_drained_runs_in_the_order_of_tickets_have_the_same_bits(rl: Rl) -> None:
    runs = [
        run_rl(rl(name, "rl.staleness=1", DRAINED, "rl.steps=3", f"rollouts.workers={workers}", environment=JITTER)).directory
        for name, workers in (("one", 1), ("many", 3))
    ]
    check_ledger(runs[0], 1)
    assert weights_of(runs[0]) == weights_of(runs[1])
    assert numbers_without_waits(runs[0]) == numbers_without_waits(runs[1])
    ages = [row["metrics"]["async/staleness_mean"] for row in steps_of(runs[0])]
    assert ages == [0.0, 1.0, 1.0], "what is trained was sampled beside the step before"
    names = {name for row in steps_of(runs[0]) for name in row["metrics"]}
    assert names >= BESIDE_TRAINING
    assert {name for name in names if name.startswith(("async/", "policy/gap_stale"))} <= BESIDE_TRAINING
    for row in steps_of(runs[0]):
        times = {name: value for name, value in row["metrics"].items() if name.startswith("time/")}
        assert sum(times.values()) == pytest.approx(row["seconds"], rel=1e-9)
        assert not {"time/generate", "time/environment"} & times.keys()


@pytest.mark.proof
@pytest.mark.parametrize("staleness", now([1, 3], 3))
def test_drained_runs_that_are_killed_have_the_bits_of_one_that_is_not(
    rl: Rl, tables_of: Callable[..., dict[str, Any]], staleness: int
) -> None:
    keys = (f"rl.staleness={staleness}", DRAINED, "rl.steps=5", "checkpoint.every=1")
    whole = run_rl(rl("whole", *keys, environment=JITTER)).directory
    # Groups are recorded ahead of the steps that train on them: the kill that counts them comes first, while none is in the journal.
    for moment, count in (("a group recorded", 4), ("learned", 2), ("a checkpoint's state", 1)):
        kill_run(tables_of("parts", environment=JITTER), keys, moment, count)
    parts = run_rl(rl("parts", *keys, environment=JITTER), resume=True).directory
    assert weights_of(parts) == weights_of(whole)
    assert numbers_without_waits(parts) == numbers_without_waits(whole)
    check_ledger(parts, staleness)


@pytest.mark.proof
@pytest.mark.parametrize("staleness", now([1, 3], 1))
def test_updates_in_flight_keep_the_bound_and_lose_nothing(
    rl: Rl, tables_of: Callable[..., dict[str, Any]], staleness: int
) -> None:
    keys = (f"rl.staleness={staleness}", "rl.steps=5", "checkpoint.every=1", "evaluation.every=2", "evaluation.tasks=2")
    environment = {**JITTER, "failing": True}
    kill_run(tables_of("run", environment=environment), keys, "learned", 3)
    finished = {group.ticket: group for group in read_groups(tables_directory(tables_of) / "rollouts")}
    run = run_rl(rl("run", *keys, environment=environment), resume=True).directory
    check_ledger(run, staleness)
    index = read_index(run / "rollouts")
    trained = {ticket for tickets in index.trained.values() for ticket in tickets}
    usable = {ticket for ticket, group in finished.items() if newest(group) <= 2 and ticket in trained}
    again = {group.ticket: group for group in read_groups(run / "rollouts")}
    for ticket in usable:
        kept = [attempt.token_ids.tobytes() for attempt in finished[ticket].trajectories]
        assert kept == [attempt.token_ids.tobytes() for attempt in again[ticket].trajectories], "it was not sampled again"


def tables_directory(tables_of: Callable[..., dict[str, Any]]) -> Path:
    return Path(tables_of("run")["run"]["directory"])


def newest(group: Any) -> int:
    return max((int(attempt.versions.versions.max(initial=0)) for attempt in group.trajectories), default=0)


@pytest.mark.proof
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_replica_that_is_lost_is_started_again_and_changes_no_bit(
    rl: Rl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent: signal.Signals
) -> None:
    wanted = run_rl(rl("whole", "rl.staleness=1", DRAINED)).directory
    killed: list[int] = []
    submit = ReplicaHost.submit

    def submit_and_kill(self: ReplicaHost, requests: Any) -> None:
        submit(self, requests)
        pid = self._replicas[0].process.child.pid
        # one that hangs while it starts has a limit of its own
        if len(killed) < 2 and pid not in killed and not (sent == signal.SIGSTOP and "start" in self._replicas[0].owed):
            killed.append(pid)
            os.kill(pid, sent)

    monkeypatch.setattr(ReplicaHost, "submit", submit_and_kill)
    run = run_rl(rl("killed", "rl.staleness=1", DRAINED, "generator.silent_seconds=3")).directory
    assert len(killed) == 2
    assert ("was killed by SIGKILL" if sent == signal.SIGKILL else "sent nothing for 3 s") in caplog.text
    assert weights_of(run) == weights_of(wanted)
    assert numbers_without_waits(run) == numbers_without_waits(wanted)


@pytest.mark.proof
def test_a_replica_that_hangs_while_it_takes_weights_is_started_again_and_changes_no_bit(
    rl: Rl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = run_rl(rl("whole", "rl.staleness=1", DRAINED)).directory
    stopped: list[int] = []
    give = ReplicaHost._give

    def stop_and_give(self: ReplicaHost, *arguments: Any) -> None:
        if not stopped:
            stopped.append(self._replicas[0].process.child.pid)
            os.kill(stopped[0], signal.SIGSTOP)
            self._limits = SilenceLimits(weights=2.0)
            self._call("abort", (-1,) * 2_000_000)  # more than a socket holds: nobody reads
            give(self, *arguments)
            self._limits = SilenceLimits()
        else:
            give(self, *arguments)

    monkeypatch.setattr(ReplicaHost, "_give", stop_and_give)
    monkeypatch.setattr(ReplicaHost, "_launch", prolong_start(ReplicaHost._launch))
    run = run_rl(rl("hung", "rl.staleness=1", DRAINED)).directory
    assert "hangs in its call 'update': it sent nothing for 2 s" in caplog.text
    assert weights_of(run) == weights_of(wanted)
    assert numbers_without_waits(run) == numbers_without_waits(wanted)


def prolong_start(launch: Callable[[ReplicaHost, int], Any]) -> Callable[[ReplicaHost, int], Any]:
    """Let a new process take its time."""

    def launch_without_limit(self: ReplicaHost, number: int) -> Any:
        self._limits = SilenceLimits()
        return launch(self, number)

    return launch_without_limit


def test_a_generator_that_ignores_updates_is_stopped_at_the_first(rl: Rl, tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    keys = ("rl.staleness=1", "rl.steps=4", f"generator.use={tmp_path / 'deaf.py'}:deaf")
    with pytest.raises(RolloutError, match=r"after the update to version 1 .* those of version 0: the update has not reached it"):
        run_rl(rl("run", *keys))


@pytest.mark.nightly
def test_a_generator_that_samples_from_what_it_kept_of_earlier_weights_is_stopped(rl: Rl, tmp_path: Path) -> None:
    """It scores prompts with the weights that it was given: only what it samples tells."""
    keeping = DEAF.replace(
        "    def update(",
        """    def poll(self, timeout):
        return [each if each.prompt_logprobs is not None else replace(each) for each in super().poll(timeout)]

    def not_update(""",
    ).replace(
        "\n\nclass Plugin",
        "\n\ndef replace(completion):\n    return evolve(completion, logprobs=completion.logprobs * 1.01)\n\n\nclass Plugin",
    )
    (tmp_path / "keeping.py").write_text(
        keeping.replace("from skyrl_engine import", "from attrs import evolve\nfrom skyrl_engine import", 1)
    )
    keys = ("rl.staleness=1", "rl.steps=4", f"generator.use={tmp_path / 'keeping.py'}:deaf")
    with pytest.raises(RolloutError, match="tokens that it samples differ from those that it tells of the same tokens in a prompt"):
        run_rl(rl("run", *keys))


@pytest.mark.nightly
def test_a_generator_that_fails_while_it_samples_ends_the_run_with_its_cause(rl: Rl, tmp_path: Path) -> None:
    """It is asked nothing at that moment, and so owes no answer."""
    failing = DEAF.replace(
        "    def update(", '    def poll(self, timeout):\n        raise ValueError("out of ideas")\n\n    def update('
    )
    (tmp_path / "failing.py").write_text(failing)
    with pytest.raises(EngineError, match="failed in poll: ValueError: out of ideas"):
        run_rl(rl("run", "generator.placement=process", f"generator.use={tmp_path / 'failing.py'}:deaf"))


@pytest.mark.nightly
def test_a_generator_that_ignores_updates_is_known_by_the_version_it_holds(rl: Rl, tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    keys = ("rl.staleness=1", "rl.steps=4", "rl.max_gap=10.0", f"generator.use={tmp_path / 'deaf.py'}:deaf")
    with pytest.raises(RolloutError, match=r"after the update to version 1 .* those of version 0: the update has not reached it"):
        run_rl(rl("run", *keys))


@pytest.mark.nightly
def test_an_evaluation_beside_sampling_is_of_the_weights_it_names(rl: Rl) -> None:
    """The same as with sampling and training in turns, while the model is the initial one."""
    keys = ("evaluation.at_start=true", "evaluation.tasks=2", "evaluation.every=2")
    beside = run_rl(rl("beside", "rl.staleness=2", *keys, environment=JITTER)).directory
    turns = run_rl(rl("turns", *keys)).directory
    assert evaluations_of(beside)[0] == evaluations_of(turns)[0]
    assert len(evaluations_of(beside)) == len(evaluations_of(turns)) == 2


def evaluations_of(directory: Path) -> list[Mapping[str, float]]:
    from skyrl_engine.run.metrics import read_metrics

    rows = [record for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "evaluation"]
    return [{name: value for name, value in row["metrics"].items() if not name.startswith("time/")} for row in rows]


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["rl.order=ticket"], "rl.order: is set, and with rl.staleness = 0"),
        (["rl.in_flight_updates=true"], "rl.in_flight_updates: is set, and with rl.staleness = 0"),
        (["rl.staleness=1", "generator.launch=ray"], 'generator.launch: is "ray", but run.launch is not'),
        (["rl.staleness=1", "generator.cpus=2"], 'generator.cpus: is not read where generator.launch = "local"'),
        (
            ["run.launch=ray", "generator.launch=ray", "generator.devices=['cpu']"],
            "generator.devices: is not read where generator.launch",
        ),
    ],
)
def test_keys_that_nobody_would_read_are_refused(rl: Rl, keys: list[str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        run_rl(rl("run", *keys))


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["rl.staleness=1", "generator.placement=rank"], 'generator.placement = "rank"'),
        (["rl.staleness=1", "run.device=cuda"], "generator.devices names none, and the ranks compute on GPUs"),
        (["generator.replicas=2"], "generator.replicas is set, and .* samples on the ranks"),
        (["generator.devices=['cpu']"], "generator.devices is set"),
        (["run.launch=ray", "generator.launch=ray"], "generator.launch is set, and .* samples on the ranks"),
        (
            ["generator.placement=process", "generator.replicas=3", "generator.devices=['cpu', 'cpu']"],
            "generator.replicas is 3, and generator.devices names 2",
        ),
    ],
)
def test_places_where_a_generator_cannot_be_are_refused(rl: Rl, keys: list[str], names: str) -> None:
    with pytest.raises(UnsupportedError, match=names):
        run_rl(rl("run", *keys))


def test_a_generator_over_the_memory_of_a_rank_stays_there(rl: Rl, tmp_path: Path) -> None:
    (tmp_path / "bound.py").write_text(
        DEAF.replace("deaf = Plugin()", "").replace(
            "class Plugin(HfPlugin):",
            "import attrs\n\nclass Plugin(HfPlugin):\n    @hookimpl\n    def skyrl_engine_describe_generator(self, config):\n"
            "        described = super().skyrl_engine_describe_generator(config)\n"
            "        return attrs.evolve(described, accepts=('module',))\n",
        )
        + "bound = Plugin()\n"
    )
    with pytest.raises(UnsupportedError, match="takes weights as module, which a process of its own cannot be given"):
        run_rl(rl("run", "rl.staleness=1", f"generator.use={tmp_path / 'bound.py'}:bound"))


def test_a_dry_run_says_what_goes_on_beside_what(rl: Rl) -> None:
    said = {
        name: facts(plan_rl(rl(name, *keys)))["sampling"]
        for name, keys in {
            "turns": (),
            "apart": ("generator.placement=process",),
            "beside": ("rl.staleness=3", "generator.replicas=2"),
            "on ray": (
                "run.launch=ray",
                "generator.placement=process",
                "generator.launch=ray",
                "generator.replicas=2",
                "generator.cpus=1.5",
            ),
            "drained": ("rl.staleness=1", DRAINED),
        }.items()
    }
    assert said["turns"] == "on the ranks, in turns with training"
    assert said["apart"] == "in a process of its own, in turns with training"
    place = "in 2 processes of their own on the Ray cluster, each with 1.5 CPU and a GPU where ranks have one"
    assert said["on ray"] == f"{place}, in turns with training"
    assert said["beside"].startswith(
        "in 2 processes of their own, beside training, at most 3 steps old; new weights reach groups under way"
    )
    assert "an update waits until groups under way have ended; groups are trained in the order of their start" in said["drained"]


def test_staleness_without_a_reader_of_the_samplers_log_probabilities_warns(rl: Rl, caplog: pytest.LogCaptureFixture) -> None:
    plan_rl(rl("rollout", "rl.staleness=1"))
    assert "no part of the loss reads rollout_logprobs" not in caplog.text
    plan_rl(rl("score", "rl.staleness=1", "rl.old=score"))
    assert "no part of the loss reads rollout_logprobs" in caplog.text


@pytest.mark.nightly
def test_gradients_of_stale_tokens_are_those_of_the_ratio_to_the_policy_that_sampled(rl: Rl, seen: Any) -> None:
    run_rl(rl("run", "rl.staleness=2", "rl.steps=4"))
    columns = seen.plans[4].columns
    assert columns.columns["old_logprobs"].tobytes() == columns.columns["rollout_logprobs"].tobytes()
    sampled = columns.loss_weight != 0
    assert set(np.unique(columns.columns["rollout_staleness"][sampled])) <= {0.0, 1.0, 2.0}
    assert not columns.columns["rollout_staleness"][~sampled].any()


@pytest.mark.nightly
@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    "more",
    [(), ("model.lora={rank=2}", "optimizer.learning_rate=5e-2"), ("model.value_head=true",)],
    ids=["full", "lora", "value head"],
)
def test_two_ranks_train_while_a_process_samples(rl: Rl, more: tuple[str, ...]) -> None:
    """The canary holds the merged weights that two ranks gather against what they score."""
    run = run_rl(rl("run", "rl.staleness=1", "rl.steps=3", "run.launch=ray", "run.ranks=2", *more)).directory
    check_ledger(run, 1)
