"""Refuse while planning what loading a model would refuse, as far as its configuration and the headers of its files tell."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve

from skyrl_engine.contracts.values.model import EmptyModelConfig, ModelConfig
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.weight_files import refuse_broken_adapter, safetensors_header, weight_files
from skyrl_engine.modeling.attention_kernel import refuse_rows_of_kernel
from skyrl_engine.modeling.causal_lm import split_causal_lm
from skyrl_engine.modeling.compiling import refuse_incompilable
from skyrl_engine.modeling.dropout import refuse_dropout
from skyrl_engine.modeling.embedding_noise import refuse_noise
from skyrl_engine.modeling.four_bit import check_four_bit_settings
from skyrl_engine.modeling.layer_kinds import shorten
from skyrl_engine.modeling.loading import build_causal_lm, load_skeleton, refuse_other_shapes, refuse_own_attention
from skyrl_engine.modeling.segment_adoption import adopt_segment_attention, certain_refusal
from skyrl_engine.modeling.segments import SegmentSupport
from skyrl_engine.modeling.unpickling import refuse_code
from skyrl_engine.modeling.unused_weights import describe_tensors, find_unused_tensors, source_tensors
from skyrl_engine.modeling.value_head import NAME as VALUE_HEAD

logger = logging.getLogger(__name__)

_FEW_TOKENS: Final = 1024
_MOST_PARAMETERS: Final = 500_000_000
"""Parameters of a layer that is made with values, 2 GB; of larger ones, loading tells."""


def check_loading(spec: ModelConfig, rows: RowKind, *, images: bool = False, divided_by: str | None = None) -> None:
    """Build the model without values as a rank does, with its adapters and value head, and look at the files of its weights.

    This is `BackendDescription.rehearse` of backends that load by `load_scorer`; `images` as there. Of `rows` that hold several samples the
    model must be able to keep these apart, as far as its code shows without values; for shared prefixes it may drop nothing at random. Where
    ranks divide samples by the option `divided_by` ("backend.a = 2"), it must follow segments too. Random states are left unchanged. Raises
    ModelError and UnsupportedError.
    """
    refuse_rows_of_kernel(spec, rows)
    check_four_bit_settings(spec)
    with torch.random.fork_rng(devices=()):
        # programs of a model without values would be thrown away
        model, scorer = load_skeleton(evolve(spec, compile=False), images=images)
        if spec.compile:
            refuse_incompilable(model, scorer.decoder, spec.path)
        if rows == "tree":
            refuse_dropout(model)
            refuse_noise(spec)
        if rows != "padded" or spec.attention != "auto" or divided_by is not None:
            refusal = _find_refusal_of_packed_rows(spec, model, scorer.decoder)
            refuse_own_attention(spec, refusal)
            if refusal is not None:
                scorer.segment_support = SegmentSupport(refusal=refusal)
                scorer.refuse_rows_unless_supported(rows)
                if divided_by is not None:
                    scorer.refuse_divided_rows(divided_by)
    if isinstance(spec, EmptyModelConfig):
        return
    if spec.lora is not None and spec.lora.path is not None:
        refuse_broken_adapter(spec.lora.path)
    files = weight_files(spec)
    refuse_code(files)
    refuse_other_shapes(spec, files, _other_shapes(model, files))
    _tell_unused(spec, model)


_REFUSALS: Final[dict[tuple[str, str], str | None]] = {}
"""Findings of this process about the code of models, by the model's keys and configuration."""


def _find_refusal_of_packed_rows(spec: ModelConfig, model: Any, decoder: Any) -> str | None:
    """Return why the model cannot keep the samples of a row apart, as a clause; None where nothing says so before it is loaded.

    The answer depends on configuration and code alone, and a process that plans several runs, or tries several forms of rows, asks more than
    once. Code that comes with the model's files may have changed between two calls, so it is asked again.
    """
    if spec.trust_remote_code:
        return certain_refusal(model, decoder) or _refusal_of_first_layer(spec)
    key = (repr(spec), model.config.to_json_string())
    if key not in _REFUSALS:
        _REFUSALS[key] = certain_refusal(model, decoder) or _refusal_of_first_layer(spec)
    return _REFUSALS[key]


def _tell_unused(spec: ModelConfig, model: Any) -> None:
    """Say which tensors of the files training does not use, and that exports keep them."""
    own = {name.replace(".base_layer.", ".") for name in model.state_dict()}
    if others := source_tensors(spec).keys() - own:
        with torch.random.fork_rng(devices=()):
            unused = find_unused_tensors(spec, others)
        if unused:
            logger.info(
                "%s holds %d tensors that training does not use, and exports of whole models copy them from there: %s",
                spec.path,
                len(unused),
                describe_tensors(unused),
            )


def _refusal_of_first_layer(spec: ModelConfig) -> str | None:
    """Return why the model's first layer mixes the documents of a packed row, as a clause; None where it does not, or cannot be tried.

    A layer may mix tokens by more than its attention, such as a state-space model next to it, which no pass without values shows. So the layer
    is made with random values, of a model of that one layer and few tokens. Whatever cannot be made so is left to loading.
    """
    try:
        config = load_config(spec)
        shorten(config, 1)
        text = config.get_text_config(decoder=True)
        text.vocab_size = min(text.vocab_size, _FEW_TOKENS)
        text.pad_token_id = text.bos_token_id = text.eos_token_id = None
        plain = evolve(spec, lora=None, value_head=False, classifier=False, dtype="float32")
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in build_causal_lm(plain, config).parameters())
        if size > _MOST_PARAMETERS:
            return None
        model = build_causal_lm(plain, config)
        support = adopt_segment_attention(model, split_causal_lm(model).decoder, name=f"the first layer of {spec.path}")
    except Exception as error:  # noqa: BLE001 - model code of any kind, of a model that nobody trains
        logger.info("the first layer of %s was not tried on packed rows: %s", spec.path, error)
        return None
    return support.refusal if support.mixes else None


def _other_shapes(model: Any, files: list[Path]) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield name, shape in the file and shape in the model of tensors that files and model name alike.

    Where transformers makes one tensor of several as it reads them, names do not tell, and nothing is compared.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    if not all(isinstance(rule, WeightRenaming) for rule in get_model_conversion_mapping(model)):
        return
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for file in files:
        if file.suffix == ".safetensors":
            for name, entry in safetensors_header(file).items():
                # a value head says in words of its own what it must be
                if name in shapes and name.rpartition(".")[0] != VALUE_HEAD and entry["shape"] != shapes[name]:
                    yield name, entry["shape"], shapes[name]
