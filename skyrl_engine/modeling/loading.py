"""Load a Hugging Face causal or vision-language model for training, with errors that name the model and its fault."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from skyrl_engine.contracts.values.model import ComputeDtype, EmptyModelConfig, ModelConfig
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.model_facts.configuration import load_config, source_of
from skyrl_engine.model_facts.vision_language import takes_images
from skyrl_engine.model_facts.weight_files import holder_of, weight_files
from skyrl_engine.modeling.causal_lm import output_names, split_causal_lm, transformer_layers
from skyrl_engine.modeling.compiling import compile_layers
from skyrl_engine.modeling.dropout import switch_off_modules
from skyrl_engine.modeling.freezing import freeze_parameters
from skyrl_engine.modeling.layer_kinds import shorten_to_kinds
from skyrl_engine.modeling.lora import add_adapters, freeze_in, load_adapters
from skyrl_engine.modeling.matmul_precision import keep_angles_exact
from skyrl_engine.modeling.named_tensors import keeps_loose_tensors
from skyrl_engine.modeling.parity import check_parity
from skyrl_engine.modeling.precision import compute_buffers_in, computing_in
from skyrl_engine.modeling.rotary_frequencies import check_fixed, fix_rotary_frequencies
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.segment_adoption import adopt_segment_attention, attend_by_segments
from skyrl_engine.modeling.segments import SegmentSupport
from skyrl_engine.modeling.shared_weights import on_the_cpu_without_memory
from skyrl_engine.modeling.stored_weights import WeightsInFiles, find_stored_weights, list_places, why_not_in_parts
from skyrl_engine.modeling.unpickling import TO_SAFETENSORS, UNREADABLE, failure, is_refused, refuse_code
from skyrl_engine.modeling.value_head import NAME as VALUE_HEAD
from skyrl_engine.modeling.value_head import ValueHead, add_value_head, has_bias, load_value_head
from skyrl_engine.modeling.vision import language_part

logger = logging.getLogger(__name__)


def weight_dtype(compute: ComputeDtype) -> torch.dtype:
    """Return the dtype of weights and optimizer state: float64 for float64, float32 for every other compute precision."""
    return torch.float64 if compute == "float64" else torch.float32


def failed_pass_error(model: Any, path: str, error: RuntimeError) -> ModelError:
    """Return the error for a model whose own forward pass fails."""
    return ModelError(
        f"the forward pass of {path} ({type(model).__name__}) fails: {_first_line(error)}",
        remedy="Check that the numbers in its config.json fit each other, or copy it again from the model's source",
    )


def load_scorer(spec: ModelConfig, *, images: bool = False, seed: int = 0) -> tuple[Any, Scorer]:
    """Load the whole model on the CPU, in training mode, with a scorer over its modules that is checked against the model's forward.

    The model attends by segments if it can (`scorer.segment_support`). With `images`, the caller passes images to vision-language models, in
    the form of `scorer.images`. `seed` draws new adapters. All weights of an `EmptyModelConfig` are drawn. Raises ModelError, and
    UnsupportedError for a vision-language model without `images`.
    """
    model = load_causal_lm(spec, images=images)
    scorer = _scorer(spec, model, seed)
    if not isinstance(spec, EmptyModelConfig):
        _fill_trained(spec, model, scorer)
    scorer.segment_support = _check(spec, model, scorer)
    return _make_ready(spec, model, scorer)


def _check(spec: ModelConfig, model: Any, scorer: Scorer) -> SegmentSupport:
    """Check a model with values, let it attend by segments if it can, and return what was found about that."""
    if scorer.rotary_length is not None:
        check_fixed(model, scorer.rotary_length)
    try:
        check_parity(model, scorer, name=spec.path)
    except RuntimeError as error:
        raise failed_pass_error(model, spec.path, error) from error
    if spec.dtype == "bfloat16":
        _check_bfloat16(model, scorer, spec.path)
    support = adopt_segment_attention(model, scorer.decoder, name=spec.path, kernel=spec.attention)
    refuse_own_attention(spec, None if support.layers else support.refusal)
    return support


def load_without_weights(spec: ModelConfig, *, images: bool = False, seed: int = 0) -> tuple[Any, Scorer, WeightsInFiles] | str:
    """Make model and scorer as `load_scorer` does, but with what the files hold on the meta device, and find where it lies in them.

    Buffers that no file holds, adapters and a value head have their values. Of the checks of `load_scorer`, `check_first_layers` makes
    those that need weights. Returns a clause where parts of the files cannot be read alone. Raises ModelError.
    """
    config = load_config(spec, images=images)
    if (reason := why_not_in_parts(spec, config)) is not None:
        return reason
    places = list_places(spec)
    model = load_causal_lm(spec, images=images, tensors=places)
    if keeps_loose_tensors(model):
        return "it keeps tensors that are neither parameters nor buffers"
    stored = find_stored_weights(model, places)
    if isinstance(stored, str):
        return stored
    with on_the_cpu_without_memory(model):
        scorer = _scorer(spec, model, seed)
        _fill_trained(spec, model, scorer)
    return *_make_ready(spec, model, scorer), stored


def check_first_layers(spec: ModelConfig, decoder: Any, stored: WeightsInFiles, *, images: bool = False) -> SegmentSupport:
    """Check the first layers of a model without values, as many as show every kind of its layers, with their weights, and the head.

    Returns what was found about packed rows, for the whole model. Raises what `load_scorer` raises.
    """
    plain = evolve(spec, lora=None, freeze=())
    config, skeleton = shorten_to_kinds(load_config(spec, images=images), partial(_build_without_values, plain))
    first = load_causal_lm(plain, images=images, tensors=stored.read_sources(skeleton.state_dict()), config=config)
    with torch.random.fork_rng(devices=()):
        scorer = _scorer(plain, first, 0)
    _fill_trained(plain, first, scorer)
    support = _check(plain, first, scorer)
    return evolve(support, layers=len(transformer_layers(language_part(decoder)))) if support.layers else support


def load_skeleton(spec: ModelConfig, *, images: bool = False, seed: int = 0) -> tuple[Any, Scorer]:
    """Make model and scorer without values: parameters and buffers are on the meta device, for a backend to fill from another rank.

    Raises ModelError for a configuration that cannot be used. The check against the model's own forward is left to the rank with values.
    """
    config = load_config(spec, images=images)
    model = _build_without_values(spec, config)
    return _make_ready(spec, model, _scorer(spec, model, seed))


def load_beside(spec: ModelConfig, support: SegmentSupport, *, images: bool = False, seed: int = 0) -> tuple[Any, Scorer]:
    """Make model and scorer of which only what is trained has values, on the CPU, those that `load_scorer` gives it; adapters are asked for.

    All else is on the meta device, for `shared_weights.share_weights` to fill from a model that is loaded, and was checked then; `support` is
    what was found about it. Raises ModelError, and UnsupportedError for new adapters of DoRA, which start at the
    norms of weights that are not here.
    """
    if spec.lora is not None and spec.lora.dora and spec.lora.path is None:
        raise UnsupportedError(
            "new adapters of DoRA start at the norms of the base weights, which a further set of adapters only shares",
            remedy="Start the set from saved adapters (path), or leave dora out",
        )
    if spec.lora is not None and spec.lora.load_in_4bit:
        raise UnsupportedError(
            "several sets of adapters share one model, and model.lora.load_in_4bit holds it in 4 bits, which is not supported",
            remedy="Remove model.lora.load_in_4bit, or train one set of adapters",
        )
    config = load_config(spec, images=images)
    model = _build_without_values(spec, config)
    with on_the_cpu_without_memory(model):
        scorer = _scorer(spec, model, seed)
        _fill_trained(spec, model, scorer)
    adopt_like(model, scorer, support)
    return _make_ready(spec, model, scorer)


def refuse_own_attention(spec: ModelConfig, refusal: str | None) -> None:
    """Raises UnsupportedError for a chosen kernel where the model cannot attend by it, for the reason `refusal` (None: it can)."""
    if spec.attention != "auto" and refusal is not None:
        raise UnsupportedError(
            f'model.attention = "{spec.attention}", and {spec.path} keeps its own attention: {refusal}',
            remedy='Set model.attention = "auto"',
        )


def adopt_like(model: Any, scorer: Scorer, support: SegmentSupport) -> None:
    """Make a skeleton attend as the model with values does, for which loading found `support`."""
    if support.layers:
        attend_by_segments(model, scorer.decoder, support.kernel)
    scorer.segment_support = support


def _scorer(spec: ModelConfig, model: Any, seed: int) -> Scorer:
    """Return the scorer over the model's modules, after adding adapters and a value head to the model if asked for."""
    parts = split_causal_lm(model)
    if spec.lora is not None:
        add_adapters(model, language_part(parts.decoder), spec, seed)
    value_head: ValueHead | None = None
    if spec.value_head:
        value_head = add_value_head(model, parts.head.in_features, name=spec.path, bias=has_bias(spec))
    scorer = Scorer(parts, logits_per_chunk=spec.logits_per_chunk, value_head=value_head)
    freeze_parameters(model, scorer, spec.freeze)
    scorer.rotary_length = fix_rotary_frequencies(model, spec.rotary_length)
    keep_angles_exact(model)
    if spec.dtype == "bfloat16":
        compute_buffers_in(model, torch.bfloat16)
    return scorer


