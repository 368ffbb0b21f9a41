"""The one place that chooses the kernel which attends over a row of segments, for every backend, and that refuses what a kernel cannot do."""

from typing import Final

from torch import Tensor

from skyrl_engine.contracts.values.model import AttentionKernel, ModelConfig
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling import document_kernel, tree_kernel
from skyrl_engine.modeling.context_parallel import DividedSegments
from skyrl_engine.modeling.run_attention import AttendDocument, attend_runs
from skyrl_engine.modeling.segments import Segments

_AUTO: Final = 'Set model.attention = "auto"'
_LIBRARIES: Final = {"flash": "torch's varlen_attn", "flex": "FlexAttention"}


def takes_one_row(kernel: AttentionKernel) -> bool:
    """Return True for kernels that attend over a row of segments alone: rows of one sequence each are then laid end to end, without padding."""
    return kernel in _LIBRARIES


def attend_segments(
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    attend_document: AttendDocument,
    *,
    scaling: float | None,
    window: int | None,
    dropout: float = 0.0,
    weighted: bool = False,
) -> Tensor:
    """Return attention [1, tokens, heads, d] for query [1, heads, tokens, d], key and value [1, key heads, tokens, d], as `attend_runs` does.

    With `weighted` the scores are none that torch's kernels compute, and `attend_document` attends to every run.

    Of `DividedSegments` these are this rank's tokens, whose keys and values all ranks gather; "auto" and "sdpa" attend to them by runs.

    "auto" takes the fastest kernel that is right on the device: flash attention for documents; FlexAttention for trees, and for documents where
    flash attention does not serve; or else runs one by one, which is "sdpa". Tensors on the CPU are attended by runs under every kernel: they
    are those of the checks while a model is loaded, since `refuse_kernel` refuses to train there with another one. Raises UnsupportedError for
    what a chosen kernel does not serve, or computes wrongly.
    """
    if weighted and kernel in _LIBRARIES:
        raise UnsupportedError(
            f'model.attention = "{kernel}", and {_LIBRARIES[kernel]} computes no soft caps and no attention sinks', remedy=_AUTO
        )
    if weighted or isinstance(segments, DividedSegments):
        if isinstance(segments, DividedSegments):
            key, value = segments.gather(key, value)
        attend_path = attend_document if weighted else None
        return attend_runs(
            query, key, value, segments, attend_document, scaling=scaling, window=window, dropout=dropout, attend_path=attend_path
        )
    flash_serves = kernel == "flash" or (kernel == "auto" and segments.parents is None)
    if flash_serves and document_kernel.takes(query, key, value, window=window, dropout=dropout):
        return document_kernel.attend(query, key, value, segments, scaling=scaling, window=window)
    if kernel in ("auto", "flex") and not dropout and tree_kernel.takes(query, key, value, window=window):
        return tree_kernel.attend(query, key, value, segments, scaling=scaling, window=window)
    if kernel in _LIBRARIES and query.is_cuda:
        heads = f"{query.shape[1]} heads of {query.shape[3]} numbers in {str(query.dtype).removeprefix('torch.')}"
        dropping = f" with dropout {dropout:g}" if dropout else ""
        raise UnsupportedError(
            f'model.attention = "{kernel}", and {_LIBRARIES[kernel]} does not compute {heads}{dropping} on {query.device} as it should',
            remedy=_AUTO,
        )
    return attend_runs(query, key, value, segments, attend_document, scaling=scaling, window=window)


def refuse_kernel(model: ModelConfig, device: str, rows: RowKind) -> None:
    """Raises UnsupportedError where `model.attention` names a kernel that does not serve `device` ("cpu", "cuda:0"), the dtype or the rows."""
    kernel = model.attention
    if kernel not in _LIBRARIES:
        return
    chosen, library = f'model.attention = "{kernel}"', _LIBRARIES[kernel]
    if not device.startswith("cuda"):
        why = "has no backward pass on the CPU" if kernel == "flex" else "runs on CUDA devices alone"
        raise UnsupportedError(f"{chosen}, and {library} {why}, where this run computes", remedy=f'{_AUTO}, or run.device = "cuda"')
    if model.dtype != "bfloat16":
        raise UnsupportedError(
            f"{chosen}, and {library} is proven for bfloat16, while model.dtype is {model.dtype}",
            remedy=f'Set model.dtype = "bfloat16", or model.attention = "{"sdpa" if model.dtype == "float64" else "auto"}"',
        )
    refuse_rows_of_kernel(model, rows)
    if kernel == "flash" and (reason := document_kernel.find_missing()) is not None:
        raise UnsupportedError(f"{chosen}, and {reason}", remedy=f"Install torch 2.13 or newer, or {_AUTO[0].lower()}{_AUTO[1:]}")


def refuse_rows_of_kernel(model: ModelConfig, rows: RowKind) -> None:
    """Raises UnsupportedError for rows that the kernel of `model.attention` does not attend to on any device."""
    if model.attention == "flash" and rows == "tree":
        raise UnsupportedError(
            'model.attention = "flash" attends within documents, and rows of shared prefixes are trees of them',
            remedy='Set model.attention to "flex" or "auto", or choose the collator packed',
        )
