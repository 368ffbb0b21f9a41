"""Collator: plan rows from lengths, build dense tensors for some rows. The import of this file needs no torch."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from attrs import Factory, evolve, field, frozen
from attrs.validators import instance_of, optional

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.extras import EXPERT_ROUTES, OF_IMAGES
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MicroBatchPlan, RowKind, SampleLengths
from skyrl_engine.contracts.values.prefixes import LEAST_SHARED, PrefixTree, find_common_prefixes
from skyrl_engine.contracts.values.ragged import IntArray, Ragged
from skyrl_engine.contracts.values.returned import describe_returned, require_returned, require_vector
from skyrl_engine.errors import ResultError

if TYPE_CHECKING:
    import torch

ROUTER_PADDING_MASK = "router_padding_mask"
ONE_RANK = Layout()

MODEL_INPUTS = (
    *("input_ids", "attention_mask", "position_ids"),
    *(EXPERT_ROUTES, ROUTER_PADDING_MASK),
    *OF_IMAGES,
)
"""Fields the engine asks `build` for while training: what the model eats, no dense action-axis field."""

Carried = Literal["router_replay", "vision"]

CARRIED_EXTRAS: Mapping[Carried, frozenset[str]] = {
    "router_replay": frozenset((EXPERT_ROUTES,)),
    "vision": frozenset(("images", *OF_IMAGES)),
}
"""Which extras of the columns ask for which capability; `images` are references to images that were not read yet."""


@frozen(eq=False)
class GatherIndex:
    """The places at which the model scores action tokens. All int64[n], one entry per action token that has a predecessor.

    Entry k says: action token `actions[k]` (its place on the flat action axis of the micro-batch's samples, in the plan's order) is
    predicted at row `rows[k]`, column `columns[k]`, that of the token before it. It never points at padding or before column 0; the
    first token of a sample has no entry. Entries are in the order of their tokens: `actions` rise. In rows of trees several tokens may be
    predicted at one place: the first ones behind a shared prefix.
    """

    actions: IntArray
    rows: IntArray
    columns: IntArray


@frozen(eq=False)
class DenseBatch:
    """Dense tensors of some rows. `fields` are C-contiguous CPU tensors by name, `sequence_lengths` the true lengths per row, int64.

    `cu_seqlens`, where rows hold their samples one after the other from column 0: per row int32[samples + 1], the column each sample begins
    in and the column after the last, alignment included. None for other layouts.

    `tree`, where samples share prefixes: the segments of every row. Its samples then lie in more than one piece, and `cu_seqlens` are None.

    `ragged_offsets` int64[n+1], for fields without a row per row (`pixel_values`, `image_grid_thw`), which hold what the n samples have one
    after the other: sample i of the plan's order owns `field[offsets[i] : offsets[i + 1]]`.
    """

    fields: Mapping[str, "torch.Tensor"]
    gather: GatherIndex
    sequence_lengths: Ragged = field(validator=instance_of(Ragged))
    cu_seqlens: Ragged | None = field(default=None, validator=optional(instance_of(Ragged)))
    ragged_offsets: Mapping[str, IntArray] = Factory(dict)
    tree: PrefixTree | None = field(default=None, validator=optional(instance_of(PrefixTree)))

    def __getitem__(self, name: str) -> "torch.Tensor":
        return self.fields[name]


class Collator(Protocol):
    """The product of `skyrl_engine_make_collator`: plans batches, and builds dense tensors of some of their rows.

    `rows` declares what a row may hold, which is also the capability that a backend needs for it: one sample at most ("padded"),
    several ("packed"), or several whose common prefixes are there once ("tree"). A collator of trees is given `lengths.prefixes`, says in
    `MicroBatchPlan.shared` what it shares, and builds a `DenseBatch.tree`; it may
    say in a further attribute, `least_shared`, how many tokens a prefix must have to be looked for.

    A collator that lays expert routes or images over its rows says so in one more attribute, `carries`: a set of "router_replay" and
    "vision" (`declared_extras` reads it). Data that has what the collator does not carry is refused while planning.
    """

    rows: RowKind

    def plan(self, lengths: SampleLengths, layout: Layout) -> BatchPlan:
        """Decide mini-batches, ranks, micro-batches and rows from lengths alone; no torch. Every sample is planned exactly once.

        Mini-batches never cut a group, micro-batches never cut a unit, and all ranks of a mini-batch get equally many micro-batches.
        Raises DataError for a sample that fits nowhere, UnsupportedError for a layout the collator cannot make.
        """

    def build(self, columns: SampleColumns, micro_batch: MicroBatchPlan, *, fields: Sequence[str] | None = None) -> DenseBatch:
        """Dense tensors for these rows: the named `fields` (absent ones stay absent), or every field there is when None.

        Every call returns tensors of their own: a pipeline holds several micro-batches at a time, and autograd keeps them until the
        backward pass is through.
        """


def collate(collator: Collator, columns: SampleColumns, layout: Layout = ONE_RANK) -> DenseBatch:
    """Plan a batch and build every field of all its rows at once; one rank and no limit, unless `layout` says otherwise.

    Raises what `plan` and `build` raise.
    """
    return collator.build(columns, collator.plan(measure_lengths(collator, columns), layout).joined)


def measure_lengths(collator: Collator, columns: SampleColumns) -> SampleLengths:
    """Return all that `plan` of this collator looks at: lengths and ids, and for rows of trees the common prefixes.

    Those of fewer than `collator.least_shared` tokens (16, where the collator does not say) are left out.
    """
    if collator.rows != "tree":
        return columns.lengths
    least = getattr(collator, "least_shared", LEAST_SHARED)
    return evolve(columns.lengths, prefixes=find_common_prefixes(columns.input_ids, columns.token_offsets, least=least))


def declared_extras(collator: Collator) -> frozenset[Carried]:
    """Return what the collator declares to lay over its rows in addition to tokens; nothing where it does not say."""
    return frozenset(getattr(collator, "carries", ()))


def as_dense_batch(label: str, result: object, *, whole: bool = True) -> DenseBatch:
    """Take what `build` of a collator returned: CPU tensors by name, with ids [rows, width], and a gather index that points into them.

    Unless `whole`, no ids were asked for. Raises ResultError, naming the collator, for other types, shapes and dtypes.
    """
    dense = require_returned(label, "build", result, DenseBatch)
    if not isinstance(dense.fields, Mapping):
        raise ResultError(
            f"{label} returned {describe_returned(dense.fields)} as fields from build", remedy="Return a dict from names to tensors"
        )
    for name, field_ in dense.fields.items():
        _require_tensor(label, name, field_)
    require_returned(label, "gather of build", dense.gather, GatherIndex)
    if dense.tree is not None:
        _require_tree(label, dense.tree)
    if not whole:
        return dense
    ids = dense.fields.get("input_ids")
    if ids is None or len(ids.shape) != 2 or str(ids.dtype) != "torch.int64":
        got = "no input_ids" if ids is None else f"{describe_returned(ids)} as input_ids"
        raise ResultError(f"{label} returned {got} from build", remedy="Return input_ids int64[rows, width]")
    gather = dense.gather
    require_vector(label, "build", "gather.actions", gather.actions, np.int64)
    for name, size in (("rows", ids.shape[0]), ("columns", ids.shape[1])):
        places = getattr(gather, name)
        require_vector(label, "build", f"gather.{name}", places, np.int64, len(gather.actions))
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < size:
            raise ResultError(
                f"{label} returned gather.{name} from {places.min()} to {places.max()} from build, and input_ids have {size}",
                remedy="Point the gather index into the rows that were built",
            )
    return dense


def _require_tensor(label: str, name: object, value: Any) -> None:
    if not (type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "device")):  # no torch is imported for it
        raise ResultError(
            f"{label} returned {describe_returned(value)} as {name} from build",
            remedy="Return torch tensors: torch.from_numpy(array)",
        )
    if value.device.type != "cpu":
        raise ResultError(
            f"{label} returned {name} on {value.device} from build", remedy="Return CPU tensors; the backend moves them"
        )


def _require_tree(label: str, tree: PrefixTree) -> None:
    lengths, parents = tree.lengths, tree.parents
    numbers = np.arange(len(parents.values), dtype=np.int64) - np.repeat(parents.offsets[:-1], parents.lengths)
    alike = np.array_equal(lengths.offsets, parents.offsets) and len(tree.last_segments) == len(lengths)
    if not alike or (lengths.values < 1).any() or (parents.values < -1).any() or (parents.values >= numbers).any():
        raise ResultError(
            f"{label} returned a tree with lengths {lengths.values.tolist()!s:.80} and parents {parents.values.tolist()!s:.80} from build",
            remedy="Give every segment at least one token, and as its parent an earlier segment of its row, or -1",
        )
    ends = tree.last_segments
    if (ends.values < 0).any() or (ends.values >= np.repeat(lengths.lengths, ends.lengths)).any():
        raise ResultError(
            f"{label} returned a tree with last_segments {ends.values.tolist()!s:.80} from build",
            remedy="Give for every sample the segment of its row with which it ends",
        )
