"""Receives a bucket of weights into one buffer, from a trainer that may die meanwhile.

This file runs in the processes of every engine, linked from each plugin, and imports the standard
library and torch only. NCCL does not notice that a sender on the same machine is gone: the engine
would hang until torch's watchdog ends it after ten minutes.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

# A receiver checks after this time whether its sender lives. Most transfers have ended before.
LOOK_SECONDS = 1.0
# Prefix of the names of communicators with a sluice trainer.
GROUP_PREFIX = "sluice-"
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_settings = threading.Lock()
# Groups that are being made without torch's watchdog.
_making = 0
# The setting before the first of these groups.
_before: str | None = None
Named = list[tuple[str, torch.Tensor]]


class Onward(Protocol):
    """The link to the next engine, which gets every piece of a bucket as soon as it is received."""

    def start(self) -> None: ...
    def send(self, piece: torch.Tensor) -> None: ...
    def finish(self, data: torch.Tensor) -> None: ...


log = logging.getLogger(__name__)


def join(
    group: str, host: str, port: int, rank: int, world_size: int, backend: str, seconds: float
) -> Any:
    """Return a process group outside of torch's default one, as the trainer makes its side."""
    timeout = timedelta(seconds=seconds)
    store = PrefixStore(group, TCPStore(host, port, world_size, False, timeout))
    name: Any = group  # newer torch has a type for it, which is a string as well
    with without_watchdog():
        process_group, _ = _new_process_group_helper(
            world_size, rank, [], Backend(backend), store, group_name=name, timeout=timeout
        )
    _world.pg_group_ranks[process_group] = {r: r for r in range(world_size)}
    return process_group


def receive(names: Any, dtypes: Any, shapes: Any, group: Any, device: Any) -> Named:
    """Take part in the broadcast of a bucket; return its tensors, as views of one buffer."""
    data = memory(dtypes, shapes, device)
    take(data, group)
    look_after(group, data)
    return unpack(data, names, dtypes, shapes)


def memory(dtypes: Any, shapes: Any, device: Any) -> torch.Tensor:
    """Allocate one buffer for a bucket: 1-D uint8."""
    _tell()
    size = sum(_sizes([_kind(kind) for kind in dtypes], shapes))
    return torch.empty(size, dtype=torch.uint8, device=device)


def take(data: torch.Tensor, group: Any, piece: int = 0, onward: Onward | None = None) -> None:
    """Take part in the broadcast of a bucket, piece by piece, and pass each piece on at once.

    With NCCL the work is queued on the current stream, and so is the loading that follows. With
    gloo it is done on return. A `piece` of 0 bytes means the whole bucket.
    """
    if onward:
        onward.start()
    for part in pieces(data, piece):
        dist.broadcast(part, src=0, group=group)
        if onward:
            onward.send(part)
    if onward:
        onward.finish(data)


def pieces(data: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return views of a bucket's bytes, each of `size` but the last; 0 means one view of all."""
    step = size or max(len(data), 1)
    return [data[start : start + step] for start in range(0, max(len(data), 1), step)]


def look_after(group: Any, data: torch.Tensor) -> None:
    """Watch the sender until all that the current stream has to receive has come."""
    if data.is_cuda:
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        threading.Thread(target=watch, args=(arrived, group), name="sender", daemon=True).start()


@cache
def _tell() -> None:
    log.info("weights are received into one buffer")


def unpack(data: torch.Tensor, names: Any, dtypes: Any, shapes: Any) -> Named:
    """Return the tensors of a bucket as views of its bytes, which are 1-D uint8 without padding."""
    kinds = [_kind(kind) for kind in dtypes]
    pieces = torch.split(data, _sizes(kinds, shapes))
    tensors = (_as(*what) for what in zip(pieces, kinds, shapes, strict=True))
    return list(zip(names, tensors, strict=True))


def _kind(dtype: Any) -> torch.dtype:
    kind: torch.dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    return kind


def _sizes(kinds: list[torch.dtype], shapes: Any) -> list[int]:
    """Return the bytes of each tensor."""
    return [k.itemsize * torch.Size(shape).numel() for k, shape in zip(kinds, shapes, strict=True)]


def _as(piece: torch.Tensor, kind: torch.dtype, shape: Any) -> torch.Tensor:
    aligned = piece if piece.storage_offset() % kind.itemsize == 0 else piece.clone()
    return aligned.view(kind).view(torch.Size(shape))


def watch(arrived: torch.cuda.Event, group: Any) -> None:
    """Abort the communicator if the sender, which holds its store, dies before the broadcast ends.

    Only for NCCL; gloo notices by itself. The weights are then partly new, although the request was
    answered. The engine stays paused, as it is out of the update, and the sender's successor sends
    it all weights over another communicator.
    """
    store = group.get_group_store()
    while not arrived.query():  # type: ignore[no-untyped-call]
        time.sleep(LOOK_SECONDS)
        try:
            store.check(["sender"])
        except RuntimeError as error:
            log.error("the trainer is gone in the middle of an update: aborting it (%s)", error)
            group._get_backend(torch.device("cuda")).abort()
            return


def release(group: Any) -> threading.Thread | None:
    """Give up a communicator without waiting for its other end.

    On GPUs, returns the thread that aborts it: once that has ended, no operation of the
    communicator runs.
    """
    log.info("the communicator %s is released", group.group_name)
    dist.distributed_c10d._world.pg_group_ranks.pop(group, None)
    for table in ("pg_map", "pg_names", "pg_backend_config", "pg_to_tag"):
        getattr(dist.distributed_c10d._world, table).pop(group, None)
    for groups in dist.distributed_c10d._world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)
    torch._C._distributed_c10d._unregister_process_group(group.group_name)
    if dist.distributed_c10d.is_nccl_available() and torch.cuda.is_available():
        backend = group._get_backend(torch.device("cuda"))
        aborting = threading.Thread(target=backend.abort, name="release", daemon=True)
        aborting.start()
        return aborting
    return None


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Make a group without torch's watchdog, which ends the process when a collective fails.

    The watchdog is right for the engine's other groups, but not for one with a trainer. torch reads
    the setting when a group is made, and groups may be made concurrently, so the last one restores
    it. The trainer has the same function, because this file cannot import it.
    """
    global _making, _before
    with _settings:
        _before = _before if _making else os.environ.get(_ASYNC_ERRORS)
        _making += 1
        os.environ[_ASYNC_ERRORS] = "0"
    try:
        yield
    finally:
        with _settings:
            _making -= 1
            if not _making:
                os.environ.pop(_ASYNC_ERRORS)
            if not _making and _before is not None:
                os.environ[_ASYNC_ERRORS] = _before
