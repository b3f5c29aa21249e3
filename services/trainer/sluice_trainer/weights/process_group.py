"""torch's process group with one engine, outside of the default one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import _unregister_process_group
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

from sluice_trainer.distributed import store


def make_group(
    name: str, host: str, listening: socket.socket, *, size: int, backend: str, timeout: float
) -> Any:
    """Our side of a group of `size` ranks, as SGLang makes its own: rank 0, which serves the store
    at a socket of `host`.
    """
    patience = timedelta(seconds=timeout)
    served = store.serve(host, listening, size, patience, wait_for_workers=False)
    group_name: Any = name  # a type of its own in newer torch, a string for all that it does
    with _without_watchdog() if backend == "nccl" else contextlib.nullcontext():
        process_group, _ = _new_process_group_helper(
            size,
            0,
            [],
            Backend(backend),
            PrefixStore(name, served),
            group_name=group_name,
            timeout=patience,
        )
    _world.pg_group_ranks[process_group] = {rank: rank for rank in range(size)}
    return process_group


def abort_group(process_group: Any, backend: str, timeout: float) -> None:
    """Abort a group and have torch forget it. (destroy_process_group would wait for a peer that may
    be dead.) timeout: that it was made with.
    """
    tables: tuple[Any, ...] = (
        _world.pg_map,
        _world.pg_names,
        _world.pg_group_ranks,
        _world.pg_backend_config,
        _world.pg_to_tag,
    )
    for table in tables:
        table.pop(process_group, None)
    for groups in _world.tags_to_pg.values():
        if process_group in groups:
            groups.remove(process_group)
    _unregister_process_group(process_group.group_name)
    ending = (process_group, backend, timeout)
    threading.Thread(target=_end, args=ending, name="abort_group", daemon=True).start()


def _end(process_group: Any, backend: str, timeout: float) -> None:
    """NCCL aborts (0.5 s). gloo cannot: the group's end waits for stuck work until that times out.
    Not here.
    """
    if backend == "nccl":
        process_group._get_backend(torch.device("cuda")).abort()
    else:
        time.sleep(timeout)


_making_group = threading.Lock()


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Torch's NCCL watchdog ends the whole process when a collective fails. An engine's failure is
    ours to handle.

    The setting is read when a group is made: the trainer's own groups keep their watchdog. It is
    the process's, so NCCL's groups are made one at a time, which waits for nobody: peers meet in
    the first broadcast.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _making_group:
        before = os.environ.get(name)
        os.environ[name] = "0"
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before
