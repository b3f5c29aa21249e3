"""A play module of the tests' own (sluice_rollout/environments/fork_server.py says what one has).

CONFIG says what goes wrong while it loads: {"load": "thread" | "file" | "process" | "raise"}. An
episode does what the variable DO says, and leaves what it has seen as result.json.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SLEEP = [sys.executable, "-I", "-S", "-c", "__import__('time').sleep(600)"]


def load(config: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = {"pid": os.getpid(), "kept": None}
    match config.get("load"):
        case "thread":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        case "file":
            loaded["kept"] = open(__file__)  # noqa: SIM115 - kept open
        case "process":
            loaded["kept"] = subprocess.Popen(SLEEP)
        case "raise":
            raise RuntimeError("no such data set")
    random.seed(0)
    atexit.register(print, "the parent's", file=sys.stderr)
    print("loaded")
    return loaded


def play(loaded: dict[str, Any]) -> None:
    print("out", os.environ.get("SAY", ""))
    print("err", os.environ.get("SAY", ""), file=sys.stderr)
    globals()[os.environ.get("DO", "leave")]()
    seen = {
        "loader": loaded["pid"],
        "pid": os.getpid(),
        "ours": os.getsid(0) == os.getpid(),
        "random": random.random(),
        "directory": os.getcwd(),
        "temporary": tempfile.gettempdir(),
        "variables": dict(os.environ),
        "files": len(os.listdir("/proc/self/fd")),
        "seen_with": Path("/proc/self/environ").read_bytes().split(b"\0").count(
            f"SLUICE_EPISODE={os.getcwd()}".encode()
        ),
    }  # fmt: skip
    Path("result.json").write_text(json.dumps(seen))


def leave() -> None:
    """Return at once."""


def fail() -> None:
    raise SystemExit("the door is shut")


def number() -> None:
    raise SystemExit(3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def crash() -> None:
    ctypes.string_at(0)


def much() -> None:
    print("x" * 2**20)
    print("the last of it")
    print("y" * 2**20, file=sys.stderr)
    raise SystemExit("the last error")


def hang() -> None:
    """Start a program, a process without the mark and a fork, and write their pids."""
    program = subprocess.Popen(SLEEP, start_new_session=True)
    bare = subprocess.Popen(SLEEP, env={})
    forked = os.fork()
    if forked == 0:
        os.setsid()
        time.sleep(600)
    text = json.dumps([os.getpid(), program.pid, bare.pid, forked])
    Path(os.environ["TELL"]).write_text(text)
    time.sleep(600)


def leave_behind() -> None:
    """Start processes as `hang` does, and end."""
    program = subprocess.Popen(SLEEP, start_new_session=True)
    forked = os.fork()
    if forked == 0:
        os.setsid()
        time.sleep(600)
    Path(os.environ["TELL"]).write_text(json.dumps([program.pid, forked]))


def at_exit() -> None:
    atexit.register(print, "the child's")
    threading.Thread(target=_late).start()


def _late() -> None:
    time.sleep(0.3)
    print("a thread")


if __name__ == "__main__":
    play(load(json.loads(sys.argv[2])))
