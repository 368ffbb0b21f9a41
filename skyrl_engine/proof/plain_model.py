"""The model by definition: as transformers makes it, one sequence at a time without padding, whole logits.

Nothing of the engine runs in here. What passes through the engine are compared with, in proofs and in the conformance kit, is made of it.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine.contracts.kinds.needs import DIVERGENCE, LOGPROBS_AT, TOP_1_AGREEMENT, Divergence, model_score
from skyrl_engine.modeling.loading import quiet_progress

HEAD = ("score.weight", "score.bias")
"""The value head's parameters, as they are stored with the model's own."""


@frozen(eq=False)
class PlainModel:
    """A model of transformers' own, and a critic's head where there is one; `parameters` by their stored names."""

    model: Any
    head: tuple[Tensor, Tensor] | None
    parameters: Mapping[str, Tensor]

    @classmethod
    def load(
        cls,
        directory: str,
        *,
        dtype: torch.dtype = torch.float64,
        value_head: bool = False,
        images: bool = False,
        adapt: Callable[[Any], Any] | None = None,
    ) -> Self:
        """Load the model in a local directory, one that takes images with `images`; `adapt` may put adapters into it."""
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        kind: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
        with quiet_progress():
            # With loading information, because transformers reports the value head as an unexpected weight otherwise. Experts one after the
            # other, because torch's grouped product of them, the default, knows no float64.
            model, information = kind.from_pretrained(
                directory, dtype=dtype, output_loading_info=True, experts_implementation="eager"
            )
        assert not information["missing_keys"], information["missing_keys"]
        assert set(information["unexpected_keys"]) <= set(HEAD), information["unexpected_keys"]
        if adapt is not None:
            model = adapt(model)
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        if not value_head:
            return cls(model, None, parameters)
        stored: dict[str, Tensor] = {}
        for file in sorted(Path(directory).glob("*.safetensors")):
            stored |= load_file(file)
        weight, bias = (stored[name].to(dtype).requires_grad_() for name in HEAD)
        return cls(model, (weight, bias), parameters | dict(zip(HEAD, (weight, bias), strict=True)))

    def scores(
        self,
        input_ids: Tensor,
        *,
        temperature: float = 1.0,
        candidates: Mapping[str, Tensor] | None = None,
        teacher: "PlainModel | None" = None,
        needs: Iterable[str] = (),
        noise: Callable[[int], Tensor] | None = None,
        **images: Tensor,
    ) -> Mapping[str, Tensor]:
        """The scores of one sequence int64[T], [T - 1] each: about every token after the first, which the model gives at the token before.

        `candidates` int64[T - 1, k] by column are token ids for `logprobs_at:COLUMN`. A `teacher` gives the divergences that `needs` name, and
        where both find the same token the likeliest. `noise` gives what is added to input embeddings, [T, h], from their width h. `images` are
        what the model takes of pictures in addition to token ids.
        """
        inputs: dict[str, Tensor] = {"input_ids": input_ids[None], **images}
        if noise is not None:
            embedded = self.model.get_input_embeddings()(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = embedded + noise(embedded.shape[-1])
        output = self.model(output_hidden_states=True, use_cache=False, **inputs)
        logits = output.logits[0, :-1] / temperature
        logprobs = logits.log_softmax(-1)
        tokens = input_ids[1:, None]
        scores = {
            "logits": logits.gather(-1, tokens)[:, 0],
            "logprobs": logprobs.gather(-1, tokens)[:, 0],
            "entropy": -(logprobs.exp() * logprobs).sum(-1),
            "logsumexp": logits.logsumexp(-1),
            "mean_logprob": logprobs.mean(-1),
            "log_sum_squares": (logprobs.exp() ** 2).sum(-1).log(),
            **{f"{LOGPROBS_AT}:{column}": logprobs.gather(-1, ids) for column, ids in (candidates or {}).items()},
        }
        if teacher is not None:
            with torch.no_grad():
                other = teacher.model(input_ids=input_ids[None], use_cache=False).logits[0, :-1] / temperature
            scores[TOP_1_AGREEMENT] = (logits.argmax(-1) == other.argmax(-1)).to(logits.dtype)
            compared = [need for need in needs if model_score(need) == DIVERGENCE]
            scores |= {need: divergence(Divergence.of(need), logits, other) for need in compared}
        if self.head is not None:
            weight, bias = self.head
            scores["values"] = output.hidden_states[-1][0, :-1] @ weight[0] + bias
        return scores


def divergence(requested: Divergence, student: Tensor, teacher: Tensor) -> Tensor:
    """The divergence [n] between the distributions of whole logits [n, v], as its definition is written."""
    p, q = (torch.softmax(logits / requested.temperature, -1) for logits in (teacher, student))
    if requested.kind == "forward":
        return _kl(p, q)
    if requested.kind == "reverse":
        return _kl(q, p)
    mixture = requested.beta * p + (1 - requested.beta) * q
    return requested.beta * _kl(p, mixture) + (1 - requested.beta) * _kl(q, mixture)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first * (first.log() - second.log())).sum(-1)