def _fill_trained(spec: ModelConfig, model: Any, scorer: Scorer) -> None:
    """Read a value head, and the adapters that training starts from, where there are some. Raises ModelError."""
    if scorer.value_head is not None and not load_value_head(scorer.value_head, spec, source_of(spec)):
        logger.info("%s holds no value head; it starts at zero", spec.path)
    if spec.lora is not None and spec.lora.path is not None:
        load_adapters(model, spec)


def _check_bfloat16(model: Any, scorer: Scorer, name: str) -> None:
    """Score a few tokens as ranks compute them. Raises ModelError if its code cannot, or computes another function there."""
    with computing_in(scorer, torch.bfloat16):
        try:
            check_parity(model, scorer, name=name)
        except RuntimeError as error:
            raise ModelError(
                f"{name} ({type(model).__name__}) cannot be computed in bfloat16: {_first_line(error)}",
                remedy="Set model.dtype to float32, or use another model",
            ) from error


def _make_ready(spec: ModelConfig, model: Any, scorer: Scorer) -> tuple[Any, Scorer]:
    if spec.dropout == "off":
        switch_off_modules(model)
    if (spec.lora is not None or spec.freeze) and spec.dtype == "bfloat16":
        freeze_in(model, torch.bfloat16)
    if spec.activation_checkpointing:
        enable_activation_checkpointing(model, spec.path)
    if spec.compile:
        compile_layers(model, scorer.decoder, spec.path)
    scorer.train()
    return model, scorer


