"""Threads of an optimizer that is offloaded to host memory and steps there."""

import os
import socket

import torch
import torch.distributed as dist


def share_cores() -> int:
    """Let torch use this rank's share of the machine's cores, where that is more threads than it has; return their number.

    Ray gives a rank one CPU, and so one thread: AdamW over a whole model's parameters would take as many times longer as the rank's share has
    cores. Every rank of the default process group must call it.
    """
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // hosts.count(socket.gethostname())
    if share > torch.get_num_threads():
        torch.set_num_threads(share)
    return torch.get_num_threads()
