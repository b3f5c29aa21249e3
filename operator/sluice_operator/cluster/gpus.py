"""This machine's GPUs, handed out to pods as a scheduler would."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def visible_gpus() -> list[str]:
    """CUDA_VISIBLE_DEVICES where it is set, else all devices of the driver."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return [str(number) for number in sorted(int(name) for name in numbers if name.isdigit())]


def assign(wanted: int, all_gpus: Sequence[str], taken: Sequence[str]) -> list[str] | str:
    """GPUs for one pod, or why there are none. A name that stands twice in `all_gpus` may be taken twice."""
    free = list(all_gpus)
    for name in taken:
        free.remove(name)
    if wanted > len(free):
        return f"{wanted} GPUs wanted, {len(free)} of {len(all_gpus)} free"
    return free[:wanted]
