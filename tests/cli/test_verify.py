"""`plugins verify`: what it prints, its JSON, its exit codes, and how a plugin is meant."""

import json
import logging
import re
from pathlib import Path

import pytest

from skyrl_engine.cli.render import show_verdict
from skyrl_engine.testing import Finding, Verdict

_LOSSES = """
from attrs import define
from skyrl_engine import hookimpl, loss, reducer


@define
class Options:
    gamma: float = 2.0


@loss(needs=("logprobs",), config=Options)
def right(tokens, config):
    return -config.gamma * tokens.logprobs


@loss(needs=("logprobs",))
def averaged(tokens, config):
    return -tokens.logprobs / max(len(tokens.logprobs), 1)


@reducer()
def ones(structure, config):
    return structure.loss_weight / 2.0


@reducer()
def unguarded(structure, config):
    return structure.loss_weight / structure.mass[structure.sequence_index]


class Both:
    @hookimpl
    def skyrl_engine_make_loss(self): ...

    @hookimpl
    def skyrl_engine_make_reducer(self): ...


both = Both()
number = 3
"""

LOUD = """
import logging

from skyrl_engine import reducer


@reducer()
def loud(structure, config):
    logging.getLogger("a_reducer").warning("weighed")
    return structure.loss_weight.astype("float64")
"""


@pytest.fixture
def verify(command, tmp_path):
    (tmp_path / "mine.py").write_text(_LOSSES)
    return lambda *arguments: command("plugins", "verify", "--examples", "10", *arguments)


def test_a_right_plugin_is_code_0(verify):
    outcome = verify("./mine.py:right", "gamma=3")
    assert outcome.code == 0, outcome.out
    assert "with gamma = 3.0" in outcome.out
    assert outcome.out.splitlines()[-2].endswith("not claimed (--all lists them)")
    assert "kept  " in verify("./mine.py:right", "gamma=3", "--all").out
    assert "broken" not in outcome.out


def test_a_broken_promise_is_code_3_with_counterexample_and_cause(verify):
    outcome = verify("./mine.py:averaged")
    assert outcome.code == 3
    lines = [line.strip() for line in outcome.out.splitlines()]
    assert "broken       A batch cut into micro-batches has the loss and gradient of the whole (micro_batch_split)" in lines
    assert any(line.startswith("changes x2.00 under two micro-batches: it divides by its own mask") for line in lines)
    assert any("reducer token_mean" in line for line in lines)
    assert "2 sequences of 1, 1 loss-carrying tokens" in lines
    assert lines[-2].endswith("1 broken (--all lists them)")
    assert lines[-1] == "not checked: whether its values are the right ones (no oracle); larger batches than the kit's"


@pytest.mark.filterwarnings("always:invalid value encountered")
def test_what_warns_in_every_case_is_shown_once(verify, recwarn):
    outcome = verify("reducer:./mine.py:unguarded")
    assert outcome.code == 3
    assert "Guard divisions by counts that can be 0" in outcome.out
    assert [str(warning.message) for warning in recwarn] == ["invalid value encountered in divide"]


def test_what_is_logged_in_every_case_is_shown_once(verify, monkeypatch, tmp_path):
    messages = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: messages.append(record.getMessage()))
    monkeypatch.setattr(logging, "lastResort", handler)
    monkeypatch.setattr(logging.getLogger("a_reducer"), "propagate", False)  # to pytest's own handlers
    (tmp_path / "loud.py").write_text(LOUD)
    assert verify("reducer:./loud.py:loud").code == 0
    assert messages == ["weighed"]


def test_json_holds_every_finding(verify):
    outcome = verify("loss:./mine.py:averaged", "--json")
    assert outcome.code == 3
    facts = json.loads(outcome.out)
    assert list(facts) == ["kind", "name", "reference", "version", "sha256", "options", "kept", "promises"]
    assert (facts["kind"], facts["name"], facts["kept"]) == ("loss", "averaged", False)
    keys = ["promise", "sentence", "status", "cause", "remedy", "factor", "counterexample"]
    assert all(list(promise) == keys for promise in facts["promises"])
    (broken,) = [promise for promise in facts["promises"] if promise["status"] == "broken"]
    assert broken["promise"] == "micro_batch_split"
    assert broken["factor"] == pytest.approx(2)
    assert broken["counterexample"]


@pytest.mark.parametrize(
    ("reference", "kind"),
    [
        ("./mine.py:ones", "reducer"),
        ("reducer:token_mean", "reducer"),
        ("ordered", "merger"),
        ("skyrl-engine-losses:tis", "correction"),
    ],
)
def test_the_kind_is_found_out(verify, reference, kind):
    assert json.loads(verify(reference, "--json").out)["kind"] == kind


