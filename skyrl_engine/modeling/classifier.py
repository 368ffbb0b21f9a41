"""Reward models as transformers has them: sequence classifiers with one label, whose head `score` reads the last token."""

import json
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.weight_files import holder_of, weight_files
from skyrl_engine.modeling.causal_lm import output_names
from skyrl_engine.modeling.loading import build_causal_lm
from skyrl_engine.modeling.value_head import NAME as HEAD

_REMEDY = "Use a model that transformers has a sequence classifier for, such as Qwen3, Llama or Gemma"


def classifier_class(spec: ModelConfig) -> str:
    """Return the name of the class that transformers loads an export of this reward model with.

    Both are built without values: the class must hold the model's own parts under their names, a head `score` without bias, and nothing else.
    Raises UnsupportedError where there is no such class, and ModelError for a configuration that cannot be used.
    """
    import transformers

    config = load_config(spec)
    known = transformers.AutoModelForSequenceClassification._model_mapping  # noqa: SLF001 - the only list of what can be loaded
    remote = "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    if type(config) not in known and not remote:
        raise UnsupportedError(
            f"{spec.path} is a {config.model_type} model, which transformers {transformers.__version__} has no sequence classifier for, so "
            "nobody could load the reward model",
            remedy=_REMEDY,
        )
    config.num_labels = 1
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        language = build_causal_lm(evolve(spec, lora=None), config)
        classifier: Any = transformers.AutoModelForSequenceClassification.from_config(
            config, trust_remote_code=spec.trust_remote_code
        )
    expected = {name: tuple(tensor.shape) for name, tensor in language.state_dict().items() if name not in output_names(language)}
    expected[f"{HEAD}.weight"] = (1, language.get_output_embeddings().in_features)
    actual = {name: tuple(tensor.shape) for name, tensor in classifier.state_dict().items()}
    if actual != expected:
        other = min({name for name, _ in expected.items() ^ actual.items()})
        raise UnsupportedError(
            f"{type(classifier).__name__} of transformers {transformers.__version__} has other parts than {spec.path} with a head {HEAD!r} "
            f"({other} first), so it could not load the reward model",
            remedy=_REMEDY,
        )
    return type(classifier).__name__


def become_classifier(directory: Path, spec: ModelConfig, pad_token_id: int) -> None:
    """Turn a written causal language model with a head into a sequence classifier with one label: another configuration, and weights without
    the language-model head.

    transformers reads the score at a row's last token that is not `pad_token_id`.
    """
    written = evolve(spec, path=str(directory), revision=None, lora=None)
    name = classifier_class(written)
    config = load_config(written)
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        dropped = output_names(build_causal_lm(written, config))
    stated = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    stated |= {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": pad_token_id}
    if isinstance(stated.get("text_config"), dict):
        stated["text_config"]["pad_token_id"] = pad_token_id
    (directory / "config.json").write_text(json.dumps(stated, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (directory / "generation_config.json").unlink(missing_ok=True)
    _drop(directory, written, dropped)


def _drop(directory: Path, spec: ModelConfig, names: set[str]) -> None:
    """Remove tensors from the weights of a directory."""
    from safetensors.torch import load_file, save_file

    files = weight_files(spec)
    for path in {holder for name in names if (holder := holder_of(files, name)) is not None}:
        remaining = {name: tensor for name, tensor in load_file(path).items() if name not in names}
        save_file(remaining, path, metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))
        listed["weight_map"] = {name: file for name, file in listed["weight_map"].items() if name not in names}
        index.write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n", encoding="utf-8")
