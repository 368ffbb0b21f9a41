"""Refuse while planning what the chosen plugins, data and model cannot do together."""

from collections.abc import Iterator, Sequence

import numpy as np

from skyrl_engine.contracts.backend import Capability
from skyrl_engine.contracts.collator import Collator
from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.loss import MODEL_SCORES, Loss
from skyrl_engine.contracts.topology import Topology
from skyrl_engine.errors import DataError, UnsupportedError

_ACTION: dict[Capability, str] = {
    "padded": "Choose a collator that packs rows, or another backend",
    "packed": "Choose a collator with one sample per row, such as padded, or a backend that supports packing",
    "tensor_parallel": "Set the backend's tensor-parallel size to 1, or choose another backend",
    "pipeline_parallel": "Set the backend's pipeline-parallel size to 1, or choose another backend",
    "context_parallel": "Set the backend's context-parallel size to 1, or choose another backend",
    "vision": "Remove the images from the data, or choose another backend",
}


def required_capabilities(topology: Topology, collator: Collator, datasets: Sequence[SampleColumns]) -> frozenset[Capability]:
    """What a backend must be able to do for this layout, this collator's rows and this data."""
    return frozenset(_required(topology, collator, datasets))


def _required(topology: Topology, collator: Collator, datasets: Sequence[SampleColumns]) -> Iterator[Capability]:
    yield collator.rows
    if topology.tp > 1:
        yield "tensor_parallel"
    if topology.pp > 1:
        yield "pipeline_parallel"
    if topology.cp > 1:
        yield "context_parallel"
    if any("images" in columns.extras for columns in datasets):
        yield "vision"


def check_capabilities(backend: str, declared: frozenset[Capability], required: frozenset[Capability]) -> None:
    """Raises UnsupportedError naming the first missing capability and what to change."""
    for capability in sorted(required - declared):
        has = ", ".join(sorted(declared)) or "none"
        raise UnsupportedError(
            f"the run needs the capability {capability!r}, which backend {backend} does not declare (it declares: {has})",
            remedy=_ACTION[capability],
        )


def check_loss(name: str, loss: Loss, reducer: str, columns: SampleColumns) -> None:
    """Raises DataError for a column the loss needs and the data lacks, UnsupportedError for a reducer that makes no sense for the loss."""
    missing = [need for need in loss.needs if need not in MODEL_SCORES and need not in columns.columns]
    if missing:
        raise DataError(
            f"loss {name} needs the column {missing[0]!r}, the data has {', '.join(sorted(columns.columns)) or 'none'}",
            remedy=f"Add {', '.join(missing)} to every sample, or choose another loss",
        )
    if loss.reducers is not None and reducer not in loss.reducers:
        raise UnsupportedError(
            f"loss {name} makes sense only with the reducers {', '.join(loss.reducers)}, not with {reducer}",
            remedy=f'Set reducer.use = "{loss.reducers[0]}"',
        )


def check_ungrouped(columns: SampleColumns) -> None:
    """Supervised fine-tuning cuts mini-batches sample by sample. Raises UnsupportedError for data whose samples belong together."""
    for name, ids in (("group_ids", columns.group_ids), ("unit_ids", columns.unit_ids)):
        if len(np.unique(ids)) != len(ids):
            raise UnsupportedError(
                f"samples share {name}, and supervised fine-tuning would tear them apart", remedy=f"Leave {name} out of the data"
            )
