"""Facts about a model that its transformers configuration states, read once per run."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import define, evolve

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.configuration import location_of, read_config
from skyrl_engine.model_facts.dropout import Parts, collect_shares, find_shares
from skyrl_engine.model_facts.json_file import read_object
from skyrl_engine.model_facts.thresholds import choose_rotary_length, explain_serving, find_longest_row
from skyrl_engine.model_facts.vision_language import takes_images


@define(eq=False, slots=False)
class ModelFacts:
    """Facts about the model that `model` names; its configuration is read when the first fact is asked for.

    Facts that every step asks for are kept: transformers copies its configuration to answer.
    """

    model: ModelConfig

    @cached_property
    def config(self) -> Any | None:
        """The transformers configuration; None where it cannot be read, which `load_config` refuses before a model is trained."""
        try:
            return read_config(self.model)
        except ModelError:
            return None

    @property
    def context_length(self) -> int | None:
        """Return the longest sequence in tokens that the model is made for; None where its configuration does not say."""
        length = None if self.config is None else getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def extended_length(self) -> int | None:
        """Return the longest sequence in tokens that rotary positions extend the model to; `context_length` where they extend nothing."""
        return None if self.config is None or self.context_length is None else find_longest_row(self.config, self.context_length)

    @cached_property
    def rotary_length(self) -> int | None:
        """Return the longest row in tokens for which rotary frequencies are fixed; None where they do not depend on lengths."""
        return None if self.config is None else choose_rotary_length(self.config, self.model.rotary_length)

    @property
    def serving_note(self) -> str | None:
        """Say what a server must do to compute with the rotary frequencies that were trained with; None where they do not depend on lengths."""
        return None if self.config is None else explain_serving(self.config, self.model.rotary_length)

    @property
    def longest_row(self) -> int | None:
        """Return the longest row in tokens that the model takes: its extended length, and no more than rotary frequencies are fixed for; None
        where its configuration does not say.
        """
        return min((length for length in (self.extended_length, self.rotary_length) if length is not None), default=None)

    @property
    def family(self) -> str | None:
        """Return the model's type as transformers names it, such as "qwen3"; None where its configuration does not say."""
        return None if self.config is None else getattr(self.config, "model_type", None)

    @cached_property
    def vocabulary_size(self) -> int | None:
        """Count the tokens that the model has embeddings for; None where its configuration does not say."""
        size = None if self.config is None else getattr(self.config.get_text_config(decoder=True), "vocab_size", None)
        return size if isinstance(size, int) else None

    @cached_property
    def dropouts(self) -> Mapping[str, float]:
        """Return the shares, above 0, of what the decoder drops out in training, by the keys of its configuration."""
        return {} if self.config is None else find_shares(self.config.get_text_config(decoder=True).to_dict())

    @cached_property
    def switched_off(self) -> Mapping[Parts, Mapping[str, float]]:
        """Return the shares of dropout that the model's configuration states and `model.dropout = "off"` sets to 0; an export keeps them."""
        if self.model.dropout != "off" or self.config is None:
            return {}
        return collect_shares(read_config(evolve(self.model, dropout="model")).to_dict())

    @property
    def draws_masks(self) -> bool:
        """Return True where training draws what scoring does not: dropout of the decoder or of adapters, or noise on embeddings."""
        lora = self.model.lora
        return bool(self.dropouts) or (lora is not None and lora.dropout > 0) or self.model.neftune_alpha is not None

    @property
    def has_magnitudes(self) -> bool:
        """Return True where adapters are those of DoRA, new ones or those that training starts from."""
        lora = self.model.lora
        return lora is not None and bool(self._adapter_options.get("use_dora") if lora.path else lora.dora)

    @property
    def has_servable_adapters(self) -> bool:
        """Return True where a server of the base model's files computes as the run does, given the adapters alone.

        No server is known that samples with magnitudes of DoRA, and its base weights are not those that were rounded to 4 bits.
        """
        lora = self.model.lora
        return lora is not None and not lora.load_in_4bit and not self.has_magnitudes

    @property
    def adapter_rank(self) -> int | None:
        """Return the rank of adapters, new ones or those that training starts from; None without adapters."""
        lora = self.model.lora
        if lora is None or lora.path is None:
            return None if lora is None else lora.rank
        rank = self._adapter_options.get("r")
        return rank if isinstance(rank, int) else None

    @cached_property
    def _adapter_options(self) -> Mapping[str, Any]:
        """PEFT's options of the adapters that training starts from; empty where they are not found."""
        assert self.model.lora is not None
        assert self.model.lora.path is not None
        file = find_file(ModelConfig(self.model.lora.path), "adapter_config.json")
        return {} if file is None else read_object(Path(file))

    @property
    def takes_images(self) -> bool:
        """Return True where the model is loaded with its vision tower."""
        return self.config is not None and takes_images(self.config)


def find_file(model: ModelConfig, name: str) -> str | None:
    """Return the path of a file of the model, from its directory, the hub's cache or the hub; None where there is none."""
    from transformers.utils import cached_file

    location = location_of(model)
    path: str | None = cached_file(
        location["pretrained_model_name_or_path"],
        name,
        revision=location["revision"],
        local_files_only=location["local_files_only"],
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path
