"""Joining the trainer's process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from sluice_trainer.distributed.device import DEVICE


def join(timeout: timedelta, env: Mapping[str, str] = os.environ) -> None:
    """Join the process group, once.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from torchrun. Without them the group has one
    process and opens no port. The backend is gloo on a CPU and NCCL on GPUs.

    Parameters
    ----------
    timeout
        Timeout of every collective.
    env
        Environment variables.

    """
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(env.get("LOCAL_RANK", 0)))
    if dist.is_initialized():
        return
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    if "WORLD_SIZE" not in env:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    dist.init_process_group(
        backend,
        init_method=f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        timeout=timeout,
    )
