"""Make a model attend by segments, and check at load that its documents do not attend to each other, or report why it cannot."""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from skyrl_engine.contracts.values.model import AttentionKernel
from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.modeling.causal_lm import transformer_layers
from skyrl_engine.modeling.context_parallel import divide_in_process
from skyrl_engine.modeling.parity import random_tokens
from skyrl_engine.modeling.segments import REMEDY, WHOLE_ROWS, Segments, SegmentSupport
from skyrl_engine.modeling.vision import ImageDecoder, language_part

logger = logging.getLogger(__name__)

DOCUMENTS, LENGTH = 3, 4
TOLERANCE = 1e-4
"""Tolerance for float64 too: many models normalise in float32 in every precision, and round differently for tensors of other shapes."""


def adopt_segment_attention(model: Any, decoder: nn.Module, *, name: str, kernel: AttentionKernel = "auto") -> SegmentSupport:
    """Replace the attention of `model`, which must have values, if that keeps documents apart; otherwise leave the model unchanged.

    The check is one forward and backward pass over three short documents. Attention must run over the segments once per layer, with a sliding
    window exactly where the configuration has one; hidden states must equal those of the documents in rows of their own, within `TOLERANCE`
    of 1 + |h|; and the gradient of the middle document's hidden states must be exactly 0 at the embeddings of the others.

    The check runs on the CPU, where the model's values are: it is about the model and not about the kernel, which is compared with its
    definition when it first runs on a device. A second such check, over a prefix and two continuations of it, tells whether samples can share
    prefixes (`tree_refusal`), and a third one whether ranks can divide documents (`division_refusal`).
    """
    attending = _find_attending(model, decoder)
    before = attending.config._attn_implementation  # noqa: SLF001 - transformers offers no other way to read it
    training = model.training
    model.eval()
    try:
        support = _adopt(model, decoder, kernel)
    except EngineError as error:
        support = SegmentSupport(refusal=error.cause)
    except Exception as error:  # noqa: BLE001 - model code may fail in any way here, and rows of one sequence can be trained all the same
        support = SegmentSupport(refusal=_describe_failure(error))
    finally:
        model.train(training)
    if not support.layers:
        logger.info("%s cannot be trained on packed rows: %s", name, support.refusal)
        if attending.config._attn_implementation != before:  # noqa: SLF001 - as above
            attending.set_attn_implementation(before)
    return support


def certain_refusal(model: Any, decoder: nn.Module) -> str | None:
    """Return why `model`, which has no values, cannot be trained on packed rows, as a clause; None where values may be needed to tell.

    Its attention is replaced, and one forward pass over fake tensors, which transformers' masks allow for, shows what each layer asks of it.
    Code that looks at values cannot run there, which tells nothing; code that runs there on rows of one document, but not on packed ones, lacks
    the mask that packed rows come without. Afterwards the model is of no use: it may be in bfloat16.
    """
    # the second time for mixtures of experts: without values torch's grouped matrix product takes bfloat16 alone
    for precision in (None, torch.bfloat16):
        segments = Segments((LENGTH,) * DOCUMENTS)
        try:
            attend_by_segments(model, decoder)
            model.to(precision)
            _pass_without_values(decoder, segments=segments)
        except EngineError as error:
            return error.cause
        except (TypeError, AttributeError, ValueError) as error:
            # what lacks values fails by RuntimeErrors, here and in torch
            try:
                whole = torch.ones(1, DOCUMENTS * LENGTH, dtype=torch.int64, device="meta")
                _pass_without_values(decoder, segments=WHOLE_ROWS, attention_mask=whole)
            except Exception:  # noqa: BLE001, S112 - as above
                continue
            return _describe_failure(error)
        except Exception:  # noqa: BLE001, S112 - model code may fail in any way without values
            continue
        return _refusal_of_layers(model, decoder, segments)
    return None


def _pass_without_values(decoder: nn.Module, **inputs: Any) -> None:
    with torch.no_grad(), _untold(), FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(1, DOCUMENTS * LENGTH, dtype=torch.int64, device="meta")
        decoder(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False, **inputs)


