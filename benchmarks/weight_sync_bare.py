"""One broadcast of as many bytes as an update of benchmarks/weight_sync.py has, and nothing else.

torchrun -m benchmarks.weight_sync_bare DIRECTORY WAY
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.weight_sync_source import GPUS, synchronise, updates


def bare(directory: Path, way: str) -> None:
    if GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if GPUS else "gloo")
    size = json.loads(updates(directory, way).read_text())["bytes"]
    data = torch.zeros(size, dtype=torch.uint8, device="cuda" if GPUS else "cpu")
    seconds = []
    for _ in range(10):
        dist.barrier()
        synchronise()
        started = time.perf_counter()
        dist.broadcast(data, src=0)
        synchronise()
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        (directory / "bare.json").write_text(json.dumps({"bare": statistics.median(seconds[2:])}))
    dist.destroy_process_group()


if __name__ == "__main__":
    bare(Path(sys.argv[1]), sys.argv[2])
