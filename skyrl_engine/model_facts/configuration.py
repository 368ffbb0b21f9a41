"""Read the transformers configuration of a model, and refuse models that cannot be trained. No torch."""

import json
import re
from pathlib import Path
from typing import Any, Final

import attrs

from skyrl_engine.contracts.values.model import EmptyModelConfig, ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.dropout import switch_off_config
from skyrl_engine.model_facts.json_file import read_object
from skyrl_engine.model_facts.vision_language import refuse_vision_language, takes_images
from skyrl_engine.near_words import did_you_mean

_SAME_ARCHITECTURE: Final = {"kimi_k2": "deepseek_v3"}
"""Values of `model_type` that transformers does not know, and the one of the same architecture, with other sizes, that it knows."""


def source_of(model: ModelConfig) -> str:
    """Return the source for transformers to load from: the local directory if there is one, else the hub id."""
    if isinstance(model, EmptyModelConfig):
        return model.configuration
    local = Path(model.path).expanduser()
    return str(local) if local.is_dir() else model.path


def location_of(model: ModelConfig) -> dict[str, Any]:
    """Give the arguments of `from_pretrained` that say where the model's files are; a local directory is read without the network."""
    source = source_of(model)
    local = Path(source).is_dir()
    return {
        "pretrained_model_name_or_path": source,
        "revision": None if local else model.revision,
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": local,
    }


def name_without_weights(model: ModelConfig) -> EmptyModelConfig:
    """Return the same model, known by its configuration alone."""
    fields = {field.name: getattr(model, field.name) for field in attrs.fields(ModelConfig)}
    return EmptyModelConfig(**fields, configuration=source_of(model))


def read_config(model: ModelConfig) -> Any:
    """Return the `transformers.PretrainedConfig` of a model of any kind, without dropout where that is switched off.

    Raises ModelError that names the file and its fault.
    """
    config = _read_stated_config(model)
    if model.dropout == "off":
        switch_off_config(config)
    return config


def _read_stated_config(model: ModelConfig) -> Any:
    import transformers

    folder = Path(source_of(model))
    stated = _read_local_config(model, folder)
    try:
        return transformers.AutoConfig.from_pretrained(**location_of(model))
    except Exception as error:
        message = str(error)
        place = f"{folder / 'config.json'}" if stated is not None else f"the configuration of {model.path}"
        if "trust_remote_code" in message and (kind := (stated or {}).get("model_type")) in _SAME_ARCHITECTURE:
            raise ModelError(
                f"{place} says model_type {kind}, which code of the model computes, and transformers {transformers.__version__} does not know",
                remedy=f'Set "model_type": "{_SAME_ARCHITECTURE[kind]}" there, whose architecture and tensors these are, and remove "auto_map"',
            ) from error
        if "trust_remote_code" in message:
            raise ModelError(
                f"{model.path} is computed by Python code of its own, which is not run unless you allow it",
                remedy="Read that code and allow it by model.trust_remote_code = true (export: --trust-remote-code), or use another model",
            ) from error
        kind = None if stated is None else stated.get("model_type")
        if stated is not None and "auto_map" not in stated and (kind is None or not _is_known_type(kind)):
            raise _unknown(place, kind) from error
        raise ModelError(
            f"{place} cannot be loaded: {_one_line(error)}"
            if stated is not None
            else f"there is no directory {model.path} here, and {place} cannot be loaded from the hub: {_first_sentence(error)}",
            remedy="Repair it, or copy it again from the model's source"
            if stated is not None
            else "Correct model.path (write ./NAME for a directory), or check model.revision and that the hub can be reached",
        ) from error


def load_config(model: ModelConfig, *, images: bool = False) -> Any:
    """Load the `transformers.PretrainedConfig` of a model that can be trained; a vision-language model only with `images`.

    Raises ModelError if it cannot be read or is of another kind, and UnsupportedError for vision-language models that are not supported.
    """
    import transformers

    config = read_config(model)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{model.path} holds quantized weights, which cannot be trained",
            remedy="Use the model's full-precision version",
        )
    refuse_vision_language(config, model.path, images=images)
    if takes_images(config):
        return config
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping and not _has_remote_code(config):  # noqa: SLF001 - the only list of what can be loaded
        raise ModelError(
            f"{model.path} is a {config.model_type} model, which transformers {transformers.__version__} has no causal language model for",
            remedy="Use a causal language model, or a version of transformers that knows this one",
        )
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 1)
    if isinstance(layers, int) and layers < 1:
        raise ModelError(
            f"{model.path} has {layers} layers, by num_hidden_layers in its config.json",
            remedy="Correct that number, or copy config.json again from the model's source",
        )
    return config


def _read_local_config(model: ModelConfig, folder: Path) -> dict[str, Any] | None:
    """Return what config.json of a local directory says; None for models on the hub. Raises ModelError."""
    _refuse_what_is_no_model(model.path, folder)
    if source_of(model).startswith((".", "/", "~")) and not folder.is_dir():
        raise ModelError(
            f"there is no model directory {model.path}", remedy="Correct model.path, or give a hub id such as organisation/model"
        )
    if not folder.is_dir():
        return None
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the directory {model.path} holds no config.json, so it is not a Hugging Face model",
            remedy="Set model.path to the adapter's base model and model.lora.path to this directory"
            if (folder / "adapter_config.json").is_file()
            else "Point model.path at the directory that save_pretrained wrote",
        )
    generation = folder / "generation_config.json"
    if generation.is_file():
        # transformers takes a damaged one for none, and exports would lack it
        read_object(generation)
    return read_object(folder / "config.json")


def _refuse_what_is_no_model(path: str, folder: Path) -> None:
    """Raise ModelError for a file, and for an address of the web; `folder` is where the model would be."""
    if folder.is_file():
        raise ModelError(
            f"model.path is the file {path}, where a model's directory must be",
            remedy="GGUF files hold quantized weights: use the model's safetensors version, a directory with config.json"
            if folder.suffix == ".gguf"
            else "Name the directory that holds it together with config.json",
        )
    if "://" in path:
        hub = re.fullmatch(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+).*", path)
        raise ModelError(
            f"model.path is the address {path}, where a directory or a hub id must be",
            remedy=f'Write the hub id: "{hub[1]}"' if hub else "Download the model and name its directory",
        )


def _is_known_type(kind: object) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return isinstance(kind, str) and kind in CONFIG_MAPPING


def _unknown(place: str, kind: object) -> ModelError:
    """Return the error for a configuration whose architecture transformers does not know."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if kind is None:
        return ModelError(
            f'{place} names no "model_type", so the architecture is not known',
            remedy="Copy config.json again from the model's source, or add its model_type",
        )
    meant = did_you_mean(kind, CONFIG_MAPPING_NAMES, cutoff=0.75)
    return ModelError(
        f"{place} names the model_type {json.dumps(kind)}, which transformers {transformers.__version__} does not know",
        remedy=(f"{meant} Correct it" if meant else "Correct it")
        + ", or install a version of transformers that knows this architecture",
    )


def _has_remote_code(config: Any) -> bool:
    return "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def _first_sentence(error: BaseException) -> str:
    return re.split(r"(?<=[.!?])\s", _one_line(error), maxsplit=1)[0].rstrip(".")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