def _describe_failure(error: Exception) -> str:
    """Return a clause that names the innermost module whose code raised an error over packed rows."""
    modules = [
        type(owner).__name__
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if isinstance(owner := frame.f_locals.get("self"), nn.Module) and not type(owner).__module__.startswith("torch.")
    ]
    lines = str(error).strip().splitlines()
    summary = f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"
    where = f"the code of {modules[-1]}" if modules else "its code"
    return f"{where} cannot compute a row of several documents, which comes without an attention mask ({summary})"


@contextmanager
def _untold() -> Iterator[None]:
    """Keep torch from printing the traceback of what cannot be computed without values: it is caught here."""
    fake = logging.getLogger(torch._subclasses.fake_tensor.__name__)  # noqa: SLF001 - torch has no public name for it
    before, fake.disabled = fake.disabled, True
    try:
        yield
    finally:
        fake.disabled = before


def attend_by_segments(model: Any, decoder: nn.Module, kernel: AttentionKernel = "auto") -> None:
    """Replace the attention of `model`, without a check. Raises UnsupportedError if transformers reports that the model would ignore it."""
    from skyrl_engine.modeling.segment_attention import register

    attending = _find_attending(model, decoder)
    # such models follow transformers' interface of attention, and only torch's kernel does not serve them
    weighted = attending._supports_attention_backend and not attending._supports_sdpa  # noqa: SLF001 - transformers has no other way
    registered = register(kernel, weighted=weighted)
    name = type(attending).__name__
    if not attending._can_set_attn_implementation():  # noqa: SLF001 - setting it all the same would only log a warning
        raise UnsupportedError(f"{name} computes its attention in code of its own", remedy=REMEDY)
    try:
        attending.set_attn_implementation(registered)
    except ValueError as error:
        raise UnsupportedError(
            f"transformers knows no way to compute {name}'s attention by torch's scaled dot-product attention", remedy=REMEDY
        ) from error


def _find_attending(model: Any, decoder: nn.Module) -> Any:
    """Return the transformers model whose attention is replaced; a vision tower keeps its own, which attends within one image."""
    return decoder.language if isinstance(decoder, ImageDecoder) else model


def _adopt(model: Any, decoder: nn.Module, kernel: AttentionKernel) -> SegmentSupport:
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    ids = random_tokens(model, decoder, (DOCUMENTS, LENGTH), generator).to(parameter.device)
    with torch.no_grad():
        separate = decoder(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0].flatten(0, 1)

    attend_by_segments(model, decoder, kernel)
    segments = Segments((LENGTH,) * DOCUMENTS)
    positions = torch.arange(LENGTH).repeat(DOCUMENTS)
    packed, gradient = _run_row(model, decoder, ids, positions, segments, generator)
    if (refusal := _refusal_of_layers(model, decoder, segments)) is not None:
        return SegmentSupport(refusal=refusal)
    difference = ((packed - separate).abs() / (1 + separate.abs())).max().item()
    finite = bool(separate.isfinite().all())
    if not difference <= TOLERANCE:  # also true for NaN
        text = "a part of it beside the attention mixes the documents of a packed row, or does not follow their positions: its packed documents"
        return SegmentSupport(refusal=f"{text} differ from separate ones by {difference:.1e}", mixes=finite)
    inside = gradient.reshape(DOCUMENTS, LENGTH, -1)
    if not inside[1].any() or inside[[0, 2]].any():
        return SegmentSupport(refusal="its documents see each other in a packed row", mixes=finite)
    return SegmentSupport(
        len(segments.windows),
        refusal="",
        tree_refusal=_refusal_of_trees(model, decoder, ids, separate, generator),
        division_refusal=_refusal_of_division(decoder, ids, separate),
        kernel=kernel,
    )


