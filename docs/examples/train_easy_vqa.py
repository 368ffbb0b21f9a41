r"""Teach a vision-language model to answer questions about pictures of shapes, and count its right answers to questions held out.

    pip install "skyrl-engine[train,vision]" skyrl-engine-fsdp skyrl-engine-collators easy-vqa
    python docs/examples/train_easy_vqa.py --output runs/easy-vqa

makes a Qwen3-VL of a million random weights and trains it on a CPU in a few minutes. The same file fine-tunes a pretrained model from
the hub; keys of the configuration may follow:

    python docs/examples/train_easy_vqa.py --output runs/easy-vqa-2b --model Qwen/Qwen3-VL-2B-Instruct --steps 100 --learning-rate 1e-5 \
        model.dtype=bfloat16 model.activation_checkpointing=true run.launch=ray run.ranks=8

Data: easy-vqa 1.0 (MIT), pictures of 64 x 64 pixels with one shape each, and 13 answers.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import easy_vqa
import torch
from attrs import frozen
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SEED = 7
PAD, START, END, IMAGE = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"
SPECIAL = [PAD, START, END, "<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>"]
CHAT_TEMPLATE = """\
{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


@frozen
class Question:
    """One question about the picture in a file, and the answer to learn."""

    image: str
    text: str
    answer: str

    def prompt(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image", "image": self.image}, {"type": "text", "text": self.text}]}]

    def row(self) -> str:
        return json.dumps({"messages": [*self.prompt(), {"role": "assistant", "content": self.answer}]}) + "\n"


def questions() -> tuple[list[Question], list[Question]]:
    """Those to learn from, and 500 about other pictures."""

    def of(texts: Sequence[Sequence[Any]], images: dict[int, str]) -> list[Question]:
        return [Question(images[image], text, answer) for text, answer, image in zip(*texts, strict=True)]

    training = of(easy_vqa.get_train_questions(), easy_vqa.get_train_image_paths())
    held_out = of(easy_vqa.get_test_questions(), easy_vqa.get_test_image_paths())
    return training, random.Random(SEED).sample(held_out, 500)  # noqa: S311 # a choice of questions, no secret


def make_model(directory: Path, training: Sequence[Question]) -> None:
    """Write a small Qwen3-VL with random weights, and a tokenizer and an image processor for it, as a Hugging Face directory."""
    words = Tokenizer(models.WordLevel(unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = ["user assistant", *(f"{question.text} {question.answer}" for question in training)]
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)

    size = {"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(directory)

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    vision = {
        "depth": 2,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 4,
        "out_hidden_size": 128,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    names = {"image": IMAGE, "video": "<|video_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    tokens = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    torch.manual_seed(SEED)
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    print(f"made a model of {sum(parameter.numel() for parameter in model.parameters()):,} parameters in {directory}")


@torch.inference_mode()
def exact_match(location: str, asked: Sequence[Question], *, batch_size: int = 50) -> float:
    """The share of the questions that the model in `location` answers exactly, decoding greedily."""
    tokenizer = AutoTokenizer.from_pretrained(location, padding_side="left")
    processor = AutoImageProcessor.from_pretrained(location, backend="pil")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForImageTextToText.from_pretrained(location, dtype="auto").to(device).eval()
    right = 0
    for start in range(0, len(asked), batch_size):
        part = asked[start : start + batch_size]
        images = processor(images=[Image.open(question.image) for question in part], return_tensors="pt")
        counts = images["image_grid_thw"].prod(1) // processor.merge_size**2
        prompts = [
            tokenizer.apply_chat_template(question.prompt(), add_generation_prompt=True, tokenize=False).replace(
                IMAGE, IMAGE * int(count)
            )
            for question, count in zip(part, counts, strict=True)
        ]
        inputs = tokenizer(prompts, padding=True, add_special_tokens=False, return_token_type_ids=False, return_tensors="pt")
        types = (inputs["input_ids"] == model.config.image_token_id).long()
        made = model.generate(
            **inputs.to(device),
            **images.to(device),
            mm_token_type_ids=types.to(device),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        answers = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(answer.strip().lower() == question.answer for answer, question in zip(answers, part, strict=True))
    return right / len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a vision-language model on easy-vqa.")
    parser.add_argument("--output", type=Path, required=True, help="a new folder for data, configuration and run")
    parser.add_argument("--model", help="a hub id or directory of a Qwen3-VL; without it, a small one is made")
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="further keys of the configuration")
    given = parser.parse_intermixed_args()

    output = given.output.absolute()
    output.mkdir(parents=True)
    training, held_out = questions()
    (output / "train.jsonl").write_text("".join(question.row() for question in training), encoding="utf-8")
    (output / "held-out.jsonl").write_text("".join(question.row() for question in held_out), encoding="utf-8")
    if given.model is None:
        make_model(output / "model", training)
    model = given.model or str(output / "model")
    before = exact_match(model, held_out)
    print(f"held-out exact match before training: {before:.1%}")

    command = [sys.executable, "-m", "skyrl_engine", "sft", "--model", model, "--output", str(output / "run")]
    command += ["--data", str(output / "train.jsonl"), "--eval-data", str(output / "held-out.jsonl")]
    command += ["--steps", str(given.steps), "--batch-size", str(given.batch_size), "--learning-rate", str(given.learning_rate)]
    command += [f"run.seed={SEED}", "optimizer.schedule=cosine", f"optimizer.warmup_steps={min(10, given.steps // 2)}"]
    command += ["evaluation.at_start=true"]
    done = subprocess.run([*command, *given.overrides], check=False)  # noqa: S603 # our own command, with what the user typed
    if done.returncode:
        sys.exit(done.returncode)  # it has said why

    after = exact_match(str(output / "run" / "model"), held_out)
    print(f"held-out exact match: {before:.1%} before training, {after:.1%} after {given.steps} steps")


if __name__ == "__main__":
    main()
