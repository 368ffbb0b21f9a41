"""`interop.verl_reward` inside verl, in `nox -s peers`: verl loads the file that its configuration names, and its reward manager scores."""

import contextlib
import io
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.workers.reward_manager.naive import NaiveRewardManager

REWARDS = """
from skyrl_engine import reward
from skyrl_engine.interop import verl_reward


@reward()
async def right(text, task):
    return 1.0 if text == task.data["ground_truth"] else -0.5


compute_score = verl_reward(right)
"""
ANSWERS = ("four", "five", "nine")
WORDS = ("two and two", *ANSWERS)


class Words:
    """A tokenizer of whole texts: token n is the n-th of `WORDS`."""

    def decode(self, ids: torch.Tensor, **_options: object) -> str:
        return " ".join(WORDS[int(number)] for number in ids)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rewards.py"
        file.write_text(REWARDS)
        config = SimpleNamespace(reward={"custom_reward_function": {"path": str(file), "name": "compute_score"}})
        manager = NaiveRewardManager(Words(), num_examine=0, compute_score=get_custom_reward_fn(config))
        # a response of one token, and one place of padding behind it
        responses = torch.tensor([[1 + number, 0] for number in range(len(ANSWERS))])
        batch = DataProto.from_dict(
            tensors={
                "prompts": torch.zeros(len(ANSWERS), 1, dtype=torch.int64),
                "responses": responses,
                "attention_mask": torch.tensor([[1, 1, 0]] * len(ANSWERS)),
            },
            non_tensors={
                "reward_model": np.array([{"ground_truth": "four"}] * len(ANSWERS), dtype=object),
                "data_source": np.array(["sums"] * len(ANSWERS), dtype=object),
                "extra_info": np.array([{"index": number} for number in range(len(ANSWERS))], dtype=object),
            },
        )
        with contextlib.redirect_stdout(io.StringIO()):
            rewards = manager(batch)
    assert rewards.tolist() == [[1.0, 0.0], [-0.5, 0.0], [-0.5, 0.0]], rewards
    print(f"verl's NaiveRewardManager: {rewards[:, 0].tolist()}")


if __name__ == "__main__":
    main()
