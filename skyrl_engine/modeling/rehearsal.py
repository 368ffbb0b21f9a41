"""Refuse while planning what loading a model would refuse, as far as its configuration and the headers of its files tell."""

import torch

from skyrl_engine.contracts.values.model import EmptyModelConfig, ModelConfig
from skyrl_engine.model_facts.weight_files import weight_files
from skyrl_engine.modeling.loading import load_skeleton
from skyrl_engine.modeling.segment_adoption import certain_refusal
from skyrl_engine.modeling.segments import SegmentSupport
from skyrl_engine.modeling.unpickling import refuse_code


def rehearse(spec: ModelConfig, packed_rows: bool, *, images: bool = False) -> None:
    """Build the model without values as a rank does, with its adapters and value head, and look at the files of its weights.

    This is `BackendDescription.rehearse` of backends that load by `load_scorer`; `images` as there. With `packed_rows` the model must be able
    to keep the documents of a row apart, as far as its code shows without values. Random states are left unchanged. Raises ModelError and
    UnsupportedError.
    """
    with torch.random.fork_rng(devices=()):
        model, scorer = load_skeleton(spec, images=images)
        if packed_rows and (refusal := certain_refusal(model, scorer.decoder)) is not None:
            scorer.segment_support = SegmentSupport(refusal=refusal)
            scorer.refuse_packed_rows_unless_supported()
    if not isinstance(spec, EmptyModelConfig):
        refuse_code(weight_files(spec))
