"""Refuse while planning what loading a model would refuse, as far as its configuration and the headers of its files tell."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from skyrl_engine.contracts.values.model import EmptyModelConfig, ModelConfig
from skyrl_engine.model_facts.weight_files import refuse_broken_adapter, safetensors_header, weight_files
from skyrl_engine.modeling.loading import load_skeleton, refuse_other_shapes
from skyrl_engine.modeling.segment_adoption import certain_refusal
from skyrl_engine.modeling.segments import SegmentSupport
from skyrl_engine.modeling.unpickling import refuse_code
from skyrl_engine.modeling.value_head import NAME as VALUE_HEAD


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
    if isinstance(spec, EmptyModelConfig):
        return
    if spec.lora is not None and spec.lora.path is not None:
        refuse_broken_adapter(spec.lora.path)
    files = weight_files(spec)
    refuse_code(files)
    refuse_other_shapes(spec, files, _other_shapes(model, files))


def _other_shapes(model: Any, files: list[Path]) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield name, shape in the file and shape in the model of tensors that files and model name alike.

    Where transformers makes one tensor of several as it reads them, names do not tell, and nothing is compared.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    if not all(isinstance(rule, WeightRenaming) for rule in get_model_conversion_mapping(model)):
        return
    due = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for file in files:
        if file.suffix == ".safetensors":
            for name, entry in safetensors_header(file).items():
                # a value head says in words of its own what it must be
                if name in due and name.rpartition(".")[0] != VALUE_HEAD and entry["shape"] != due[name]:
                    yield name, entry["shape"], due[name]
