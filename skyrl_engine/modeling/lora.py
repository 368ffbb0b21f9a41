"""Low-rank adapters through PEFT: chosen linear layers compute with W + s B A; A and B are trained, all else is frozen.

The scale s is alpha / rank (Hu et al. 2021, arXiv 2106.09685, section 4.1), or alpha / sqrt(rank) of rsLoRA. A is drawn, B is zero: training
starts at the base model. With DoRA (Liu et al. 2024, arXiv 2402.09353, eq. 5) a layer computes with m (W + s B A) / |W + s B A|, a norm and a
trained number m per output; m starts as |W|, and no gradient goes through the norm (section 4.3).
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.model_facts.json_file import read_object
from skyrl_engine.modeling.four_bit import FourBitLinear, list_four_bit_layers, quantize_layers
from skyrl_engine.modeling.low_bits import hush_advice
from skyrl_engine.modeling.unpickling import UNREADABLE, failure
from skyrl_engine.modeling.value_head import NAME as VALUE_HEAD

logger = logging.getLogger(__name__)

ADAPTER: Final = "default"
"""PEFT's name for an adapter without a name; its files leave it out."""

_PREFIX: Final = "base_model.model."
"""The prefix of every name in PEFT's files: the model's place inside `PeftModel`."""

_WITHOUT_EFFECT: Final = frozenset(
    {"peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
    | {"megatron_core", "runtime_config"}
)
_PLAIN: Final = _WITHOUT_EFFECT | {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "use_dora"),
}
"""Settings of an existing adapter that may have any value. Any other setting must have PEFT's default, or the adapter is something else."""

_MAGNITUDE: Final = ".lora_magnitude_vector."


def add_adapters(model: Any, decoder: nn.Module, spec: ModelConfig, seed: int) -> None:
    """Add adapters to linear layers of `decoder`, a part of `model`, in place, and freeze everything else; in 4 bits where `spec.lora` says so.

    Their values depend on `seed` alone and leave random states unchanged; on the meta device they have none. Raises ModelError for
    targets that do not exist and for an existing adapter that cannot be used, UnsupportedError without PEFT and as `quantize_layers` does.
    """
    assert spec.lora is not None
    peft = _peft()
    if spec.lora.load_in_4bit:
        quantize_layers(model, decoder, spec)
    inside = {id(module) for module in decoder.modules()}
    linear: dict[str, Any] = {name: module for name, module in model.named_modules() if id(module) in inside and _is_linear(module)}
    config = (
        _make_peft_config(spec, spec.lora, model, linear, peft)
        if spec.lora.path is None
        else _load_options(spec, spec.lora, spec.lora.path, model, linear, peft)
    )
    if config.use_dora and spec.dtype == "bfloat16":
        # magnitudes start as the norms of the weights that are computed with; layers in 4 bits give those
        for module in (module for module in linear.values() if not isinstance(module, FourBitLinear)):
            module.weight.data = module.weight.data.to(torch.bfloat16).to(module.weight.dtype)
    with torch.random.fork_rng(devices=()), next(model.parameters()).device:
        torch.default_generator.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model, ADAPTER)
        except ValueError as error:
            raise _unfit_error(spec, spec.lora, linear, error) from error
    model.requires_grad_(requires_grad=False)
    for name, parameter in model.named_parameters():
        layer = name.partition(".lora_")[0]
        if layer != name:
            if layer not in linear:
                raise ModelError(
                    f"the adapter {spec.lora.path} changes {layer}, which is no linear layer of the decoder",
                    remedy="Use an adapter of the decoder's linear layers alone",
                )
            parameter.requires_grad_()
    counts = [
        sum(parameter.numel() for parameter in parameters)
        for parameters in (list_trained_parameters(model).values(), model.parameters())
    ]
    logger.info("%s: %d of %d parameters are trained, as adapters of rank %d", spec.path, *counts, config.r)
    logger.info("%s: adapted are %s", spec.path, describe_adapters(decoder))
    if spec.lora.path is None and spec.lora.targets == "all-linear" and (left := _count_unadapted(decoder)):
        why = "they are no linear layers, or have names that PEFT takes for the experts'"
        logger.warning('%s: model.lora.targets = "all-linear" leaves frozen %s: %s', spec.path, _counts(left), why)


