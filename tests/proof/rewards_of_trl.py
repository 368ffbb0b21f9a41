"""`interop.trl_reward` in TRL's GRPOTrainer, in `nox -s peers`: it trains a step, and logs the rewards that are due."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from skyrl_engine import group_reward, reward
from skyrl_engine.contracts import StepResult
from skyrl_engine.interop import trl_reward
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

PROMPTS = ["a few", "words to"]
SEEN: list[tuple[str, str]] = []


@reward()
async def length(text: str, task: Any) -> StepResult:
    SEEN.append((task.messages[0]["content"], task.data["of"]))
    return StepResult(float(len(text)), metrics={"letters": float(len(text))})


@group_reward()
def place(texts: list[str], task: Any) -> list[float]:
    return [float(number) for number, _ in enumerate(texts)]


def configure_grpo(folder: Path, *, num_generations: int, max_completion_length: int, max_steps: int) -> GRPOConfig:
    """Return settings for a step of one group on CPU, which is reported to nobody."""
    return GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=num_generations,
        num_generations=num_generations,
        max_completion_length=max_completion_length,
        max_steps=max_steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, ["a few words to learn from here and there"])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        write_model(folder, "llama", tokenizer=tokenizer)
        arguments = configure_grpo(folder, num_generations=4, max_completion_length=6, max_steps=1)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            args=arguments,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": prompt, "of": prompt[::-1]} for prompt in PROMPTS]),
            reward_funcs=[trl_reward(length), trl_reward(place, num_generations=4)],
        )
        trainer.train()
        logged = trainer.state.log_history[0]
        print({name: value for name, value in logged.items() if "reward" in name or "length/" in name})
        assert len(SEEN) == 4
        assert all(of == prompt[::-1] for prompt, of in SEEN)
        assert logged["rewards/length/mean"] == logged["length/letters"]
        assert logged["rewards/place/mean"] == 1.5


if __name__ == "__main__":
    main()
