"""Methods of a worker of vLLM for `/collective_rpc`: `--worker-extension-cls skyrl_engine_vllm_server.worker.WorkerExtension`."""

from typing import Any

from skyrl_engine_vllm_server.packed_heads import pack_heads_again


class WorkerExtension:
    """Methods that vLLM adds to its worker, by names of its own."""

    def skyrl_engine_facts(self) -> "dict[str, Any]":
        """Return what the client compares with the model that is trained; shapes are those before vLLM packs weights."""
        worker: Any = self
        config = worker.vllm_config
        model = worker.model_runner.get_model()
        text = config.model_config.hf_text_config
        return {
            "protocol": 1,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": worker.device.type,
            "vocabulary": int(config.model_config.get_vocab_size()),
            "max_model_len": int(config.model_config.max_model_len),
            "logprobs_mode": str(getattr(config.model_config.logprobs_mode, "value", config.model_config.logprobs_mode)),
            "max_logprobs": int(config.model_config.max_logprobs),
            "sampling_defaults": dict(config.model_config.get_diff_sampling_param() or {}),
            "prefix_cache": bool(config.cache_config.enable_prefix_caching),
            "quantization": config.model_config.quantization,
            "speculative": config.speculative_config is not None,
            "transfer": None if config.weight_transfer_config is None else config.weight_transfer_config.backend,
            "lora": None if config.lora_config is None else int(config.lora_config.max_lora_rank),
            "tensor_parallel": int(config.parallel_config.tensor_parallel_size),
            "parameters": _shapes_of(model),
            "packed": {name: list(parts) for name, parts in getattr(model, "packed_modules_mapping", {}).items()},
            "configuration": {
                name: value
                for name, value in text.to_dict().items()
                if isinstance(value, int | float | str | bool) or value is None
            },
        }

    def skyrl_engine_received(self) -> "dict[str, str]":
        """Return checksums of the tensors that came in this update, by name."""
        return dict(self._skyrl_engine_transfer().loaded.received)

    def skyrl_engine_loaded(self) -> "dict[str, str]":
        """Return checksums of the tensors that loaders of the model took whole in the last update, by name."""
        return dict(self._skyrl_engine_transfer().taken)

    def skyrl_engine_reload(self, path: str) -> "dict[str, int]":
        """Load the weights of a folder, and pack tied heads again."""
        from pathlib import Path

        # vLLM's engine does not survive a path that is not there
        if not list(Path(path).glob("*.safetensors")):
            raise ValueError(f"{path} holds no safetensors files on this machine")
        worker: Any = self
        worker.reload_weights(weights_path=path)
        return {"packed_heads": pack_heads_again(worker.model_runner.get_model())}

    def skyrl_engine_reload_adapter(self, path: str) -> "dict[str, int]":
        """Load adapters of a folder in the place of those that are loaded, for running requests too."""
        from vllm.lora.request import LoRARequest

        worker: Any = self
        known = sorted(worker.list_loras())
        if len(known) != 1:
            raise ValueError(f"there are {len(known)} adapters, where one is to be replaced")
        worker.add_lora(LoRARequest("skyrl-engine", known[0], path, load_inplace=True))
        return {"adapter": known[0]}

    def _skyrl_engine_transfer(self) -> Any:
        worker: Any = self
        return worker.weight_transfer_engine


def _shapes_of(model: Any) -> "dict[str, list[int]]":
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    shapes = {}
    for place, layer in model.named_modules():
        parameters, _buffers = get_layerwise_info(layer).restore_metadata
        for name, tensor in parameters.items():
            # a layer that takes adapters holds the layer itself
            if not name.startswith("lora_"):
                shapes[f"{place}.{name}".replace(".base_layer.", ".").removeprefix(".")] = list(tensor.shape)
    return shapes