def _unfit_error(spec: ModelConfig, lora: LoraConfig, linear: Mapping[str, Any], error: ValueError) -> ModelError:
    """Return the error for adapters that PEFT does not put into the model."""
    if lora.path is not None:
        return ModelError(
            f"the adapter {lora.path} does not fit {spec.path}: {_first_line(error)}",
            remedy="Use the adapter with the model it was made for",
        )
    names = sorted({name.rpartition(".")[2] for name in linear})
    return ModelError(
        f"PEFT refuses adapters in {spec.path}: {_first_line(error)}",
        remedy=f"Name others of its linear layers in model.lora.targets; they are called {', '.join(names)}",
    )


def describe_adapters(decoder: nn.Module) -> str:
    """Count by name a decoder's matrices with adapters and those without: `q_proj (2); frozen stay experts.down_proj (2)`."""
    names = (name for name, _ in decoder.named_parameters())
    adapted = Counter(name.partition(".lora_A.")[0].rpartition(".")[2] for name in names if ".lora_A." in name)
    return f"{_counts(adapted)}; frozen stay {_counts(_count_unadapted(decoder))}"


def has_adapters(model: nn.Module) -> bool:
    """Return True if `add_adapters` has changed this model."""
    return ADAPTER in getattr(model, "peft_config", {})


def freeze_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Round frozen weights to the compute precision, which loses no updates because there are none."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def load_adapters(model: nn.Module, spec: ModelConfig) -> None:
    """Fill adapters, and a value head that was trained with them, from the files at `spec.lora.path`. Raises ModelError."""
    assert spec.lora is not None
    assert spec.lora.path is not None
    stored: dict[str, Tensor] = dict(_read(spec.lora.path, lambda source: _peft().utils.load_peft_weights(source, device="cpu")))
    for name, parameter in model.named_parameters():
        value = stored.pop(_to_peft_name(name), None) if parameter.requires_grad else None
        if value is not None and value.shape == parameter.shape:
            parameter.copy_(value)
        elif value is not None or has_adapter_name(name):
            content = "nothing" if value is None else f"shape {list(value.shape)}"
            raise ModelError(
                f"the adapter {spec.lora.path} holds {content} for {name}, which has shape {list(parameter.shape)}",
                remedy="Use the adapter with the model it was made for",
            )
    if stored:
        raise ModelError(
            f"the adapter {spec.lora.path} holds {min(stored)}, which {spec.path} has no place for ({len(stored)} such tensors)",
            remedy="Set model.value_head = true"
            if all(VALUE_HEAD in name for name in stored)
            else "Use it with the model it was made for",
        )


