"""An environment of one's own on the trainer of the tinker-cookbook, run in a process of its own: MODEL LOG_PATH STEPS."""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial

import chz
from tinker_cookbook import renderers
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.train import Config, main
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL, LOG_PATH, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
RENDERER = "role_colon"


class DigitEnv(ProblemEnv):
    """Wants an answer that begins with a digit."""

    def get_question(self) -> str:
        return "A digit?"

    def check_answer(self, sample_str: str) -> bool:
        return sample_str[:1].isdigit()

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "7"


class Digits(RLDataset):
    def __init__(self, renderer: renderers.Renderer) -> None:
        self.renderer = renderer

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        make_env = partial(DigitEnv, self.renderer, format_coef=0.0)
        return [ProblemGroupBuilder(env_thunk=make_env, num_envs=16) for _ in range(4)]

    def __len__(self) -> int:
        return STEPS


@chz.chz
class DigitsBuilder(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, None]:
        return Digits(renderers.get_renderer(RENDERER, get_tokenizer(MODEL))), None


asyncio.run(
    main(
        Config(
            model_name=MODEL,
            recipe_name="digits",
            renderer_name=RENDERER,
            log_path=LOG_PATH,
            dataset_builder=DigitsBuilder(),
            learning_rate=2e-3,
            lora_rank=8,
            max_tokens=2,
            eval_every=0,
            save_every=0,
            loss_fn="importance_sampling",
        )
    )
)
