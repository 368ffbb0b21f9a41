"""A gymnasium environment of text: a number from 0 to 9 is to be guessed, with a hint after each guess."""

import gymnasium
from gymnasium.spaces import Box, Discrete, Text


class Guess(gymnasium.Env):
    """Pays 1 for the number and ends; `words` takes texts instead of numbers."""

    observation_space = Text(100)

    def __init__(self, words: bool = False, patience: int = 100):
        self.action_space = Text(8) if words else Discrete(10)
        self.patience = patience

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10))
        self.guesses = 0
        return "Guess a number from 0 to 9.", {}

    def step(self, action):
        self.guesses += 1
        right = str(action) == str(self.number)
        hint = "Right." if right else f"{action} is wrong. It is {'even' if self.number % 2 == 0 else 'odd'}."
        return hint, float(right), right, self.guesses >= self.patience, {}


class Pictures(gymnasium.Env):
    """Shows pictures."""

    observation_space = Box(0, 255, (4, 4))
    action_space = Discrete(2)


class Steering(Guess):
    """Takes numbers that are not whole."""

    def __init__(self):
        self.action_space = Box(-1, 1, (2,))


gymnasium.register("Guess-v0", entry_point="guessing:Guess", disable_env_checker=True)
gymnasium.register("Pictures-v0", entry_point="guessing:Pictures", disable_env_checker=True)
gymnasium.register("Steering-v0", entry_point="guessing:Steering", disable_env_checker=True)