def has_adapter_name(name: str) -> bool:
    """Return True if a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name or _MAGNITUDE in name


def list_trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name: adapters, and the value head if there is one."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let every adapted layer compute as its base layer does, until the context is left. Trained parameters stay trained."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        # enable_adapters(False) would freeze the adapters' parameters too, which sharding and optimizer rely on
        layer._disable_adapters = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001


def write_adapters(model: Any, directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Write `weights`, the whole values of trained parameters, in the form that `PeftModel.from_pretrained` reads.

    A value head becomes one of PEFT's `modules_to_save`; the base model is then loaded for token classification.
    """
    from safetensors.torch import save_file

    config = copy.copy(model.peft_config[ADAPTER])
    config.inference_mode = True
    if not isinstance(config.target_modules, str):
        # a set has another order in every process
        config.target_modules = sorted(config.target_modules)
    if any(not has_adapter_name(name) for name in weights):
        config.task_type, config.modules_to_save = "TOKEN_CLS", [VALUE_HEAD]
    config.save_pretrained(directory)
    tensors = {_to_peft_name(name): weight.detach().contiguous() for name, weight in weights.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def iterate_merged_weights(model: nn.Module, whole: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by its name in the base model, with its adapter merged, as layers compute with it. `whole` gathers a parameter.

    Values have the adapters' precision; without adapters they are as `whole` returns them.
    """
    if not has_adapters(model):
        yield from ((name, whole(parameter)) for name, parameter in model.named_parameters())
        return
    precision = next(iter(list_trained_parameters(model).values())).dtype
    for name, parameter in model.named_parameters():
        if has_adapter_name(name):
            continue
        value = whole(parameter).to(precision)
        owner, base, kind = name.rpartition(".base_layer.")
        if base and kind == "weight":
            value = _merge(model.get_submodule(owner), value, whole)
        yield f"{owner}.{kind}" if base else name, value
    for name, layer in list_four_bit_layers(model):
        value = layer.dequantize().cpu().to(precision)
        owner = name.removesuffix(".base_layer")
        yield f"{owner}.weight", value if owner == name else _merge(model.get_submodule(owner), value, whole)


def _merge(layer: Any, weight: Tensor, whole: Callable[[nn.Parameter], Tensor]) -> Tensor:
    """Return the weight that an adapted layer computes with, in the form of its base weight: [in, out] in transposed layers."""
    rows: Tensor = weight.T if layer.fan_in_fan_out else weight
    rows = rows + layer.scaling[ADAPTER] * (whole(layer.lora_B[ADAPTER].weight) @ whole(layer.lora_A[ADAPTER].weight))
    if ADAPTER in layer.lora_magnitude_vector:
        magnitude = whole(layer.lora_magnitude_vector[ADAPTER].weight)
        rows = (magnitude / torch.linalg.norm(rows, dim=1))[:, None] * rows
    return rows.T if layer.fan_in_fan_out else rows


def _count_unadapted(decoder: nn.Module) -> Counter[str]:
    """Count the decoder's matrices without an adapter, by the last names of their paths; embeddings do not count."""
    embeddings = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
    left: Counter[str] = Counter()
    for name, parameter in decoder.named_parameters():
        if parameter.dim() > 1 and id(parameter) not in embeddings and ".lora_" not in name and ".base_layer." not in name:
            left[".".join(name.removesuffix(".weight").split(".")[-2:])] += 1
    for name, _ in list_four_bit_layers(decoder):
        if not name.endswith(".base_layer"):
            left[".".join(name.split(".")[-2:])] += 1
    return left


def _counts(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(names.items())) or "none"


def _make_peft_config(spec: ModelConfig, lora: LoraConfig, model: nn.Module, linear: Mapping[str, nn.Module], peft: Any) -> Any:
    """Return PEFT's configuration of new adapters.

    Raises ModelError for targets that no linear layer matches, and for targets that PEFT takes for something else in this architecture.
    """
    names = sorted({name.rpartition(".")[2] for name in linear})
    targets = names
    if lora.targets != "all-linear":
        assert lora.targets is not None, "new adapters have targets"
        targets = list(lora.targets)
        unknown = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in linear)]
        if unknown:
            raise ModelError(
                f"model.lora.targets names {', '.join(map(repr, unknown))}, which no linear layer of {spec.path}'s decoder is called",
                remedy=f'Choose among {", ".join(names)}, or write model.lora.targets = "all-linear"',
            )
    # names that layers of a vision tower have too, as Qwen2.5-VL's
    elsewhere = [
        name
        for name, module in model.named_modules()
        if name not in linear and _is_linear(module) and any(f".{name}".endswith(f".{target}") for target in targets)
    ]
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=targets,
        exclude_modules=elsewhere or None,
        fan_in_fan_out=any(not isinstance(module, nn.Linear) for module in linear.values()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=spec.path,
        revision=spec.revision,
    )
    moved = [target for target in targets if not _keeps(config, target, model)]
    if lora.targets == "all-linear":
        config.target_modules = set(targets) - set(moved)
    elif moved:
        rest = ", ".join(name for name in names if _keeps(config, name, model))
        raise ModelError(
            f"model.lora.targets names {', '.join(map(repr, moved))}, which PEFT takes for the experts of {spec.path}, and the engine does not "
            "adapt experts",
            remedy=f'Choose among {rest}, or write model.lora.targets = "all-linear"',
        )
    return config


