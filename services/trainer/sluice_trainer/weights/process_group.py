"""torch's process group with one engine, separate from the trainer's default group."""

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
    """Create the trainer's side of a group of `size` ranks, as SGLang creates its own.

    The trainer is rank 0 and serves the store at a socket of `host`.

    Parameters
    ----------
    name
        Name of the group, the same on both sides.
    host, listening
        Address and listening socket of the store.
    size
        Number of ranks: the trainer's one plus those of the engine.
    backend
        `nccl` or `gloo`.
    timeout
        Seconds that an operation may take.

    Returns
    -------
    torch's process group.

    """
    patience = timedelta(seconds=timeout)
    served = store.serve(host, listening, size, patience, wait_for_workers=False)
    group_name: Any = name  # newer torch has a type for it, but uses it as a string
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
    """Abort a group and remove it from torch's tables.

    destroy_process_group would wait for a peer that may be dead.

    Parameters
    ----------
    process_group
        The group.
    backend, timeout
        Those that it was created with.

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
    arguments = (process_group, backend, timeout)
    threading.Thread(target=_release, args=arguments, name="abort-group", daemon=True).start()


def _release(process_group: Any, backend: str, timeout: float) -> None:
    """Free a group's resources, in a thread.

    NCCL aborts (0.5 s). gloo cannot: destroying a group waits for its stuck work until that times
    out, so this thread holds the group until then.
    """
    if backend == "nccl":
        process_group._get_backend(torch.device("cuda")).abort()
    else:
        time.sleep(timeout)


_making_group = threading.Lock()


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Create a group without torch's NCCL watchdog.

    The watchdog ends the whole process when a collective fails, but the trainer survives the
    failure of an engine. The setting is read when a group is created, so the trainer's other groups
    keep their watchdog. It is global to the process, so groups are created one at a time; that
    waits for no peer, because peers meet in the first broadcast.
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
