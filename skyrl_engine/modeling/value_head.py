"""A critic's head: one value per token, in addition to the language-model head."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.unpickling import UNREADABLE, failure, load_pickled

NAME = "score"
"""The model's attribute and the prefix of the weights: those of transformers' token classification models, which can load an export."""


class ValueHead(nn.Linear):
    """A linear head from hidden states [n, h] to values, float32[n], or float64[n] for a float64 model; a reward model's has no bias.

    The product is computed in float32 even if weights are gathered in bfloat16: it costs little (n x h), and rounding a value to 8 bits would
    exceed a critic's usual error.
    """

    def __init__(
        self, features: int, *, bias: bool = True, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(features, 1, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set weight and bias to zero, so that the first values are 0 and no random number enters advantages.

        The weight still learns, because its gradient is a multiple of the hidden state; layers below get one from the second step on.
        """
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        precision = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        bias = None if self.bias is None else self.bias.to(precision)
        return nn.functional.linear(hidden_NH.to(precision), self.weight.to(precision), bias)[:, 0]


def has_bias(spec: ModelConfig) -> bool:
    """Say whether the head has a bias: a critic's and one of two labels have one, a reward model's of one label has none."""
    return not spec.classifier or spec.right_label is not None


def add_value_head(model: Any, features: int, *, name: str, bias: bool = True) -> ValueHead:
    """Add a head of zeros over `features` hidden numbers to `model`, with the device and dtype of its weights. Raises ModelError."""
    if hasattr(model, NAME):
        raise ModelError(
            f"{name} ({type(model).__name__}) has a part called {NAME!r} already, the name of the value head",
            remedy="Set model.value_head = false, or use another model",
        )
    parameter = next(model.parameters())
    head = ValueHead(features, bias=bias, device=parameter.device, dtype=parameter.dtype)
    model.add_module(NAME, head)
    return head


@torch.no_grad()
def load_value_head(head: ValueHead, spec: ModelConfig, source: str) -> bool:
    """Fill the head from the checkpoint; return False if it holds none. A head without bias, such as a reward model's, gets the bias 0.

    With `right_label` the difference is taken of a head with two labels. Raises ModelError for another head that does not give one
    value per token, and for a critic's bias where the model is a classifier with one label.
    """
    tensors = _read_head(spec, source)
    weight = tensors.get("weight")
    if weight is None:
        return False
    if spec.right_label is not None and len(weight) == 2:
        right = spec.right_label
        tensors = {kind: (tensor[right] - tensor[1 - right])[None] for kind, tensor in tensors.items()}
    for kind, own in head.named_parameters():
        if kind not in tensors:
            continue
        if tensors[kind].shape != own.shape:
            raise ModelError(
                f"the head {NAME}.{kind} of {spec.path} has shape {list(tensors[kind].shape)}, a value head has {list(own.shape)}",
                remedy="Use a model that scores every token with one value, or one without such a head; of a token classifier with two labels "
                "say by model.right_label which is the right one",
            )
        own.copy_(tensors[kind])
    if not has_bias(spec) and tensors.get("bias", weight.new_zeros(1)).any():
        raise ModelError(
            f"the head {NAME} of {spec.path} has a bias, and a reward model's has none",
            remedy="Use a model without a critic's head; the reward model's then starts at zero",
        )
    return True


def _read_head(spec: ModelConfig, source: str) -> dict[str, Tensor]:
    """Return the head's tensors in the checkpoint's files, by name."""
    from transformers.utils.hub import cached_file

    local = Path(source)
    # a hub id: loading the model has just put its files into the cache
    if not local.is_dir():
        config = cached_file(source, "config.json", revision=spec.revision)
        assert config is not None, f"{source} was loaded and has no config.json"
        local = Path(config).parent
    kinds = {f"{NAME}.{kind}": kind for kind in ("weight", "bias")}
    tensors = {}
    for path in sorted(local.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors.update({kinds[key]: file.get_tensor(key) for key in kinds.keys() & set(file.keys())})
    if not tensors:
        for path in sorted(local.glob("pytorch_model*.bin")):
            try:
                pickled = load_pickled(path)
            except UNREADABLE as error:
                raise ModelError(
                    f"{path}, where a value head of {spec.path} may be, cannot be read: {failure(error)}",
                    remedy="Use the model's safetensors files, from a source that you trust",
                ) from error
            tensors.update({kinds[key]: pickled[key] for key in kinds.keys() & pickled.keys()})
    return tensors