def _keeps(config: Any, target: str, model: nn.Module) -> bool:
    """Return whether PEFT takes `target` for linear layers of this model.

    In architectures whose experts became one tensor with transformers 5, PEFT reads `gate_proj`, `up_proj` and `down_proj` as the experts',
    in an adapter's file too: dense layers and shared experts of these names cannot be adapted.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    probe = copy.deepcopy(config)
    # All of a fused tensor's names together, as PEFT refuses one alone.
    probe.target_modules = set(config.target_modules) | {target, "gate_proj", "up_proj", "w1", "w3"}
    convert_peft_config_for_transformers(probe, model, None)
    return target in probe.target_modules


def _load_options(
    spec: ModelConfig, lora: LoraConfig, path: str, model: nn.Module, linear: Mapping[str, nn.Module], peft: Any
) -> Any:
    """Return PEFT's configuration of the adapter at `path`. Raises ModelError if it is another kind or differs from the options."""
    stated = Path(path).expanduser() / "adapter_config.json"
    if stated.is_file():
        read_object(stated)
    config = _read(path, peft.PeftConfig.from_pretrained)
    if not isinstance(config, peft.LoraConfig):
        kind = getattr(config.peft_type, "value", None)
        raise ModelError(f"the adapter {path} is of the kind {kind}", remedy="Use a LoRA adapter")
    plain = peft.LoraConfig().to_dict()
    # PEFT writes an empty list of parameters for a mixture of experts of which it adapts none
    more = [name for name, value in config.to_dict().items() if name not in _PLAIN and (value or None) != (plain[name] or None)]
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian":
        # these kinds of initialisation change the base weights too
        more.append("init_lora_weights")
    if set(config.modules_to_save or ()) - {VALUE_HEAD}:
        more.append("modules_to_save")
    if more:
        raise ModelError(
            f"the adapter {path} sets {', '.join(more)}, which LoRA, rsLoRA and DoRA of linear layers do not have",
            remedy="Use an adapter of one of these kinds",
        )
    targets = config.target_modules if isinstance(config.target_modules, str) else set(config.target_modules)
    wanted: object = None if lora.targets is None else set(lora.targets)
    if lora.targets == "all-linear" != targets:
        wanted = set(_make_peft_config(spec, LoraConfig(), model, linear, peft).target_modules)
    elif lora.targets == "all-linear":
        wanted = targets
    for key, chosen, has in (
        ("rank", lora.rank, config.r),
        ("alpha", lora.alpha, config.lora_alpha),
        ("rslora", lora.rslora, config.use_rslora),
        ("dora", lora.dora, config.use_dora),
        ("targets", wanted, targets),
    ):
        if chosen not in (None, has):
            shown = ", ".join(sorted(has)) if isinstance(has, set) else str(has).lower()
            raise ModelError(
                f"model.lora.{key} differs from that of the adapter {path}, which is {shown}",
                remedy=f"Remove model.lora.{key}: an existing adapter brings its own",
            )
    config.lora_dropout = lora.dropout
    config.init_lora_weights, config.inference_mode, config.modules_to_save = True, False, None
    config.base_model_name_or_path, config.revision = spec.path, spec.revision
    return config


def _read(path: str, read: Callable[[str], Any]) -> Any:
    local = Path(path).expanduser()
    try:
        return read(str(local) if local.is_dir() else path)
    except UNREADABLE as error:
        raise ModelError(
            f"the adapter {path} cannot be read: {failure(error)}",
            remedy="Point model.lora.path at a directory with adapter_config.json and adapter_model.safetensors",
        ) from error


def _to_peft_name(name: str) -> str:
    """Return a parameter's name in PEFT's files."""
    if _MAGNITUDE in name:
        return _PREFIX + name.removesuffix(f".{ADAPTER}.weight")
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, FourBitLinear):
        return True
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return _returns_product(module)
    return isinstance(module, nn.Linear | Conv1D)


@torch.no_grad()
def _returns_product(module: nn.Linear) -> bool:
    """Return whether a layer with a forward pass of its own returns one tensor as a linear layer does; routers of experts return more."""
    weights = {name: parameter.to("meta") for name, parameter in module.named_parameters()}
    inputs = torch.empty(2, 3, module.in_features, device="meta")
    try:
        output = torch.func.functional_call(module, weights, inputs)
    except Exception:  # noqa: BLE001 - model code of any kind, which takes something else than a linear layer
        return False
    return isinstance(output, Tensor) and output.shape == (2, 3, module.out_features)


def _peft() -> Any:
    # PEFT imports bitsandbytes where it is installed
    hush_advice()
    try:
        import peft
    except ImportError as error:
        raise UnsupportedError(
            "model.lora needs the package peft, which is not installed", remedy='Run pip install "skyrl-engine[lora]"'
        ) from error
    return peft


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
