"""Small chat templates of our own, one for each way in which the templates of models behave, with a tokenizer that knows their tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import frozen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BEGIN, END = "<|begin|>", "<|endoftext|>"
"""The tokenizer's own beginning and end of a text."""


@frozen
class TemplateCase:
    """A template of this folder.

    `tokens` are the special tokens that it writes. `ends` is the one that ends a turn of the assistant before a message of the user (None: none
    does). `appends` lists the roles whose messages can follow sampled tokens. `family` says how calls of tools are written, and
    `forgets` that thoughts of earlier turns are removed.
    """

    name: str
    tokens: tuple[str, ...]
    ends: str | None
    appends: tuple[str, ...] = ("user",)
    family: Literal["hermes", "llama", "qwen-xml"] | None = None
    forgets: bool = False

    @property
    def text(self) -> str:
        return (Path(__file__).parent / f"{self.name}.jinja").read_text(encoding="utf-8")

    def tokenizer(self, **settings: Any) -> "PreTrainedTokenizerFast":
        """Make a tokenizer of bytes with these special tokens and this template; `settings` are its further arguments."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        # a merge across what may be a boundary of turns: "." and a line break become one token where they meet
        dot, line = ".", "Ċ"
        vocabulary = {letter: number for number, letter in enumerate([*letters, dot + line])}
        backend = Tokenizer(models.BPE(vocabulary, [(dot, line)]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys((BEGIN, END, *self.tokens))])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token=BEGIN,
            eos_token=END,
            pad_token=END,
            additional_special_tokens=[*self.tokens],
            **settings,
        )
        tokenizer.chat_template = self.text
        tokenizer.name_or_path = self.name
        return tokenizer


_CHATML: Final = ("<|im_start|>", "<|im_end|>")
_BOTH: Final = ("user", "tool")
_CASES: Final = (
    TemplateCase("chatml", _CHATML, "<|im_end|>", _BOTH, "hermes"),
    TemplateCase("thinking", _CHATML, "<|im_end|>", _BOTH, "hermes", forgets=True),
    TemplateCase(
        "opens_thinking", ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"), "<|end|>", _BOTH, forgets=True
    ),
    TemplateCase("headers", ("<|start_header|>", "<|end_header|>", "<|eot|>", "<|python_tag|>"), "<|eot|>", _BOTH, "llama"),
    TemplateCase("instructions", ("[INST]", "[/INST]", "[CALLS]", "[RESULT]", "[/RESULT]", "[TOOL]"), END, _BOTH),
    TemplateCase("spaced_end", (), END),
    TemplateCase("model_role", ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    TemplateCase("role_tokens", ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), "<|end|>"),
    TemplateCase("next_role_ends", ("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"), "<|user|>", _BOTH, "hermes"),
    TemplateCase("parts", _CHATML, "<|im_end|>", _BOTH),
    TemplateCase("silent_parts", _CHATML, "<|im_end|>", _BOTH),
    TemplateCase("xml_calls", _CHATML, "<|im_end|>", _BOTH, "qwen-xml"),
    TemplateCase("channels", ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"), "<|end|>", _BOTH),
    TemplateCase("plain", (), None, _BOTH),
    TemplateCase("no_generation_prompt", _CHATML, "<|im_end|>", _BOTH),
    TemplateCase("counter", _CHATML, "<|im_end|>", ()),
    TemplateCase("one_round", _CHATML, "<|im_end|>", ()),
    TemplateCase("forgets_observations", _CHATML, "<|im_end|>", ()),
)

TEMPLATES: Mapping[str, TemplateCase] = {case.name: case for case in _CASES}