def _experts(spec: ModelConfig) -> dict[str, str]:
    """Return the arguments that float64 needs: torch's grouped matrix product, the default for mixtures of experts, lacks it."""
    return {"experts_implementation": "eager"} if spec.dtype == "float64" else {}


def load_causal_lm(spec: ModelConfig, *, images: bool = False, tensors: Mapping[str, Any] | None = None, config: Any = None) -> Any:
    """Load a `transformers.PreTrainedModel` on the CPU in `weight_dtype`; `images` as for `load_config`.

    That of an `EmptyModelConfig` is made without reading weights. `tensors` stand in the place of those of the model's files, and `config`
    in the place of its configuration.

    Raises ModelError if it is not a complete causal or vision-language model, and UnsupportedError as `load_config` does.
    """
    config = load_config(spec, images=images) if config is None else config
    if isinstance(spec, EmptyModelConfig):
        return _make_empty_model(spec, config)
    files = weight_files(spec)
    refuse_code(files)
    options: dict[str, Any] = {
        "config": config,
        "dtype": weight_dtype(spec.dtype),
        "output_loading_info": True,
        # its own refusal of other shapes names none; ours follows
        "ignore_mismatched_sizes": True,
        **_experts(spec),
    }
    try:
        with quiet_progress():
            if tensors is None:
                model, report = _auto_class(config).from_pretrained(
                    source_of(spec), revision=spec.revision, trust_remote_code=spec.trust_remote_code, **options
                )
            else:
                model, report = _class_of(spec, config).from_pretrained(None, state_dict=dict(tensors), **options)
                _read_generation_config(model, source_of(spec))
    except (*UNREADABLE, ImportError) as error:
        raise ModelError(
            f"the weights of {files[0] if len(files) == 1 else spec.path} cannot be loaded: {failure(error)}",
            remedy=TO_SAFETENSORS if is_refused(error) else "Check that the directory or hub id holds a complete model",
        ) from error
    _in_weight_dtype(model, spec)
    refuse_other_shapes(spec, files, report["mismatched_keys"])
    # a classifier's files hold no language-model head, and its values do without
    missing = sorted(set(report["missing_keys"]) - (output_names(model) if spec.classifier else set()))
    if missing:
        raise ModelError(
            f"{spec.path} lacks {len(missing)} of its weights, {missing[0]} first",
            remedy="Use a complete checkpoint; missing weights would start from random values",
        )
    unused = [key for key in report["unexpected_keys"] if not (spec.value_head and key.rpartition(".")[0] == VALUE_HEAD)]
    if unused:
        logger.warning("%s holds %d weights that %s does not use; exports keep them", spec.path, len(unused), type(model).__name__)
    return model


