"""`plugins list` and `plugins show`."""

import json

from skyrl_engine.registry.kinds import KINDS

_LOSS = '''
from attrs import define
from skyrl_engine import loss


@define
class Options:
    gamma: float = 2.0
    """Speed at which sure tokens fade."""


@loss(needs=("logprobs",), config=Options)
def mine(tokens, config):
    return -tokens.logprobs
'''


def test_list_as_json_says_where_each_plugin_comes_from(command):
    records = json.loads(command("plugins", "list", "--json").out)
    (loss,) = [record for record in records if record["reference"] == "skyrl-engine-losses:cross_entropy"]
    assert (loss["kind"], loss["name"], loss["source"]) == ("loss", "cross_entropy", "distribution")
    assert loss["version"]
    assert {record["kind"] for record in records} == set(KINDS)


def test_list_of_one_kind(command):
    outcome = command("plugins", "list", "--kind", "merger")
    lines = outcome.out.splitlines()
    assert lines[0].split()[:4] == ["kind", "name", "distribution", "version"]
    assert {line.split()[0] for line in lines[1:]} == {"merger"}


def test_show_tells_the_options_of_a_local_file(command, tmp_path):
    (tmp_path / "my_loss.py").write_text(_LOSS)
    shown = json.loads(command("plugins", "show", "loss:./my_loss.py:mine", "--json").out)
    assert shown["source"] == "file"
    assert len(shown["sha256"]) == 64
    (option,) = shown["options"]
    assert (option["name"], option["default"], option["meaning"]) == ("gamma", "2.0", "Speed at which sure tokens fade.")
    assert "gamma" in command("plugins", "show", "loss:./my_loss.py:mine").out


def test_show_of_a_plugin_without_options(command):
    outcome = command("plugins", "show", "loss:cross_entropy")
    assert outcome.code == 0, outcome.err
    assert "skyrl-engine-losses" in outcome.out
    assert "takes no options" in outcome.out


def test_a_misspelt_plugin_is_code_3_and_one_line(command):
    outcome = command("plugins", "show", "loss:cross_entrophy")
    assert outcome.code == 3
    assert outcome.err.count("\n") == 1
    assert "cross_entropy" in outcome.err


def test_show_wants_kind_and_reference(command):
    for text in ("cross_entropy", "loss:", "los:focal"):
        outcome = command("plugins", "show", text)
        assert outcome.code == 2
        assert outcome.last_line.startswith("error: ")
