"""The entry point, which vLLM calls in each of its processes."""


def register() -> None:
    """Add the weight-transfer backends "gloo" and "torch_nccl" to vLLM's, and mend seeds on CPUs; a second call adds nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend in ("gloo", "torch_nccl"):
        try:
            WeightTransferEngineFactory.register_engine(
                backend, "skyrl_engine_vllm_server.transfer", f"{'Gloo' if backend == 'gloo' else 'Nccl'}TransferEngine"
            )
        except ValueError as error:
            if "already registered" not in str(error):
                raise
    from skyrl_engine_vllm_server.owner import end_with_owner
    from skyrl_engine_vllm_server.seeded_prefills import restore_generators_of_unfinished_prompts

    restore_generators_of_unfinished_prompts()
    end_with_owner()
