"""Batch invariance on a CPU: a row comes out the same, to the last bit, whatever other rows the pass computes.

A kernel is chosen by the shapes that it is given, and kernels add up in different orders. So no shape may depend on the other rows:

- Matrix products get their rows in multiples of `BUCKET`: all such products take one kernel, in float32 in one thread. With more threads, or in
  other precisions, their number still matters, and they come in calls of `FIXED` rows. Measured with MKL and oneDNN as torch 2.13 brings them.
- A token attends to its keys in blocks of `PLACES`, each by a kernel call of the same shape, joined in their order. A masked block
  joins with weight 0, so that a longer neighbour adds exact zeros. Single tokens do so in calls of `QUERIES` queries, or a multiple, so that
  the buffers of all threads are aligned alike: products add up in another order where one is not. Tokens of a prompt do so in pieces of
  `PIECE`, which begin at multiples of it, wherever a pass begins to read. Models whose attention torch has no kernel for attend row by row.
- Experts get their tokens in multiples of `BUCKET`.
- Activations are laid out so that vector instructions compute all elements, in every thread: the last few elements of a thread's share are
  computed by other instructions.

Runs that were killed rely on it: they sample again, with other rows, and without what was kept of earlier turns. `make_proven_rows` compares
the result with the model as it is written.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.pytorch_utils import Conv1D

from skyrl_engine_generators.attention import attend_in_blocks, attend_row_by_row, has_own_attention
from skyrl_engine_generators.buckets import BUCKET, apply_aligned, apply_in_fixed_rows

SDPA, EAGER, EXPERTS = (f"skyrl_engine_generators_{name}" for name in ("sdpa", "eager", "experts"))
"""Names that transformers finds the functions of this module by."""


@define(eq=False)
class BatchInvariance:
    """Changes how a model on a CPU computes, not what: see the module. Models on other devices stay as they are."""

    model: Any
    attends: bool = field(default=False, init=False)
    """True where attention computes so, and so takes keys and values of live rows alone."""
    _undo: list[Callable[[], None]] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.apply()

    def undo(self) -> None:
        """Leave the model as it is written."""
        while self._undo:
            self._undo.pop()()

    def apply(self) -> None:
        """Let the model compute so."""
        if next(self.model.parameters()).device.type != "cpu":
            return
        self._change_attention()
        self._change_experts()
        self._change_activations()
        self._change_products()

    @property
    def has_experts(self) -> bool:
        """Say whether products have as many rows as experts have tokens."""
        return getattr(self.model.config.get_text_config(decoder=True), "_experts_implementation", None) is not None

    def _change_products(self) -> None:
        for module in self.model.modules():
            if isinstance(module, (nn.Linear, Conv1D)) and "forward" not in vars(module):
                module.forward = partial(apply_in_fixed_rows, module.forward, module.weight)  # type: ignore[method-assign] # of this one
                self._undo.append(partial(delattr, module, "forward"))

    def _change_attention(self) -> None:
        now = self.model.config._attn_implementation  # noqa: SLF001 - transformers offers no other way to read it
        name = {"sdpa": SDPA, "eager": EAGER}.get(now)
        # other rows over the same model changed it before
        self.attends = now in (SDPA, EAGER)
        if name is None:
            return
        for known, function, mask in ((SDPA, attend_in_blocks, sdpa_mask), (EAGER, attend_row_by_row, eager_mask)):
            AttentionInterface.register(known, function)
            AttentionMaskInterface.register(known, mask)
        if name == EAGER and any(
            not has_own_attention(module) for module in self.model.modules() if "Attention" in type(module).__name__
        ):
            return
        self.model.set_attn_implementation(name)
        self.attends = True
        self._undo.append(lambda: self.model.set_attn_implementation(now))

    def _change_experts(self) -> None:
        if getattr(self.model.config, "_experts_implementation", None) != "grouped_mm":
            return
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, ask_filled_experts)
        self.model.set_experts_implementation(EXPERTS)
        self._undo.append(lambda: self.model.set_experts_implementation("grouped_mm"))

    def _change_activations(self) -> None:
        for module in [candidate for candidate in self.model.modules() if not isinstance(candidate, AlignedActivation)]:
            for name, child in list(module.named_children()):
                if _is_activation(child):
                    setattr(module, name, AlignedActivation(child))
                    self._undo.append(lambda module=module, name=name, child=child: setattr(module, name, child))  # type: ignore[misc] # bound now


def ask_filled_experts(experts: Any, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute experts with more tokens, of zeros, so that each has a multiple of `BUCKET` or none; [T, hidden]."""
    tokens, experts_per_token = chosen_TK.shape
    counts = torch.bincount(chosen_TK.reshape(-1), minlength=experts.num_experts)
    missing = -counts % BUCKET
    # an added token has as many experts as every other
    while int(missing.sum()) % experts_per_token:
        missing[counts.argmax()] += BUCKET
    added = torch.arange(len(counts)).repeat_interleave(missing).view(-1, experts_per_token)
    outputs: Tensor = grouped_mm_experts_forward(
        experts,
        torch.cat([hidden_TH, hidden_TH.new_zeros(len(added), hidden_TH.shape[1])]),
        torch.cat([chosen_TK, added.to(chosen_TK.dtype)]),
        torch.cat([weights_TK, weights_TK.new_zeros(added.shape)]),
    )
    return outputs[:tokens]


class AlignedActivation(nn.Module):
    """An elementwise function of which no element is computed by other instructions than the rest."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the function of every element."""
        return apply_aligned(self.function, inputs)


def _is_activation(module: nn.Module) -> bool:
    of_transformers = type(module).__module__ == "transformers.activations"
    known = of_transformers or isinstance(module, (nn.SiLU, nn.GELU, nn.Sigmoid, nn.Softplus, nn.Mish, nn.Tanh))
    return known and not list(module.parameters())