def refuse_other_shapes(
    spec: ModelConfig, files: list[Path], mismatches: Iterable[tuple[str, Iterable[int], Iterable[int]]]
) -> None:
    """Raise ModelError for tensors (name, shape in the file, shape by the configuration) that do not fit the configuration."""
    wrong = sorted((name, list(stored), list(expected)) for name, stored, expected in mismatches)
    if not wrong:
        return
    name, stored, expected = wrong[0]
    more = f" ({len(wrong)} tensors of other shapes in all)" if len(wrong) > 1 else ""
    raise ModelError(
        f"{name} has the shape {stored} in {holder_of(files, name) or spec.path}, and the model's config.json asks for {expected}{more}",
        remedy="Put the config.json and the weights of one and the same model together",
    )


def _make_empty_model(spec: EmptyModelConfig, config: Any) -> Any:
    """Make the model with the weights that its class draws, leaving random states unchanged."""
    with torch.random.fork_rng(devices=()):
        model = build_causal_lm(spec, config)
    _read_generation_config(model, spec.configuration)
    return model


def _read_generation_config(model: Any, directory: str) -> None:
    import transformers

    if (Path(directory) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)


def _class_of(spec: ModelConfig, config: Any) -> Any:
    """Return the class that the configuration names, of transformers or of the model's own code."""
    return type(_build_without_values(spec, copy.deepcopy(config)))


def _build_without_values(spec: ModelConfig, config: Any) -> Any:
    with torch.device("meta"):
        return build_causal_lm(spec, config)


def build_causal_lm(spec: ModelConfig, config: Any) -> Any:
    """Make the model by its class. Raises ModelError for a configuration that the class cannot be made from."""
    try:
        model = _auto_class(config).from_config(
            config, trust_remote_code=spec.trust_remote_code, dtype=weight_dtype(spec.dtype), **_experts(spec)
        )
    except Exception as error:
        raise ModelError(
            f"the {config.model_type} model of {spec.path} cannot be built from its config.json: {type(error).__name__}: {_first_line(error)}",
            remedy="Correct that number or name in config.json, or copy it again from the model's source",
        ) from error
    return _in_weight_dtype(model, spec)


def _in_weight_dtype(model: Any, spec: ModelConfig) -> Any:
    """Cast the parameters that modelling code makes in a dtype of its own, and return the model."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(weight_dtype(spec.dtype))
    return model


def enable_activation_checkpointing(model: Any, name: str) -> None:
    """Recompute each layer's activations in backward. Raises ModelError if the model's class does not support it."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"{name} ({type(model).__name__}) does not support activation checkpointing",
            remedy="Set model.activation_checkpointing = false",
        )
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        # transformers before 5.23 have the older name only
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _auto_class(config: Any) -> Any:
    import transformers

    return transformers.AutoModelForImageTextToText if takes_images(config) else transformers.AutoModelForCausalLM


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).strip().rstrip(".")


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Hide transformers' progress bars, one per rank, inside this context."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
