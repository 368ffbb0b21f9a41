"""Wheels are tried in environments of their own: what a verification's process says, what it may take, and every way a wheel can fail."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_wheels import BROKEN, build_wheel

from skyrl_engine.catalogue import trial
from skyrl_engine.catalogue.plugin_index import IndexedPlugin, IndexedWheel
from skyrl_engine.catalogue.trial import TrialSettings, try_wheel
from skyrl_engine.catalogue.wheel_facts import read_wheel

FACTS = SimpleNamespace(name="acme-tiny", is_engine=False)


def verdict(kept: bool, *statuses: str, **changes: object) -> str:
    promises = [
        {"promise": f"p{number}", "status": status, "cause": None, "sentence": f"It is {number}"}
        for number, status in enumerate(statuses)
    ]
    return json.dumps({"kind": "reducer", "name": "acme_tiny", "kept": kept, "promises": promises, **changes}, indent=2)


@pytest.fixture
def check(tmp_path: Path):
    """`check(out, err, code)`: what is concluded from a verification that says so; `seconds` are how long it takes."""

    def conclude(
        out: str, err: str = "", code: int = 0, seconds: float = 0.0, kind: str = "reducer", limit: float = 60.0
    ) -> IndexedPlugin:
        says = f"print({out!r}, flush=True); print({err!r}, file=sys.stderr)"
        program = f"import sys, time; {says}; time.sleep({seconds}); sys.exit({code})"
        python = tmp_path / "python"
        python.write_text(f"#!{sys.executable}\n{program}\n")
        python.chmod(0o755)
        settings = TrialSettings(tmp_path, options={"reducer:acme_tiny": ["a=1"]}, time_limit=limit)
        return trial._check(FACTS, kind, "acme_tiny", settings, python, tmp_path, None)

    return conclude


def test_a_verdict_is_read_after_whatever_was_printed(check) -> None:
    plugin = check("hello {\n" + verdict(True, "kept", "kept", "not claimed"))
    assert plugin == IndexedPlugin("reducer", "acme_tiny", "kept", 2, options=("a=1",))


def test_broken_promises_are_named(check) -> None:
    plugin = check(verdict(False, "kept", "broken", "undecided"), code=3)
    assert (plugin.status, plugin.kept, plugin.broken, plugin.reason) == ("broken", 1, ("p1",), "p1: It is 1")
    assert check(verdict(False, "undecided"), code=3).broken == ("p0",)


@pytest.mark.parametrize(
    ("out", "err", "code", "status", "reason"),
    [
        ("", "error: it needs data. Give it.", 2, "unchecked", "it needs data. Give it."),
        ("", "Traceback\nerror: its import failed.", 3, "broken", "its import failed."),
        ("", "", -11, "broken", "its verification ended with exit code -11 and said nothing"),
        ("no json", "", 0, "broken", "its verification ended with exit code 0 and said nothing"),
        (verdict(True, "kept"), "", 3, "broken", "its verification ended with exit code 3 and said nothing"),
        (verdict(True, "kept", name="other"), "", 0, "broken", "its verification ended with exit code 0 and said nothing"),
        (verdict(True, promises=3), "", 0, "broken", "its verification ended with exit code 0 and said nothing"),
        (
            verdict(False, "kept", promises=[{"status": "broken"}]),
            "",
            3,
            "broken",
            "its verification ended with exit code 3 and said nothing",
        ),
        ("[1]", "\x1b[2Jerror: x", 4, "broken", r"\x1b[2Jerror: x"),
    ],
)
def test_whatever_else_happens_is_said(check, out: str, err: str, code: int, status: str, reason: str) -> None:
    ends = code if code >= 0 else f"__import__('os').kill(__import__('os').getpid(), {-code})"
    plugin = check(out, err, ends)
    assert (plugin.status, plugin.reason) == (status, reason)


def test_a_verification_that_takes_too_long_is_ended(check) -> None:
    started = time.monotonic()
    plugin = check(verdict(True, "kept"), seconds=600, limit=0.5)
    assert (plugin.status, plugin.reason) == ("broken", "it took longer than 0.5 seconds")
    assert time.monotonic() - started < 300


def test_what_has_no_promises_is_not_started(check) -> None:
    plugin = check("", code=1, kind="command")
    assert (plugin.status, plugin.reason) == ("unchecked", "the kit has no promises for a command")


@pytest.mark.nightly
def test_every_wheel_gets_its_own_verdict(tiny: Path, tmp_path: Path) -> None:
    """Real environments and real verifications, without a network: a good wheel, a broken one, one that cannot be imported, one that is for
    another engine, and one that requires what nobody has.
    """
    failing = "raise RuntimeError('not today')"
    wheels = {
        "verified": tiny,
        "broken promise": build_wheel(tmp_path / "b", "acme-broken", code=BROKEN),
        "import": build_wheel(tmp_path / "i", "acme-import", code=failing),
        "engine": build_wheel(tmp_path / "e", "acme-engine", engine="<0.2"),
        "requires": build_wheel(tmp_path / "r", "acme-requires", more=', "acme-nowhere>=7"'),
    }
    tried: dict[str, IndexedWheel] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        for name, wheel in wheels.items():
            tried[name] = try_wheel(wheel, read_wheel(wheel), TrialSettings(tmp_path), lambda _: None)
    assert {name: wheel.standing for name, wheel in tried.items()} == {
        "verified": "verified",
        "engine": "not verified",
        **dict.fromkeys(("broken promise", "import", "requires"), "broken"),
    }
    assert tried["verified"].plugins[0].kept > 10
    assert tried["broken promise"].plugins[0].broken
    assert "not today" in tried["import"].plugins[0].reason
    assert "acme-nowhere" in str(tried["requires"].problem)
    assert "made for skyrl-engine <0.2" in tried["engine"].plugins[0].reason
