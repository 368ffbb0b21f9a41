"""Every message of the controller to ranks is a class: it travels, names itself, and one that is wrong is an error of the type checker."""

import pickle
from pathlib import Path

import attrs
import pytest
from mypy import api

from skyrl_engine.workers import launch, messages
from skyrl_engine.workers.messages import ForAdapterSet, Message, RunPass, Save
from skyrl_engine.workers.worker import Pass, Worker

MESSAGES = {
    name: value
    for name, value in vars(messages).items()
    if isinstance(value, type) and issubclass(value, Message) and value is not Message
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_a_message_says_what_a_rank_does(message: type[Message]) -> None:
    assert attrs.has(message)
    assert message.__doc__
    assert isinstance(message.verb, property if message is ForAdapterSet else str)
    assert message.answer.__doc__ is None, "its class says it"


def test_neither_the_group_nor_the_worker_spells_a_message() -> None:
    """An order to ranks is written once, as a message. `run` and `close` are the group's own, over all ranks."""
    public = {name for name in vars(Worker) if not name.startswith("_")} & {
        name for name in vars(launch.WorkerGroup) if not name.startswith("_")
    }
    assert public == {"run", "close"}


def test_a_message_travels_without_its_shard_and_takes_it_up_again() -> None:
    message = ForAdapterSet(3, RunPass(Pass("evaluate"), shard="a reference"))
    assert (message.shard, message.verb) == ("a reference", "run")
    sent = pickle.loads(pickle.dumps(message.with_shard(None)))
    assert sent.shard is None
    assert sent.with_shard("a reference") == message
    plain = Save(Path("a"))
    assert plain.with_shard(None) is plain
    assert plain.shard is None


SNIPPET = """
from pathlib import Path

from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.messages import GatherWeights, Save, StepOptimizer


def use(group: WorkerGroup) -> None:
    {}
"""


@pytest.mark.proof
@pytest.mark.of_sources("skyrl_engine/workers")
@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("group.ask(Save(Path('a')))", None),
        ("weights = group.ask(GatherWeights())[0]['a'].sum()", None),
        ("group.ask('save')", 'Argument 1 to "ask" of "WorkerGroup" has incompatible type "str"'),
        ("group.ask(Save('a'))", 'Argument 1 to "Save" has incompatible type "str"; expected "Path"'),
        ("group.ask(Save())", 'Missing positional argument "directory" in call to "Save"'),
        ("group.ask(Path('a'))", 'incompatible type "Path"'),
        ("weights: str = group.ask(GatherWeights())[0]", "Incompatible types in assignment"),
        ("group.send(StepOptimizer()).result()[0].norm", '"StepReply" has no attribute "norm"'),
    ],
)
def test_a_wrong_message_is_an_error_of_the_type_checker(tmp_path: Path, line: str, error: str | None) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET.format(line))
    config = Path(__file__).parents[2] / "pyproject.toml"
    output, _, status = api.run([str(file), "--config-file", str(config), "--cache-dir", str(tmp_path.parent / "mypy")])
    assert (status == 0) == (error is None), output
    assert error is None or error in output
