"""A plain transformers model whose weights are divided among ranks that sample from it together: no rank ever holds the whole.

Layers are divided by transformers' tensor-parallel plan, embedding and head along the vocabulary. Every rank computes the same tokens, and has
whole hidden states and whole logits. It learns nothing, so nothing here is differentiable.
"""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor, nn

from skyrl_engine.contracts.kinds.generator import TensorParallelGroup
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.model_facts.tensor_parallel_plan import (
    COLUMNS,
    EXPERTS,
    GATHERED_COLUMNS,
    LINEAR,
    ROWS,
    SINKS,
    match_styles,
    styles_of,
)
from skyrl_engine.modeling.causal_lm import split_causal_lm
from skyrl_engine.modeling.divided_rows import number_own, stand_in_for_foreign
from skyrl_engine.modeling.named_tensors import replace_entries
from skyrl_engine.modeling.vision import language_part

if TYPE_CHECKING:
    from collections.abc import Iterator

Word = TypeVar("Word")


@frozen
class TensorPart:
    """A rank's part of a tensor of the shape `whole`: `size` entries from `start` on, along the dimension `dim`."""

    whole: torch.Size
    dim: int
    start: int
    size: int

    @classmethod
    def of(cls, whole: Tensor, dim: int, group: TensorParallelGroup) -> "TensorPart":
        """Return the part of this rank: one of equal ones."""
        size = whole.shape[dim] // group.size
        return cls(whole.shape, dim, group.rank * size, size)

    def cut(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor, a view of it."""
        return whole.narrow(self.dim, self.start, self.size)


@frozen(eq=False)
class HeldParts:
    """The parts of a divided model that a rank holds: by `id` of a parameter its part, and those that the first rank alone adds to a sum."""

    group: TensorParallelGroup
    of_parameters: dict[int, TensorPart] = field(factory=dict)
    of_first_rank: set[int] = field(factory=set)

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of the whole tensor that a parameter of this rank is of."""
        part = self.of_parameters.get(id(parameter))
        return parameter.shape if part is None else part.whole

    def cut(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return what this rank holds of the values of a whole tensor, in memory of its own."""
        if id(parameter) in self.of_first_rank and self.group.rank:
            return torch.zeros_like(whole)
        part = self.of_parameters.get(id(parameter))
        return whole if part is None else part.cut(whole).clone()


@contextmanager
def parameters_without_memory() -> "Iterator[None]":
    """Put parameters on the meta device as modules take them, while buffers get their values: those that files do not hold."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment] # for as long as the model is made
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign] # as it was


def divide(model: Any, group: TensorParallelGroup, device: str) -> HeldParts:
    """Divide a model whose parameters are on the meta device, in place, and give this rank's parts memory on `device`, without values.

    Raises UnsupportedError for a model that cannot be divided.
    """
    parts = HeldParts(group)
    decoder: Any = language_part(split_causal_lm(model).decoder)
    styles = match_styles(styles_of(model.config), (name for name, _ in decoder.named_modules()))
    if not styles:
        raise _indivisible(f"{type(decoder).__name__} has none of the parts that its tensor-parallel plan divides")
    for name, style in styles.items():
        module = decoder.get_submodule(name)
        if style in LINEAR:
            _divide_linear(name, module, style, parts)
        elif style == EXPERTS:
            _divide_experts(name, module, parts)
        elif style == SINKS:
            parts.of_parameters[id(module.sinks)] = TensorPart.of(module.sinks, 0, parts.group)
    _divide_vocabulary(model, parts)
    _take_memory(model, parts, device)
    model.sampled_by = group
    return parts


def find_group(model: Any) -> TensorParallelGroup | None:
    """Return the ranks that a model was divided among; None for a whole one."""
    group: TensorParallelGroup | None = vars(model).get("sampled_by")
    return group


def _divide_linear(name: str, linear: nn.Module, style: str, parts: HeldParts) -> None:
    by_outputs = style in (COLUMNS, GATHERED_COLUMNS)
    if not isinstance(linear, nn.Linear):
        raise _indivisible(f"{name} is a {type(linear).__name__}, not a linear layer")
    size = linear.out_features if by_outputs else linear.in_features
    if size % parts.group.size:
        raise _indivisible(f"{parts.group.size} ranks cannot share the {size} numbers of {name}")
    parts.of_parameters[id(linear.weight)] = TensorPart.of(linear.weight, 0 if by_outputs else 1, parts.group)
    if linear.bias is not None and by_outputs:
        parts.of_parameters[id(linear.bias)] = TensorPart.of(linear.bias, 0, parts.group)
    elif linear.bias is not None:
        parts.of_first_rank.add(id(linear.bias))
    if style == GATHERED_COLUMNS:
        linear.register_forward_hook(_after(partial(gather_columns, group=parts.group)))
    elif not by_outputs:
        if style != ROWS:
            linear.register_forward_pre_hook(partial(_take_own_columns, group=parts.group))
        linear.register_forward_hook(_after(partial(sum_over_ranks, group=parts.group)))


def _divide_experts(name: str, experts: Any, parts: HeldParts) -> None:
    """Give each rank some experts whole; the rest of a token's experts add zeros here."""
    count, weights = getattr(experts, "num_experts", None), list(experts.parameters(recurse=False))
    if not isinstance(count, int) or not weights or any(len(weight) != count for weight in weights):
        raise _indivisible(f"{name} is a {type(experts).__name__}, whose weights are not one entry per expert")
    if count % parts.group.size:
        raise _indivisible(f"{parts.group.size} ranks cannot share the {count} experts of {name}")
    for weight in weights:
        parts.of_parameters[id(weight)] = TensorPart.of(weight, 0, parts.group)
    own = count // parts.group.size
    first = parts.group.rank * own
    experts.num_experts = own
    # transformers' grouped products mask the rows of other ranks' experts where this says that there are some
    experts._is_expert_parallel = True  # noqa: SLF001 - the flag of their own division

    stand_in = stand_in_for_foreign(experts, own)

    def before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, chosen, shares = inputs
        places, foreign = number_own(chosen, first, own, foreign_as=stand_in)
        return hidden, places, shares.masked_fill(foreign, 0)

    experts.register_forward_pre_hook(before)
    experts.register_forward_hook(_after(partial(sum_over_ranks, group=parts.group)))


def _divide_vocabulary(model: Any, parts: HeldParts) -> None:
    """Divide the rows of embedding and head; one whose number of rows the ranks do not divide stays whole on every rank."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for module in (embedding, head):
        if not isinstance(module, nn.Embedding | nn.Linear) or len(module.weight) % parts.group.size:
            continue
        for parameter in module.parameters(recurse=False):
            parts.of_parameters[id(parameter)] = TensorPart.of(parameter, 0, parts.group)
        if module is embedding:
            _look_up_own_tokens(module, parts.group)
        else:
            module.register_forward_hook(_after(partial(gather_columns, group=parts.group)))


def _look_up_own_tokens(embedding: nn.Module, group: TensorParallelGroup) -> None:
    """Look up this rank's tokens, with zeros for all others, and sum over ranks."""
    assert isinstance(embedding, nn.Embedding)
    rows = embedding.num_embeddings // group.size
    first = group.rank * rows
    foreign: list[Tensor] = []
    embedding.padding_idx = None  # it has no gradient here, which is all that it decides

    def before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        places, others = number_own(inputs[0], first, rows)
        foreign.append(others)
        return (places, *inputs[1:])

    def after(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return sum_over_ranks(output.masked_fill(foreign.pop()[..., None], 0), group)

    embedding.register_forward_pre_hook(before)
    embedding.register_forward_hook(after)


def _take_memory(model: nn.Module, parts: HeldParts, device: str) -> None:
    """Put parameters of this rank's shapes in the place of those on the meta device; tied ones stay tied."""
    taken: dict[int, Tensor] = {}
    for place in list(model.parameters()):
        part = parts.of_parameters.pop(id(place), None)
        shape = list(place.shape)
        if part is not None:
            shape[part.dim] = part.size
        own = nn.Parameter(torch.empty(shape, dtype=place.dtype, device=device), requires_grad=False)
        taken[id(place)] = own
        if part is not None:
            parts.of_parameters[id(own)] = part
        if id(place) in parts.of_first_rank:
            parts.of_first_rank.remove(id(place))
            parts.of_first_rank.add(id(own))
    replace_entries(model, taken)


def _take_own_columns(_module: nn.Module, inputs: tuple[Tensor, ...], *, group: TensorParallelGroup) -> tuple[Tensor, ...]:
    return (TensorPart.of(inputs[0], inputs[0].dim() - 1, group).cut(inputs[0]), *inputs[1:])


def _after(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, object, Tensor], Tensor]:
    return lambda _module, _inputs, output: change(output)


def sum_over_ranks(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return the sum of the ranks' tensors, the same on each.

    On a CPU in the order of the ranks: a ring adds an element up in an order that its place among the rows decides.
    """
    if tensor.device.type == "cpu":
        first, *others = _gather(tensor, group)
        for other in others:
            first += other
        return first
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, group=group.process_group)
    return tensor


def gather_columns(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return the ranks' tensors side by side along their last dimension."""
    return torch.cat(_gather(tensor, group), dim=-1)


def _gather(tensor: Tensor, group: TensorParallelGroup) -> list[Tensor]:
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(group.size)]
    dist.all_gather(gathered, tensor, group=group.process_group)
    return gathered


def take_first(tensor: Tensor, group: TensorParallelGroup | None) -> Tensor:
    """Put the numbers of the first rank of a group into a tensor, on all of them, and return it; None: it is the only one."""
    if group is not None:
        dist.broadcast(tensor, src=dist.get_global_rank(group.process_group, 0), group=group.process_group)
    return tensor


def collect_words(word: Word, group: TensorParallelGroup | None) -> list[Word]:
    """Return what every rank of a group says, in their order; None: this one alone."""
    if group is None:
        return [word]
    words: list[Word] = [word] * group.size
    dist.all_gather_object(words, word, group=group.process_group)
    return words


def _indivisible(cause: str) -> UnsupportedError:
    return UnsupportedError(
        f"the model cannot be divided for sampling: {cause}",
        remedy="Sample with the generator vllm, or on one tensor-parallel rank",
    )
