"""Sockets on which the processes of a run accept connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

PAUSE_SECONDS = 0.1


@dataclass
class Listeners:
    """(program, address, port) of every listening TCP socket that was seen at least once."""

    seen: set[tuple[str, str, int]] = field(default_factory=set)

    def look(self, root: psutil.Process) -> None:
        for process in [root, *root.children(recursive=True)]:
            try:
                sockets = process.net_connections(kind="tcp")
                program = " ".join(process.cmdline()).strip()
            except psutil.Error:
                continue  # it has ended meanwhile
            for socket in sockets:
                if socket.status == psutil.CONN_LISTEN:
                    self.seen.add((program, socket.laddr.ip, socket.laddr.port))

    def of_program(self, program: str) -> set[tuple[str, int]]:
        """Return addresses and ports of the processes whose command line names `program`."""
        return {(address, port) for name, address, port in self.seen if program in name}


@contextmanager
def watching(pid: int) -> Iterator[Listeners]:
    """Look at a process and its descendants several times a second until the block ends."""
    listeners, ended, root = Listeners(), threading.Event(), psutil.Process(pid)

    def watch() -> None:
        while not ended.wait(PAUSE_SECONDS) and root.is_running():
            try:
                listeners.look(root)
            except psutil.NoSuchProcess:
                return

    thread = threading.Thread(target=watch, name="listeners", daemon=True)
    thread.start()
    try:
        yield listeners
    finally:
        ended.set()
        thread.join()