def test_options_are_set_in_both_ways(verify):
    outcome = verify("focal", "--set", "gamma=1.5", "--json")
    assert json.loads(outcome.out)["options"] == {"gamma": 1.5}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("focall",), 3, "Did you mean 'focal'?"),
        (("loss:",), 2, "is not of the form KIND:REFERENCE"),
        (("./mine.py:wright",), 3, "Did you mean"),
        (("./mine.py:number",), 3, "implements no factory of a plugin"),
        (("./mine.py:both",), 3, "makes loss and reducer"),
        (("focal", "gama=2"), 2, "gamma"),
        (("focal", "gamma"), 2, "is not an override"),
        (("focal", "--placement", "process"), 2, "--placement is for generators, and this is a loss"),
        (("openai", "url=http://127.0.0.1:9/v1", "model=m", "--placement", "process"), 2, "drives servers of its own"),
    ],
)
def test_what_cannot_be_verified_is_one_line(verify, arguments, code, words):
    outcome = verify(*arguments)
    assert outcome.code == code
    assert words in outcome.last_line
    assert outcome.out == ""


@pytest.mark.nightly
def test_a_backend_is_tried_on_the_layouts_that_are_asked_for(verify):
    outcome = verify("backend:fsdp", "--layout", "dp1", "--json")
    assert outcome.code == 0, outcome.out
    statuses = {promise["promise"]: promise["status"] for promise in json.loads(outcome.out)["promises"]}
    assert statuses["step"] == statuses["save_and_load"] == "kept"
    assert statuses["ranks_add_up"] == "not claimed"


PAGE = Path(__file__).parents[2] / "docs/how-to/verify-a-plugin.md"


@pytest.mark.nightly
def test_the_page_shows_what_is_printed(command, tmp_path):
    text = PAGE.read_text()
    (loss,) = re.findall(r'```python title="my_loss.py"\n(.*?)```', text, re.DOTALL)
    (shown,) = re.findall(r"```text\n\$ skyrl-engine (.*?)```", text, re.DOTALL)
    (tmp_path / "my_loss.py").write_text(loss)
    arguments, _, output = shown.partition("\n")
    printed = command(*arguments.split())
    assert printed.code == 3
    assert printed.out.replace(str(tmp_path), ".") == output


def test_a_layout_of_more_processes_than_a_machine_holds_is_refused(verify):
    outcome = verify("backend:fsdp", "--layout", "dp99999")
    assert outcome.code == 2
    assert "takes 99999 processes on this machine, where 64 are the most" in outcome.last_line


def test_promises_that_one_failure_leaves_undecided_take_one_line(verify, tmp_path):
    """A reducer in float32 breaks one promise, and hardly any other can be decided."""
    (tmp_path / "single.py").write_text(
        "from skyrl_engine import reducer\n\n\n@reducer()\ndef single(structure, config):\n"
        "    return (structure.loss_weight / 2).astype('float32')\n"
    )
    outcome = verify("./single.py:single")
    assert outcome.code == 3
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("undecided")]
    assert re.fullmatch(
        r"undecided +\d+ more promises: repeatable, another_rank, .*, another_process; see finite_weights", line.strip()
    ), line


def test_one_reason_for_several_broken_promises_is_told_once(capsys):
    causes = {"one": "6 of 10 cases could not be decided: it fails for 3", "other": "it fails for 4", "third": "it is late"}
    findings = [Finding(name, f"It is {name}", "broken", cause, "Mend it") for name, cause in causes.items()]
    show_verdict("loss 'mine'", {}, Verdict(tuple(findings)), every=False)
    out = capsys.readouterr().out
    assert out.count("Mend it") == 2
    assert "So for 1 more promise: other." in out
    assert "3 broken" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("loss:cross_entropy", "--set", "k"), "Write key=value"),
        (("loss:./folder:mine",), "is a folder. Name the file in it"),
        (("./folder:mine",), "the local plugin './folder:mine' cannot be found"),
        (("./backend.py:half",), "Mark a method of that name with skyrl_engine.hookimpl"),
        (("./plain.py:undecorated",), "correction, reducer, advantage, group_filter or reward"),
    ],
)
def test_a_remedy_works_where_it_is_followed(command, tmp_path, monkeypatch, arguments, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain.py").write_text("def undecorated(tokens, config): ...\n")
    hook = "    @hookimpl\n    def skyrl_engine_make_backend(self): ...\n"
    (tmp_path / "backend.py").write_text(f"from skyrl_engine import hookimpl\n\nclass Half:\n{hook}\nhalf = Half()\n")
    monkeypatch.chdir(tmp_path)
    outcome = command("plugins", "verify", *arguments)
    assert outcome.code in (2, 3)
    assert words in " ".join(outcome.err.split())
    assert "section.key" not in outcome.err


def test_show_takes_the_distribution_that_verify_takes(command):
    by_kind, by_distribution = (command("plugins", "show", f"{head}:cross_entropy") for head in ("loss", "skyrl-engine-losses"))
    assert (by_distribution.code, by_distribution.out) == (0, by_kind.out)
