"""The generator `hf` against transformers' `generate`, and the cost of drawing tokens of a large vocabulary. Run with `nox -s bench`.

A Qwen3 of 10 M parameters, one thread. Of equal length: 64 requests of 48 tokens at once. Ragged: 64 requests of 4 to 128 tokens (geometric,
mean 40), 16 at once; `generate` goes through batches of 16, each until its longest request ends.
"""

from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import transformers
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine

from skyrl_engine.contracts import GenerationRequest, Sampling
from skyrl_engine_generators.loop import SlotLoop
from skyrl_engine_generators.rows import CachedDecoder
from skyrl_engine_generators.sampled_row import SampledRow
from skyrl_engine_generators.sampling import RowDistributions, draw
from skyrl_engine_generators.stops import StopRule

REQUESTS = 64
LARGE = 151_936
ROUNDS = 4
BARS = {"equal": 1.3, "ragged": 2.2}
"""Cost of a token with `generate` over that with `hf`."""

MILLISECONDS = 80
"""A draw for 64 rows of the large vocabulary."""


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    print(f"{machine()}, torch {torch.__version__}, transformers {transformers.__version__}")
    random = np.random.default_rng(0)
    model = qwen3()
    prompts = [random.integers(3, 8192, random.integers(12, 25)) for _ in range(REQUESTS)]
    lengths = {"equal": np.full(REQUESTS, 48), "ragged": np.clip(random.geometric(1 / 40, REQUESTS), 4, 128)}
    for (name, length), slots in zip(lengths.items(), (64, 16), strict=True):
        ours, theirs = (partial(work, model, prompts, length, slots) for work in (sample, generate))
        times = interleave({"hf": ours, "generate": theirs}, ROUNDS)
        tokens = int(length.sum())
        rates = ", ".join(f"{which} {tokens / seconds:.0f}" for which, seconds in times.items())
        ratio = times["generate"] / times["hf"]
        print(f"{name} lengths, tokens per CPU second: {rates}; {ratio:.2f}x {compare_with_bar(ratio, at_least=BARS[name])}")
    logits, uniforms = torch.randn(64, LARGE) * 3, torch.rand(64, dtype=torch.float64)
    settings = RowDistributions.of([Sampling(max_tokens=1)] * 64, logits.device)
    works = {
        "hf": partial(draw, logits, uniforms, settings),
        "multinomial": lambda: torch.multinomial(logits.log_softmax(-1).exp(), 1),
        "log_softmax alone": lambda: logits.log_softmax(-1),
    }
    times = interleave(works, ROUNDS)
    shown = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in times.items())
    print(f"a token of 64 rows of {LARGE} tokens: {shown} {compare_with_bar(times['hf'] * 1e3, at_most=MILLISECONDS)}")


def qwen3() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=8192,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def sample(
    model: transformers.PreTrainedModel, prompts: list[npt.NDArray[np.int64]], lengths: npt.NDArray[np.int64], slots: int
) -> None:
    loop = SlotLoop(CachedDecoder(model, slots), slots)
    for number, (prompt, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
        request = GenerationRequest(number, prompt.astype(np.int32), Sampling(max_tokens=length), seed=number)
        loop.add(SampledRow(request, StopRule(frozenset(), (), 0, length, None), prompt))
    while len(loop):
        loop.step()


@torch.no_grad()
def generate(
    model: transformers.PreTrainedModel, prompts: list[npt.NDArray[np.int64]], lengths: npt.NDArray[np.int64], slots: int
) -> None:
    """With the log-probabilities of what was sampled, which `generate` leaves to its caller."""
    for start in range(0, len(prompts), slots):
        batch, most = prompts[start : start + slots], int(lengths[start : start + slots].max())
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt.tolist() for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=most,
            min_new_tokens=most,
            return_dict_in_generate=True,
            output_logits=True,
        )
        torch.stack(output.logits, 1).log_softmax(-1).gather(2, output.sequences[:, width:, None])


if __name__ == "__main__":
    main()
