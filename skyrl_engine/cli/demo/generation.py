"""Generate greedy answers of a model in a Hugging Face directory, in batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def answer_greedily(model_directory: Path, questions: Sequence[str], *, max_new_tokens: int, batch_size: int) -> list[str]:
    """Return one answer per question, decoded without special tokens; prompts are padded on the left, where padding changes nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model_directory), local_files_only=True, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(str(model_directory), local_files_only=True, dtype=torch.float32).eval()
    end = tokenizer.eos_token_id
    answers: list[str] = []
    for start in range(0, len(questions), batch_size):
        chats = [[{"role": "user", "content": question}] for question in questions[start : start + batch_size]]
        prompts = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            generated = model.generate(
                input_ids=prompts["input_ids"],
                attention_mask=prompts["attention_mask"],
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=end,
                pad_token_id=tokenizer.pad_token_id,
            )
        answers += tokenizer.batch_decode(generated[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return [answer.strip() for answer in answers]
