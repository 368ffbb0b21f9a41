"""`gymnasium`: a small environment of text, registered by a module of these tests."""

from pathlib import Path

import pytest

from skyrl_engine import DataError, PluginIncompatibleError, UnsupportedError
from skyrl_engine.contracts import Action
from skyrl_engine.testing import EnvironmentConformance
from skyrl_engine_environments import requirements
from skyrl_engine_environments.gymnasium import GymnasiumEnvironment
from skyrl_engine_environments.options import GymnasiumOptions

GUESS = "guessing:Guess-v0"
MATERIAL = Path(__file__).with_name("material")


def environment_of(name=GUESS, **options):
    return GymnasiumEnvironment(GymnasiumOptions(id=name, **options))


def opened(environment, number=0):
    episode = environment.open(environment.tasks("train")[number], 0)
    return episode, episode.begin()


def say(episode, text, turn=0):
    return episode.step(Action(text, (1,), turn, "stop"))


class TestGuess(EnvironmentConformance):
    plugin = "skyrl-engine-environments:gymnasium"
    options = {"id": GUESS, "max_turns": 12, "size": 50, "eval_size": 20}  # noqa: RUF012 the suite reads it, nothing changes it

    def solve(self, task):
        """All numbers in turn: one of them is right."""
        return tuple(map(str, range(10)))


def test_observations_are_user_messages_and_numbers_are_actions():
    episode, begun = opened(environment_of())
    assert begun == ({"role": "user", "content": "Guess a number from 0 to 9."},)
    number = episode._made.unwrapped.number
    wrong = say(episode, str((number + 1) % 10))
    assert (wrong.reward, wrong.done) == (0.0, False)
    assert wrong.messages[0]["content"].startswith(f"{(number + 1) % 10} is wrong. It is ")
    right = say(episode, f" {number}\n", 1)
    assert (right.reward, right.done, right.messages) == (1.0, True, ())
    episode.close()
    episode.close()


def test_what_is_no_action_is_told_and_ends_nothing():
    episode, _ = opened(environment_of(max_turns=4))
    for text in ("ten", "10", "-1", ""):
        result = say(episode, text)
        assert (result.reward, result.done, result.metrics) == (0.0, False, {"invalid_actions": 1.0})
        assert result.messages[0]["content"] == f"{text!r} is no action. An action is a number from 0 to 9."


@pytest.mark.parametrize("text", ["3", "not a number"])
def test_the_last_turn_ends_the_episode(text):
    episode, _ = opened(environment_of(max_turns=2), 3)
    episode._made.unwrapped.number = 4
    assert not say(episode, text, 0).done
    assert say(episode, text, 1).done


def test_an_environment_that_gives_up_ends_the_episode():
    episode, _ = opened(environment_of(kwargs={"patience": 1}))
    episode._made.unwrapped.number = 4
    assert say(episode, "5").done


def test_actions_may_be_texts():
    episode, _ = opened(environment_of(kwargs={"words": True}))
    assert say(episode, "four").messages[0]["content"].startswith("four is wrong.")
    assert say(episode, "far too long").messages[0]["content"].endswith("An action is a text of 1 to 8 characters.")


def test_a_start_is_its_seed():
    environment = environment_of(size=20, eval_size=5)
    numbers = []
    for _ in range(2):
        numbers.append([])
        for index in range(20):
            episode, _ = opened(environment, index)
            numbers[-1].append(episode._made.unwrapped.number)
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0])) > 3
    assert [environment.tasks("eval")[index].data["seed"] for index in range(5)] == [20, 21, 22, 23, 24]


def test_a_system_prompt_is_the_task():
    assert environment_of().tasks("train")[0].messages[0]["content"] == f"You play {GUESS}. Answer with your next action alone."
    environment = environment_of(system_prompt="Play.", prompt_template="{prompt} Answer with a digit.")
    assert environment.tasks("train")[0].messages == ({"role": "system", "content": "Play."},)
    assert opened(environment)[1][0]["content"] == "Guess a number from 0 to 9. Answer with a digit."


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("guessing:Pictures-v0", "has observations of the space Box"),
        ("guessing:Steering-v0", "has actions of the space Box"),
        ("Nowhere-v0", "gymnasium does not make 'Nowhere-v0'"),
        ("no_such_module:Nowhere-v0", "gymnasium does not make 'no_such_module:Nowhere-v0'"),
    ],
)
def test_what_a_language_model_cannot_play_is_refused(name, words):
    with pytest.raises(UnsupportedError, match=words):
        environment_of(name).tasks("train")


