"""Devices that a run asks for and this machine lacks, where all of its ranks are on this machine."""

from skyrl_engine.config.schema import RunConfig
from skyrl_engine.engine.cpu_check import starts_ray_here
from skyrl_engine.workers.process_group import pick_device
from skyrl_engine.workers.ray_cluster import rank_resources


def refuse_absent_devices(run: RunConfig) -> None:
    """Raise UnsupportedError for `run.device = "cuda"` where torch finds no CUDA device here, or fewer than ranks.

    On a cluster that runs already, its own resources decide when the ranks start: the controller's machine may have no GPU.
    """
    if run.device != "cuda" or (run.launch == "ray" and not starts_ray_here(run)):
        return
    pick_device(run.device, 0)
    if run.launch == "ray":
        import torch

        rank_resources(run.device, {"CPU": run.ranks, "GPU": torch.cuda.device_count()}, run.ranks)
