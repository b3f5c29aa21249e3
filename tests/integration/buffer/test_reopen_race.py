"""Readers and the event loop while the storage is opened again after a failed write."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice_buffer.serving.committer import Committer
from sluice_buffer.state.memory import Memory
from sluice_buffer.state.storage import PIECE_BYTES, Storage, StorageFullError, WriteBatch, number
from tests.unit.buffer.buffer_tools import LocalBuffer, make_job

GROUPS = 3
MANY_READERS = """
import sys, threading, time
from pathlib import Path
import lmdb
from sluice_buffer.state.storage import Storage, number

storage = Storage(Path(sys.argv[1]), 1 << 28)
wrong, stop = [], threading.Event()

def read():
    while not stop.is_set():
        try:
            if len(storage.value("samples", number(0))) != int(sys.argv[2]):
                wrong.append(1)
        except lmdb.Error:
            pass

readers = [threading.Thread(target=read) for _ in range(4)]
for reader in readers:
    reader.start()
end = time.monotonic() + 3
while time.monotonic() < end:
    storage.reopen()
    time.sleep(0.01)
stop.set()
for reader in readers:
    reader.join()
sys.exit(bool(wrong))
"""


def stored(directory: Path) -> Storage:
    """A database with a value of some pieces."""
    storage, batch = Storage(directory, 1 << 28), WriteBatch()
    for piece in range(GROUPS):
        batch.put("samples", number(0) + piece.to_bytes(4, "big"), bytes(PIECE_BYTES))
    storage.write(batch)
    return storage


def test_a_value_that_is_being_read_is_read_to_its_end(tmp_path: Path) -> None:
    """Read as GetShard does, in another thread: a reopening waits for it."""
    storage = stored(tmp_path)
    begun, go_on, pieces = threading.Event(), threading.Event(), list[bytes]()

    def read() -> None:
        for key, _ in storage.scan("samples", number(0)):
            pieces.append(key)
            begun.set()
            go_on.wait(60)

    reader, reopening = threading.Thread(target=read), threading.Thread(target=storage.reopen)
    reader.start()
    assert begun.wait(60)
    reopening.start()
    reopening.join(0.2)
    assert reopening.is_alive()
    go_on.set()
    reopening.join(60)
    reader.join(60)
    assert len(pieces) == GROUPS
    assert storage.value("samples", number(0)) is not None


def test_readers_never_get_wrong_bytes_and_never_crash_the_process(tmp_path: Path) -> None:
    storage = stored(tmp_path)
    storage.close()
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-c",
        MANY_READERS,
        str(tmp_path),
        str(GROUPS * PIECE_BYTES),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


async def test_the_event_loop_goes_on_while_the_memory_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = LocalBuffer(make_job(tmp_path), tmp_path / "storage")
    write, load, ticks = buffer.core.storage.write, buffer.core.load, 0
    meanwhile: list[int] = []

    def full_once(*arguments: object) -> None:
        monkeypatch.setattr(buffer.core.storage, "write", write)
        raise StorageFullError("full")

    def slowly() -> Memory:
        before, memory = ticks, load()
        time.sleep(0.5)
        meanwhile.append(ticks - before)
        return memory

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    monkeypatch.setattr(buffer.core.storage, "write", full_once)
    monkeypatch.setattr(buffer.core, "load", slowly)
    ticking, committer = asyncio.create_task(tick()), Committer(buffer.core)
    lease: Callable[[], object] = lambda: buffer.core.memory.count("rewinds")  # noqa: E731 - any change
    await asyncio.wait_for(committer.run(lease), 30)
    ticking.cancel()
    await committer.close()
    buffer.close()
    assert meanwhile, "the memory was loaded again"
    assert meanwhile[0] > 0