def _refusal_of_trees(model: Any, decoder: nn.Module, ids: Tensor, separate: Tensor, generator: torch.Generator) -> str:
    """Return why samples cannot share the first document as their prefix, as a clause; empty where they can.

    `separate` are the hidden states of the documents in rows of their own. Both continuations must have those of whole rows, and a
    continuation's gradient must reach the prefix and not its sibling.
    """
    prefix, *continuations = ids
    whole = torch.stack([torch.cat([prefix, continuation]) for continuation in continuations])
    with torch.no_grad():
        attention_mask = torch.ones_like(whole)
        unrolled = decoder(input_ids=whole, attention_mask=attention_mask, segments=WHOLE_ROWS, use_cache=False)[0][:, LENGTH:]
    expected = torch.cat([separate[:LENGTH], unrolled.flatten(0, 1)])
    segments = Segments((LENGTH,) * DOCUMENTS, parents=(-1, 0, 0))
    positions = torch.cat([torch.arange(LENGTH), *(torch.arange(LENGTH, 2 * LENGTH) for _ in continuations)])
    hidden, gradient = _run_row(model, decoder, ids, positions, segments, generator)
    difference = ((hidden - expected).abs() / (1 + expected.abs())).max().item()
    if not difference <= TOLERANCE:  # also true for NaN
        return f"samples that share a prefix differ from those that do not by {difference:.1e}"
    inside = gradient.reshape(DOCUMENTS, LENGTH, -1)
    if not inside[0].any() or not inside[1].any() or inside[2].any():
        return "samples that share a prefix see each other"
    return ""


def _refusal_of_division(decoder: nn.Module, ids: Tensor, separate: Tensor) -> str:
    """Return why ranks cannot divide documents, as a clause; empty where they can.

    The tokens of two ranks lie one rank after the other in one row, so that neighbours in it are none in their document. A part of the model
    that reads neighbours, and not what attention gathers or position_ids say, gives hidden states other than `separate`.
    """
    tokens, segments = divide_in_process(Segments((LENGTH,) * DOCUMENTS), 2)
    positions = (tokens % LENGTH)[None].to(ids.device)
    with torch.no_grad():
        hidden = decoder(input_ids=ids.flatten()[tokens][None], position_ids=positions, segments=segments, use_cache=False)[0][0]
    expected = separate[tokens]
    difference = ((hidden - expected).abs() / (1 + expected.abs())).max().item()
    if not difference <= TOLERANCE:  # also true for NaN
        return f"a part of it beside the attention mixes neighbouring tokens: those of two ranks differ by {difference:.1e}"
    return ""


def _refusal_of_layers(model: Any, decoder: nn.Module, segments: Segments) -> str | None:
    """Return why the layers' attention calls of one forward pass are not those that the configuration announces; None where they are."""
    layers = len(transformer_layers(language_part(decoder)))
    if (calls := len(segments.windows)) != layers:
        return f"{calls} of its {layers} layers attend through the attention that keeps documents apart"
    sliding = sum(window is not None for window in segments.windows)
    if sliding != (wanted := _sliding_layers(model.config, layers)):
        return f"{wanted} of its layers attend in a sliding window, {sliding} of them say so to their attention"
    return None


def _run_row(
    model: Any, decoder: nn.Module, ids: Tensor, positions: Tensor, segments: Segments, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the hidden states [tokens, h] of the segments end to end, and the gradient of the middle one's at the embeddings [tokens, e]."""
    embeddings: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0]

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            position_ids = positions.to(ids.device)[None]
            hidden = decoder(input_ids=ids.reshape(1, -1), position_ids=position_ids, segments=segments, use_cache=False)[0][0]
            middle = hidden[LENGTH : 2 * LENGTH]
            # random, because the gradient of a norm vanishes for equal weights
            upstream = torch.randn(middle.shape, generator=generator).to(middle)
            (gradient,) = torch.autograd.grad(middle, embeddings, upstream)
    finally:
        hook.remove()
    return hidden.detach(), gradient


def _sliding_layers(config: Any, layers: int) -> int:
    """Return the number of layers that attend in a sliding window, by the configuration."""
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None)
    if types is not None:
        return sum(kind == "sliding_attention" for kind in types)
    return layers if getattr(text, "sliding_window", None) is not None else 0
