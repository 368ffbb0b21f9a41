"""Reward models as transformers has them: sequence classifiers with one label, whose head `score` reads the last token, and token classifiers
with two, of whose head we hold the difference.
"""

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

    Both are built without values: the class must hold the model's own parts under their names, a head `score` (without bias where it has one
    label), and nothing else.
    Raises UnsupportedError where there is no such class, and ModelError for a configuration that cannot be used.
    """
    import transformers

    config = load_config(spec)
    two_labels = spec.right_label is not None
    auto: Any = transformers.AutoModelForTokenClassification if two_labels else transformers.AutoModelForSequenceClassification
    kind = "token classifier" if two_labels else "sequence classifier"
    known = auto._model_mapping  # noqa: SLF001 - the only list of what can be loaded
    remote = auto.__name__ in (getattr(config, "auto_map", None) or {})
    if type(config) not in known and not remote:
        raise UnsupportedError(
            f"{spec.path} is a {config.model_type} model, which transformers {transformers.__version__} has no {kind} for, so "
            "nobody could load the reward model",
            remedy=_REMEDY,
        )
    config.num_labels = labels = 1 + two_labels
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        language = build_causal_lm(evolve(spec, lora=None), config)
        classifier: Any = auto.from_config(config, trust_remote_code=spec.trust_remote_code)
    expected = {name: tuple(tensor.shape) for name, tensor in language.state_dict().items() if name not in output_names(language)}
    expected[f"{HEAD}.weight"] = (labels, language.get_output_embeddings().in_features)
    if two_labels:
        expected[f"{HEAD}.bias"] = (labels,)
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
    """Turn a written causal language model with a head into a sequence classifier with one label, or a token classifier with two: another
    configuration, and weights without the language-model head.

    transformers reads the score of a sequence at its last token that is not `pad_token_id`. Of two labels the wrong one's logit is 0.
    """
    written = evolve(spec, path=str(directory), revision=None, lora=None)
    name = classifier_class(written)
    config = load_config(written)
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        dropped = output_names(build_causal_lm(written, config))
    stated = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    names = ["LABEL_0"] if spec.right_label is None else ["right", "wrong"] if spec.right_label == 0 else ["wrong", "right"]
    stated |= {
        "architectures": [name],
        "id2label": {str(number): label for number, label in enumerate(names)},
        "label2id": {label: number for number, label in enumerate(names)},
        "pad_token_id": pad_token_id,
    }
    if isinstance(stated.get("text_config"), dict):
        stated["text_config"]["pad_token_id"] = pad_token_id
    (directory / "config.json").write_text(json.dumps(stated, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (directory / "generation_config.json").unlink(missing_ok=True)
    _drop(directory, written, dropped)
    if spec.right_label is not None:
        _widen_head(written, spec.right_label)


def _widen_head(spec: ModelConfig, right_label: int) -> None:
    """Give the head of the files a second label, whose logit is 0."""
    from safetensors.torch import load_file, save_file

    files = weight_files(spec)
    for kind in ("weight", "bias"):
        name = f"{HEAD}.{kind}"
        path = holder_of(files, name)
        assert path is not None, "the head of two labels was written"
        tensors = load_file(path)
        rows = [torch.zeros_like(tensors[name]), torch.zeros_like(tensors[name])]
        rows[right_label] = tensors[name]
        save_file({**tensors, name: torch.cat(rows)}, path, metadata={"format": "pt"})


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
