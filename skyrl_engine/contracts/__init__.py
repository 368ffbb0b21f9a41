"""Everything that crosses the contracts: the protocols that factories return, and the values that travel between parts.

Authors of plugins import from here; the files behind may move between minor versions. A name is imported when it is first used. Nothing
here imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_engine.contracts.kinds.backend import (
        PARALLEL_SIZES,
        AdamWSettings,
        Backend,
        BackendDescription,
        Capability,
        MicroBatch,
        Objective,
        OptimStep,
        RankBatch,
        RankEnvironment,
        StepCounts,
    )
    from skyrl_engine.contracts.kinds.collator import (
        CARRIED_EXTRAS,
        MODEL_INPUTS,
        ROUTER_PADDING_MASK,
        Carried,
        Collator,
        DenseBatch,
        GatherIndex,
        carried_by,
        collate,
    )
    from skyrl_engine.contracts.kinds.context import FactoryContext
    from skyrl_engine.contracts.kinds.correction import Correction, FunctionCorrection
    from skyrl_engine.contracts.kinds.loss import (
        MODEL_SCORES,
        FunctionLoss,
        Loss,
        LossOutput,
        LossTokens,
        Sequences,
        as_loss_output,
    )
    from skyrl_engine.contracts.kinds.merger import Merger
    from skyrl_engine.contracts.kinds.observer import (
        CheckpointSaved,
        EvaluationFinished,
        SessionFinished,
        SessionStarted,
        StepFinished,
    )
    from skyrl_engine.contracts.kinds.reducer import BatchStructure, EmptySequence, FunctionReducer, PerSequence, Reducer
    from skyrl_engine.contracts.values.bundles import Bundles, inseparable
    from skyrl_engine.contracts.values.columns import SampleColumns
    from skyrl_engine.contracts.values.extras import EXPERT_ROUTES, IMAGE_GRID, OF_IMAGES, PIXEL_VALUES, TOKEN_TYPES
    from skyrl_engine.contracts.values.ingest import ListReader
    from skyrl_engine.contracts.values.model import ComputeDtype, LoraConfig, ModelConfig
    from skyrl_engine.contracts.values.outputs import (
        ENGINE_METRICS,
        PADDING_SAMPLE,
        BatchOutput,
        Metric,
        RankOutput,
        Reduction,
        combine_metrics,
        results_of,
    )
    from skyrl_engine.contracts.values.plan import (
        BatchPlan,
        Layout,
        MicroBatchPlan,
        MiniBatchPlan,
        SampleLengths,
        one_sample_per_row,
    )
    from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged, RaggedView, offsets_of, segment_indices
    from skyrl_engine.contracts.values.topology import RankCoords, Topology

__all__ = [
    "CARRIED_EXTRAS",
    "ENGINE_METRICS",
    "EXPERT_ROUTES",
    "IMAGE_GRID",
    "MODEL_INPUTS",
    "MODEL_SCORES",
    "OF_IMAGES",
    "PADDING_SAMPLE",
    "PARALLEL_SIZES",
    "PIXEL_VALUES",
    "ROUTER_PADDING_MASK",
    "TOKEN_TYPES",
    "AdamWSettings",
    "AnyArray",
    "Backend",
    "BackendDescription",
    "BatchOutput",
    "BatchPlan",
    "BatchStructure",
    "Bundles",
    "Capability",
    "Carried",
    "CheckpointSaved",
    "Collator",
    "ComputeDtype",
    "Correction",
    "DenseBatch",
    "EmptySequence",
    "EvaluationFinished",
    "FactoryContext",
    "FunctionCorrection",
    "FunctionLoss",
    "FunctionReducer",
    "GatherIndex",
    "IntArray",
    "Layout",
    "ListReader",
    "LoraConfig",
    "Loss",
    "LossOutput",
    "LossTokens",
    "Merger",
    "Metric",
    "MicroBatch",
    "MicroBatchPlan",
    "MiniBatchPlan",
    "ModelConfig",
    "Objective",
    "OptimStep",
    "PerSequence",
    "Ragged",
    "RaggedView",
    "RankBatch",
    "RankCoords",
    "RankEnvironment",
    "RankOutput",
    "Reducer",
    "Reduction",
    "SampleColumns",
    "SampleLengths",
    "Sequences",
    "SessionFinished",
    "SessionStarted",
    "StepCounts",
    "StepFinished",
    "Topology",
    "as_loss_output",
    "carried_by",
    "collate",
    "combine_metrics",
    "inseparable",
    "offsets_of",
    "one_sample_per_row",
    "results_of",
    "segment_indices",
]

_HOMES = {
    "AnyArray": "values.ragged",
    "Backend": "kinds.backend",
    "BackendDescription": "kinds.backend",
    "BatchOutput": "values.outputs",
    "BatchPlan": "values.plan",
    "BatchStructure": "kinds.reducer",
    "Bundles": "values.bundles",
    "CARRIED_EXTRAS": "kinds.collator",
    "Capability": "kinds.backend",
    "Carried": "kinds.collator",
    "CheckpointSaved": "kinds.observer",
    "Collator": "kinds.collator",
    "ComputeDtype": "values.model",
    "Correction": "kinds.correction",
    "DenseBatch": "kinds.collator",
    "ENGINE_METRICS": "values.outputs",
    "EXPERT_ROUTES": "values.extras",
    "EmptySequence": "kinds.reducer",
    "EvaluationFinished": "kinds.observer",
    "FactoryContext": "kinds.context",
    "FunctionCorrection": "kinds.correction",
    "FunctionLoss": "kinds.loss",
    "FunctionReducer": "kinds.reducer",
    "GatherIndex": "kinds.collator",
    "IMAGE_GRID": "values.extras",
    "IntArray": "values.ragged",
    "Layout": "values.plan",
    "ListReader": "values.ingest",
    "LoraConfig": "values.model",
    "Loss": "kinds.loss",
    "LossOutput": "kinds.loss",
    "LossTokens": "kinds.loss",
    "MODEL_INPUTS": "kinds.collator",
    "MODEL_SCORES": "kinds.loss",
    "Merger": "kinds.merger",
    "Metric": "values.outputs",
    "MicroBatch": "kinds.backend",
    "MicroBatchPlan": "values.plan",
    "MiniBatchPlan": "values.plan",
    "ModelConfig": "values.model",
    "OF_IMAGES": "values.extras",
    "Objective": "kinds.backend",
    "OptimStep": "kinds.backend",
    "AdamWSettings": "kinds.backend",
    "PADDING_SAMPLE": "values.outputs",
    "PARALLEL_SIZES": "kinds.backend",
    "PIXEL_VALUES": "values.extras",
    "PerSequence": "kinds.reducer",
    "ROUTER_PADDING_MASK": "kinds.collator",
    "Ragged": "values.ragged",
    "RaggedView": "values.ragged",
    "RankBatch": "kinds.backend",
    "RankCoords": "values.topology",
    "RankEnvironment": "kinds.backend",
    "RankOutput": "values.outputs",
    "Reducer": "kinds.reducer",
    "Reduction": "values.outputs",
    "SampleColumns": "values.columns",
    "SampleLengths": "values.plan",
    "Sequences": "kinds.loss",
    "SessionFinished": "kinds.observer",
    "SessionStarted": "kinds.observer",
    "StepCounts": "kinds.backend",
    "StepFinished": "kinds.observer",
    "TOKEN_TYPES": "values.extras",
    "Topology": "values.topology",
    "as_loss_output": "kinds.loss",
    "carried_by": "kinds.collator",
    "collate": "kinds.collator",
    "combine_metrics": "values.outputs",
    "inseparable": "values.bundles",
    "offsets_of": "values.ragged",
    "one_sample_per_row": "values.plan",
    "results_of": "values.outputs",
    "segment_indices": "values.ragged",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
