"""A right environment, to be spoilt in one place: sums to answer, with a second chance."""

from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task

AGAIN = ({"role": "user", "content": "Once more."},)


class Episode:
    """Two turns at most: a wrong first answer is given back."""

    def __init__(self, environment, task, seed):
        self.environment, self.task, self.seed = environment, task, seed
        self.said = []

    def begin(self):
        return ()

    def step(self, action):
        self.said.append(action.text)
        reward = self.worth(action.text)
        if reward == 1.0 or len(self.said) == 2:
            return StepResult(reward, parts={"right": reward})
        return StepResult(0.0, done=False, messages=AGAIN)

    def worth(self, text):
        return float(text.strip() == str(self.task.data["sum"]))

    def close(self):
        pass


class Plain:
    claims = EnvironmentClaims(max_turns=2)
    episode = Episode
    first = 10
    size = 50

    def tasks(self, split):
        return [self.task(split, number) for number in range(self.size)]

    def task(self, split, number):
        left = number + (0 if split == "train" else 1000)
        prompt = f"{left} + {self.first} ="
        return Task(f"{split}/{number}", ({"role": "user", "content": prompt},), data={"sum": left + self.first})

    def open(self, task, seed):
        return self.episode(self, task, seed)

    def solve(self, task):
        return str(task.data["sum"])


def wrong(episode, **more):
    """An environment of this class of episodes; importable by name, so that it can be pickled."""
    return type(episode.__name__.removesuffix("Episode"), (Plain,), {"episode": episode, "__module__": episode.__module__, **more})
