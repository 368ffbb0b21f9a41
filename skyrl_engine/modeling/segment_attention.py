"""Attention over packed rows without a flash-attention package: torch's kernel for documents on CUDA, else one document at a time.

It is registered with transformers under a name that contains "sdpa", so that transformers refuses models that would ignore it, and under one
that does not, for models whose scores that kernel of torch does not compute: `weighted_attention` does. The model
builds no mask for a packed row, so memory does not grow with the square of the row's length.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from skyrl_engine.contracts.values.model import AttentionKernel
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.attention_kernel import attend_segments
from skyrl_engine.modeling.compiling import outside
from skyrl_engine.modeling.segments import REMEDY, Segments, WholeRows
from skyrl_engine.modeling.weighted_attention import compute_attention

NAME, WEIGHTED = "skyrl_engine_segment_sdpa", "skyrl_engine_segment_weights"
_MEANINGLESS_HERE = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"})


@outside
def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segments: Segments | WholeRows | None = None,
    kernel: AttentionKernel = "auto",
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend causally from query [rows, heads, tokens, d] to key and value [rows, key heads, tokens, d]; return [rows, tokens, heads, d].

    With `Segments` there is one row, whose tokens see what its segments say, by the `kernel` that `attend_segments` takes; with `WholeRows`
    this is transformers' own "sdpa". Scores with a soft cap or attention sinks (`s_aux`) are those of `compute_attention`. Raises
    UnsupportedError if the model passed neither on, or if a layer asks for what would be dropped, such as biases.
    """
    weighted = softcap is not None or s_aux is not None

    def attend_with_weights(query_D: Tensor, key_D: Tensor, value_D: Tensor, seen: Tensor | None) -> Tensor:
        return compute_attention(query_D, key_D, value_D, seen, scaling=scaling, softcap=softcap, sinks=s_aux, dropout=dropout)

    if segments is None:
        raise UnsupportedError(f"{type(module).__name__} does not hand on where the documents of a row end", remedy=REMEDY)
    if isinstance(segments, WholeRows):
        if attention_mask is None and sliding_window is not None and key.shape[2] > sliding_window:
            raise UnsupportedError(
                f"{type(module).__name__} attends in a sliding window and got no mask", remedy="Hand an attention_mask to the model"
            )
        if weighted:
            return attend_with_weights(query, key, value, attention_mask), None
        return sdpa_attention_forward(  # type: ignore[no-any-return] # transformers leaves it untyped
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
    unknown = sorted(name for name, argument in others.items() if argument is not None and name not in _MEANINGLESS_HERE)
    if unknown:
        raise UnsupportedError(f"{type(module).__name__} attends with {unknown[0]}, which packing would drop", remedy=REMEDY)
    if isinstance(attention_mask, FakeTensor):
        raise RuntimeError("a mask without values does not tell if it hides anything")  # noqa: TRY004 - no argument of a wrong type
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or attention_mask is not None or query.shape[2] != key.shape[2]:
        raise UnsupportedError(f"{type(module).__name__} does not attend causally from tokens to themselves", remedy=REMEDY)
    assert len(query) == 1, "segments are end to end in one row"
    segments.windows.append(sliding_window)
    if segments.parents is not None and dropout:
        raise UnsupportedError(
            f"{type(module).__name__} drops attention at the rate {dropout}, and samples that share a prefix would drop the same of it",
            remedy='Set model.dropout = "off", or choose the collator packed',
        )

    def attend_plainly(query_D: Tensor, key_D: Tensor, value_D: Tensor, mask: Tensor | None) -> Tensor:
        output: Tensor = sdpa_attention_forward(
            module, query_D, key_D, value_D, mask, dropout=dropout, scaling=scaling, is_causal=True
        )[0]
        return output

    output = attend_segments(
        kernel,
        query,
        key,
        value,
        segments,
        attend_with_weights if weighted else attend_plainly,
        scaling=scaling,
        window=sliding_window,
        dropout=dropout,
        weighted=weighted,
    )
    return output, None


_padded: ContextVar[bool | None] = ContextVar("_padded", default=None)


@contextmanager
def declare_padding(*, padded: bool | None) -> Iterator[None]:
    """Tell masks inside this context whether rows have padding: transformers reads that from the device, and the host waits (None: it may)."""
    before = _padded.set(padded)
    try:
        yield
    finally:
        _padded.reset(before)


@contextmanager
def skip_document_search() -> Iterator[None]:
    """Keep transformers from looking for documents in position_ids on the device: `segment_attention` gets their places."""
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda _position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def segment_mask(
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> Tensor | None:
    """Return transformers' own mask for whole rows, and None for packed rows, which come without an `attention_mask`.

    Raises UnsupportedError for patterns other than causal and sliding windows, of which `segment_attention` would not know.
    """
    if attention_mask is not None:
        padded = _padded.get()
        if padded is not None and allow_is_causal_skip:
            allow_is_causal_skip = False
            if not padded and (local_size is None or others["kv_length"] < local_size):
                return None
        return sdpa_mask(  # type: ignore[no-any-return] # untyped there
            attention_mask=attention_mask, local_size=local_size, config=config, allow_is_causal_skip=allow_is_causal_skip, **others
        )
    if others.get("use_vmap") or local_size not in (None, getattr(config, "sliding_window", None)):
        raise UnsupportedError("its attention mask is neither causal nor a sliding window", remedy=REMEDY)
    return None


def register(kernel: AttentionKernel = "auto", *, weighted: bool = False) -> str:
    """Register attention by this kernel with transformers, and return its name there; repeated calls change nothing.

    `weighted`: the model's own code asks for scores that torch's kernel does not compute.
    """
    name = WEIGHTED if weighted else NAME
    name = name if kernel == "auto" else f"{name}_{kernel}"
    AttentionInterface.register(name, partial(segment_attention, kernel=kernel))
    AttentionMaskInterface.register(name, segment_mask)
    return name