def test_arguments_that_it_does_not_take_are_told():
    with pytest.raises(UnsupportedError, match="unexpected keyword argument 'size'"):
        environment_of(kwargs={"size": 4}).tasks("train")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(PluginIncompatibleError, match="needs the package gymnasium, which is not installed") as raised:
        environment_of()
    assert raised.value.remedy == 'python -m pip install "skyrl-engine-environments[gymnasium]"'


OF_FILE = "./mygym.py:Guess"


class TestGuessOfAFile(EnvironmentConformance):
    plugin = "skyrl-engine-environments:gymnasium"
    options = {"id": f"{MATERIAL / 'own_guess.py'}:Guess", "max_turns": 12, "size": 50, "eval_size": 20}  # noqa: RUF012 as above

    def solve(self, task):
        """All numbers in turn: one of them is right."""
        return tuple(map(str, range(10)))


class TestGuessWithoutSystemPrompt(TestGuess):
    options = {**TestGuess.options, "system_prompt": None}  # noqa: RUF012 as above


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """The reader's own folder, with an environment in a file that nothing has imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mygym.py").write_text((MATERIAL / "guessing.py").read_text().partition("gymnasium.register")[0])
    return tmp_path / "mygym.py"


def test_a_class_of_a_file_is_an_environment(own_file):
    environment = environment_of(OF_FILE, kwargs={"patience": 1})
    assert environment.tasks("train")[0].messages[0]["content"] == "You play Guess. Answer with your next action alone."
    episode, begun = opened(environment)
    assert begun == ({"role": "user", "content": "Guess a number from 0 to 9."},)
    episode._made.number = 4
    assert say(episode, "5").done


def test_a_changed_file_is_another_version(own_file):
    before = environment_of(OF_FILE).claims.version
    own_file.write_text(own_file.read_text() + "\n# changed\n")
    assert environment_of(OF_FILE).claims.version != before


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "words"),
    [
        ("./mygym.py:Riddle", {}, DataError, "has no class 'Riddle'"),
        ("./nowhere.py:Guess", {}, DataError, "there is no file nowhere.py"),
        (OF_FILE, {"size": 4}, UnsupportedError, "cannot be made: .*unexpected keyword argument 'size'"),
        ("./mygym.py:Text", {"max_length": 4}, UnsupportedError, "makes a Text and no gymnasium.Env"),
        ("./mygym.py:Pictures", {}, UnsupportedError, "has observations of the space Box"),
    ],
)
def test_a_file_that_gives_no_environment_is_refused(own_file, name, kwargs, error, words):
    with pytest.raises(error, match=words):
        environment_of(name, kwargs=kwargs).tasks("train")


def test_without_a_system_prompt_the_first_observation_is_the_task():
    environment = environment_of(system_prompt=None, prompt_template="{prompt} Answer with a digit.")
    (message,) = environment.tasks("train")[0].messages
    assert message == {"role": "user", "content": "Guess a number from 0 to 9. Answer with a digit."}
    episode, begun = opened(environment)
    assert begun == ()
    assert episode._made.unwrapped.number in range(10)


def test_an_environment_that_cannot_be_closed_does_not_hide_why_it_cannot_begin(own_file):
    own_file.write_text(
        own_file.read_text()
        + """

class Breaks(Guess):
    broken = False

    def reset(self, *, seed=None, options=None):
        self.broken = True
        raise ValueError("there is no board")

    def close(self):
        assert not self.broken, "there is nothing to close"
"""
    )
    with pytest.raises(ValueError, match="there is no board"):
        environment_of("./mygym.py:Breaks", system_prompt=None).tasks("train")[0]
