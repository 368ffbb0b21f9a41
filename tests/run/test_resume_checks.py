"""A resume refuses other plugins unless they are allowed by name, and lists configuration that results depend on."""

from typing import Any

import pytest

from skyrl_engine.errors import CheckpointError
from skyrl_engine.run.resume_checks import find_changed_keys, refuse_changed_plugins, refuse_other_trainer


def lock(name: str, version: str | None = "0.1.0", distribution: str | None = "acme", sha256: str | None = None) -> dict[str, Any]:
    record = {"name": name, "version": version, "distribution": distribution, "sha256": sha256, "path": "/elsewhere/loss.py"}
    return {"record": record, "options": {}}


BEFORE = {"loss": lock("focal"), "merger": lock("ordered", "1.0")}


def test_equal_locks_pass_wherever_they_lie() -> None:
    after = {kind: {"record": {**lock["record"], "path": "/here/loss.py"}, "options": {}} for kind, lock in BEFORE.items()}
    assert refuse_changed_plugins(BEFORE, after, allow_changed=()) == []


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lock("focal", "0.2.0"), r"loss: acme:focal \(0\.1\.0\) -> acme:focal \(0\.2\.0\)"),
        (lock("ppo"), r"loss: acme:focal \(0\.1\.0\) -> acme:ppo \(0\.1\.0\)"),
        (
            lock("focal", None, None, "ab" * 32),
            r"loss: acme:focal \(0\.1\.0\) -> /elsewhere/loss\.py:focal \(sha256 abababababab\)",
        ),
    ],
)
def test_a_changed_plugin_is_refused_and_can_be_allowed_by_name(after: dict[str, Any], message: str) -> None:
    changed = {**BEFORE, "loss": after}
    with pytest.raises(CheckpointError, match=message) as caught:
        refuse_changed_plugins(BEFORE, changed, allow_changed=["merger:ordered"])
    assert f'checkpoint.allow_changed = ["loss:{after["record"]["name"]}"]' in caught.value.remedy
    (sentence,) = refuse_changed_plugins(BEFORE, changed, allow_changed=[f"loss:{after['record']['name']}"])
    assert sentence.startswith("loss: acme:focal")


def test_another_backend_is_not_advised_but_another_version_of_it_is() -> None:
    before = {**BEFORE, "backend": lock("fsdp")}
    for backend in (lock("deepspeed"), lock("fsdp", distribution="fork")):
        with pytest.raises(CheckpointError, match="another backend, whose files this one does not read") as caught:
            refuse_changed_plugins(before, {**before, "loss": lock("ppo"), "backend": backend}, allow_changed=())
        assert 'Set backend.use = "fsdp"' in caught.value.remedy
        assert len(caught.value.details) == 2
    with pytest.raises(CheckpointError) as caught:
        refuse_changed_plugins(before, {**before, "backend": lock("fsdp", "0.2.0")}, allow_changed=())
    assert 'checkpoint.allow_changed = ["backend:fsdp"]' in caught.value.remedy


def test_a_local_file_with_another_content_is_refused() -> None:
    first, second = ({"loss": lock("mine", None, None, letter * 64)} for letter in "ab")
    with pytest.raises(CheckpointError, match="sha256 aaaaaaaaaaaa"):
        refuse_changed_plugins(first, second, allow_changed=())


def test_every_refused_plugin_is_listed() -> None:
    after = {"loss": lock("focal", "0.2.0"), "merger": lock("ordered", "2.0")}
    with pytest.raises(CheckpointError) as caught:
        refuse_changed_plugins(BEFORE, after, allow_changed=())
    assert len(caught.value.details) == 2
    assert '"loss:focal", "merger:ordered"' in caught.value.remedy


def test_changed_configuration_is_listed_and_what_changes_no_number_is_not() -> None:
    before = {
        "run": {"seed": 0, "directory": "a"},
        "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.99]},
        "checkpoint": {"keep": 2},
        "loss": {"use": "focal"},
        "environments": [{"use": "function", "reward": "a.py:f"}, {"use": "gymnasium"}],
    }
    after = {
        "run": {"seed": 1, "directory": "b"},
        "optimizer": {"learning_rate": 1e-3, "betas": (0.9, 0.99)},
        "checkpoint": {"keep": None},
        "loss": {"use": "focal", "gamma": 2.0},
        "environments": [{"use": "function", "reward": "b.py:f"}, {"use": "gymnasium"}],
    }
    assert [str(change) for change in find_changed_keys(before, after)] == [
        "run.seed: 0 -> 1",
        "loss.gamma: None -> 2.0",
        "environments[0].reward: 'a.py:f' -> 'b.py:f'",
    ]
    assert [change.key for change in find_changed_keys(after, before)] == ["run.seed", "environments[0].reward", "loss.gamma"]


def test_another_trainer_cannot_go_on() -> None:
    refuse_other_trainer({"trainer": "sft"}, {"trainer": "sft"})
    with pytest.raises(CheckpointError, match="one of trainer sft, and this run's trainer is rl") as caught:
        refuse_other_trainer({"trainer": "sft"}, {"trainer": "rl"})
    assert caught.value.remedy.startswith('Set trainer = "sft"')


def test_a_plugin_of_which_there_may_be_several_is_allowed_by_its_kind_not_by_its_place() -> None:
    before, after = lock("kl"), lock("kl", "0.2.0")
    for locks in (before, after):
        locks["record"]["kind"] = "loss"
    with pytest.raises(CheckpointError) as caught:
        refuse_changed_plugins({"loss.terms[0]": before}, {"loss.terms[0]": after}, allow_changed=())
    assert 'checkpoint.allow_changed = ["loss:kl"]' in caught.value.remedy
    (sentence,) = refuse_changed_plugins({"loss.terms[0]": before}, {"loss.terms[0]": after}, allow_changed=["loss:kl"])
    assert sentence.startswith("loss.terms[0]: acme:kl")
