"""Batch invariance on a CPU: a row comes out the same, to the last bit, whatever other rows the pass computes.

A kernel is chosen by the shapes that it is given, and kernels add up in different orders. So no shape may depend on the other rows:

- Matrix products get their rows in multiples of `ROWS`. All such products take one kernel, for any number of threads: measured with MKL and
  oneDNN as torch 2.13 brings them.
- Prompts are read in passes of one width each, which follows from a row's own length (`rows`).
- A single token attends to its keys in blocks of `PLACES`, each by a kernel call of the same shape, joined in their order. A masked block
  joins with weight 0, so that a longer neighbour adds exact zeros. The queries of such a call are multiples of `QUERIES`, so that the buffers
  of all threads are aligned alike: products add up in another order where one is not. Models whose attention torch has no kernel for attend
  row by row.
- Experts get their tokens in multiples of `ROWS`.
- Activations are laid out so that vector instructions compute all elements, in every thread: the last few elements of a thread's share are
  computed by other instructions.

Runs that were killed rely on it: they sample again, with other rows. `proven_rows` compares the result with the model as it is written.
"""

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

BUCKET: Final = 16
"""Rows of matrix products come in multiples of this."""

PLACES: Final = 128
"""Single tokens attend to so many places at a time."""

QUERIES: Final = 4
"""Queries of one head of keys come in multiples of this; fewer than 4 take as long."""

LANES: Final = 64
"""No vector loop of torch takes more elements at a time."""

SERIAL_ELEMENTS: Final = 2**15
"""torch gives a thread at least so many elements of an elementwise function (`at::internal::GRAIN_SIZE`)."""

SDPA, EAGER, EXPERTS = (f"skyrl_engine_generators_{name}" for name in ("sdpa", "eager", "experts"))
"""Names that transformers finds the functions of this module by."""


def pad_to_bucket(count: int, device: torch.device, unit: int = BUCKET) -> int:
    """Return the next multiple of `unit` on a CPU, where a row's result must not depend on the number of rows; `count` on other devices."""
    return -(-count // unit) * unit if device.type == "cpu" else count


def pad_rows_to_bucket(rows: Tensor) -> Tensor:
    """Return [m, width]: the n rows, and zeros after them."""
    missing = pad_to_bucket(len(rows), rows.device) - len(rows)
    return pad(rows, (0, 0, 0, missing)) if missing else rows


@define(eq=False)
class BatchInvariance:
    """Changes how a model on a CPU computes, not what: see the module. Models on other devices stay as they are."""

    model: Any
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

    def _change_attention(self) -> None:
        now = self.model.config._attn_implementation  # noqa: SLF001 - transformers offers no other way to read it
        name = {"sdpa": SDPA, "eager": EAGER}.get(now)
        if name is None:
            return
        for known, function, mask in ((SDPA, attend_in_blocks, sdpa_mask), (EAGER, attend_row_by_row, eager_mask)):
            AttentionInterface.register(known, function)
            AttentionMaskInterface.register(known, mask)
        if name == EAGER and any(not _is_found(module) for module in self.model.modules() if "Attention" in type(module).__name__):
            return
        self.model.set_attn_implementation(name)
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


def attend_in_blocks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Attend from [rows, heads, tokens, d] to keys and values [rows, key heads, places, d]; [rows, tokens, heads, d].

    Where each row has one token, to `PLACES` places at a time; the heads that share keys are queries of one product then.
    """
    masked = attention_mask is not None and attention_mask.shape[1] == 1
    if query.shape[2] != 1 or not masked or others.get("position_bias") is not None or others.get("softcap") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)  # type: ignore[no-any-return] # untyped there
    assert attention_mask is not None
    if attention_mask.dtype == torch.bool:
        attention_mask = torch.where(attention_mask, 0.0, -torch.inf).to(query.dtype)
    rows, heads, _, width = query.shape
    group_size = heads // key.shape[1]
    packed = pad(query.reshape(rows, key.shape[1], group_size, width), (0, 0, 0, -group_size % QUERIES))
    scale = others.get("scaling")
    scale = width**-0.5 if scale is None else scale
    parts = []
    for at in range(0, key.shape[2], PLACES):
        places = slice(at, at + PLACES)
        parts.append(_attend(packed, key[:, :, places], value[:, :, places], _block(attention_mask, at), scale))
    joined = _join_blocks(parts, attention_mask)[:, :, :group_size]
    return joined.reshape(rows, 1, heads, value.shape[-1]).to(query.dtype), None


def attend_row_by_row(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Attend by the model's own code; where each row has one token, each row by itself, to the places up to its token."""
    own = _own_attention(module)
    if query.shape[2] != 1 or attention_mask is None:
        return own(module, query, key, value, attention_mask, **others)[0], None
    seen = attention_mask.expand(len(query), -1, -1, -1)[:, 0, 0] > torch.finfo(attention_mask.dtype).min
    last = (seen * torch.arange(seen.shape[1], device=seen.device)).amax(-1).tolist()
    rows = []
    for place, at in enumerate(last):
        row, end = slice(place, place + 1), pad_to_bucket(at + 1, key.device)
        rows.append(own(module, query[row], key[row, :, :end], value[row, :, :end], attention_mask[row, ..., :end], **others)[0])
    return torch.cat(rows), None


def ask_filled_experts(experts: Any, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute experts with more tokens, of zeros, so that each has a multiple of `ROWS` or none; [T, hidden]."""
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
        count = inputs.numel()
        shares = min(torch.get_num_threads(), -(-count // SERIAL_ELEMENTS))
        missing = -count % (LANES * max(1, shares))
        outputs: Tensor = self.function(pad(inputs.reshape(-1), (0, missing)) if missing else inputs.contiguous())
        return outputs[:count].view(inputs.shape) if missing else outputs


def _is_activation(module: nn.Module) -> bool:
    of_transformers = type(module).__module__ == "transformers.activations"
    known = of_transformers or isinstance(module, (nn.SiLU, nn.GELU, nn.Sigmoid, nn.Softplus, nn.Mish, nn.Tanh))
    return known and not list(module.parameters())


def _is_found(module: nn.Module) -> bool:
    return callable(getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None))


def _own_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the function that the file of a model attends by where no other is chosen."""
    own: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return own


def _block(mask: Tensor, at: int) -> Tensor:
    return mask[..., at : at + PLACES]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to one block: outputs [rows, heads, queries, d] and the logarithm [rows, heads, queries] of the sum of their weights."""
    if key.shape[-1] == value.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scale)  # type: ignore[no-any-return] # noqa: SLF001 - the function of torch that tells this logarithm
    scores = (query @ key.transpose(-1, -2)).float() * scale + mask
    highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return (weights.to(value.dtype) @ value) / total, (highest + total.log())[..., 0]


def _join_blocks(parts: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """Join the outputs of blocks, in their order: what a block adds to a row that sees none of it is exactly 0."""
    if len(parts) == 1:
        return parts[0][0]
    logs = torch.stack([log for _, log in parts])
    for block, log in enumerate(logs):
        log.masked_fill_(_block(mask, block * PLACES).amax(-1) == -torch.inf, -torch.inf)
    shares = (logs - logs.amax(0)).exp()[..., None]
    joined, total = parts[0][0] * shares[0], shares[0]
    for (outputs, _), share in zip(parts[1:], shares[1:], strict=True):
        joined, total = joined + outputs * share, total + share
    return joined / total
