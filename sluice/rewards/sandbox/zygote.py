"""A process that forks one confined process for every test of a program. Standard library only.

It is a clean interpreter: neither labels nor expected outputs ever come here, so that a program finds none, whatever it
looks through. Forking it costs a few milliseconds where starting Python costs ten times as many. It reads requests and
writes answers as JSON behind a length, on its standard input and output.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
import secrets
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import types
from typing import Any, NoReturn

from sluice.rewards.sandbox.confine import Limits, confine

OUTPUT_BYTES = 4 << 20
_ERROR_BYTES = 4000
_RESULT = 3
# What contest programs use without importing it: the judges of APPS and LiveCodeBench provide it, too.
_PRELUDE = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing", "builtins",
)  # fmt: skip


def main() -> None:
    """Serve until the other side is gone."""
    prelude = _prelude()
    _write({"isolation": _probe()})
    while (request := _read()) is not None:
        _write(_run(request, prelude))


# --- the other side


def _read() -> dict[str, Any] | None:
    header = _exactly(4)
    if header is None:
        return None
    body = _exactly(struct.unpack("<I", header)[0])
    return json.loads(body) if body is not None else None


def _exactly(size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def _write(answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    data = memoryview(struct.pack("<I", len(body)) + body)
    while data:
        data = data[os.write(1, data) :]


# --- one test


def _run(request: dict[str, Any], prelude: dict[str, Any]) -> dict[str, Any]:
    """Run one test in a process of its own.

    request: source, input (text for stdin), memory, cpu_seconds, seconds; call and arguments (JSON) to call a function;
    check: code to run behind the source. Answers {status: ok | error | timeout | output, output, error}.
    """
    directory = tempfile.mkdtemp(prefix="sluice-test-")
    channels = {1: os.pipe(), 2: os.pipe(), _RESULT: os.pipe()}
    try:
        with tempfile.TemporaryFile() as given:
            given.write(request.get("input", "").encode("utf-8", "replace"))
            given.seek(0)
            token = secrets.token_hex(16)
            child = os.fork()
            if child == 0:
                _be_the_test(request, prelude, directory, channels, given.fileno(), token)
        for _, write_end in channels.values():
            os.close(write_end)
        readers = {read_end: name for name, (read_end, _) in channels.items()}
        return _watch(child, readers, request, token)
    finally:
        for read_end, _ in channels.values():
            os.close(read_end)
        shutil.rmtree(directory, ignore_errors=True)


def _watch(child: int, readers: dict[int, int], request: dict[str, Any], token: str) -> dict[str, Any]:
    data = {name: bytearray() for name in readers.values()}
    end, status = time.monotonic() + request["seconds"], ""
    open_ends = set(readers)
    while open_ends and not status:
        ready, _, _ = select.select(list(open_ends), [], [], max(end - time.monotonic(), 0))
        status = "" if ready else "timeout"
        for descriptor in ready:
            part, kept = os.read(descriptor, 1 << 16), data[readers[descriptor]]
            kept += part
            if not part:
                open_ends.discard(descriptor)
            elif len(kept) > OUTPUT_BYTES:
                status = "output"
    status = status or _wait(child, end)
    if status in ("timeout", "output"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    asked = "call" in request or "check" in request
    result = data[_RESULT].decode("utf-8", "replace")
    if status == "ok" and asked and not result.startswith(token):
        status = "error"  # it ended before it had done what it was asked
    return {
        "status": status,
        "output": result[len(token) :] if asked else data[1].decode("utf-8", "replace"),
        "error": data[2][-_ERROR_BYTES:].decode("utf-8", "replace"),
    }


def _wait(child: int, end: float) -> str:
    """How a process ended whose outputs are closed: ok or error; timeout where it goes on without them."""
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return "ok" if code == 0 else "timeout" if code == -signal.SIGXCPU else "error"
        time.sleep(0.001)
    return "timeout"


# --- inside


def _be_the_test(
    request: dict[str, Any],
    prelude: dict[str, Any],
    directory: str,
    channels: dict[int, tuple[int, int]],
    given: int,
    token: str,
) -> NoReturn:
    code = 1
    try:
        _take_over(channels, given)
        confine(directory, Limits(request["memory"], request["cpu_seconds"]))
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))
        code = _perform(request, prelude, token)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc()[-_ERROR_BYTES:].encode("utf-8", "replace"))
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code & 0xFF)


def _take_over(channels: dict[int, tuple[int, int]], given: int) -> None:
    """Descriptors 0 to 3 are the test's own, and there are no others; not even the zygote's."""
    sources = {0: given, **{name: write_end for name, (_, write_end) in channels.items()}}
    moved = {
        name: fcntl.fcntl(source, fcntl.F_DUPFD, 64) for name, source in sources.items()
    }  # out of one another's way
    for name, source in moved.items():
        os.dup2(source, name)
    os.closerange(_RESULT + 1, 1024)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="replace"
    )


def _perform(request: dict[str, Any], prelude: dict[str, Any], token: str) -> int:
    calls = "call" in request
    module = types.ModuleType("solution" if calls else "__main__")
    module.__dict__.update(prelude)
    sys.modules[module.__name__] = module
    exec(compile(request["source"], "solution.py", "exec"), module.__dict__)  # noqa: S102  (this is what it is for)
    if calls:
        answer = _function(module, request["call"])(*json.loads(request["arguments"]))
        _say(token + json.dumps(answer, default=_plain))
    elif "check" in request:
        exec(compile(request["check"], "check.py", "exec"), module.__dict__)  # noqa: S102
        _say(token)
    return 0


def _function(module: types.ModuleType, name: str) -> Any:
    """The function of the module, or of its class Solution (LeetCode's form)."""
    if hasattr(module, "Solution") and hasattr(module.Solution, name):
        return getattr(module.Solution(), name)
    return getattr(module, name)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    if isinstance(value, set | frozenset | types.GeneratorType | map | filter | range):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is no answer")


def _say(text: str) -> None:
    data = memoryview(text.encode("utf-8", "replace"))
    while data:
        data = data[os.write(_RESULT, data) :]


# --- at the start


def _prelude() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for name in _PRELUDE:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
        names.update({n: getattr(module, n) for n in public if hasattr(module, n)})
    return names | {name: sys.modules[name] for name in _PRELUDE}


def _probe() -> str:
    """Which layers hold here, as `+`-joined names; `none: <why>` where a program must not run."""
    directory = tempfile.mkdtemp(prefix="sluice-probe-")
    read_end, write_end = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            try:
                text = "+".join(confine(directory, Limits(1 << 32, 10)))
            except BaseException as error:
                text = f"none: {type(error).__name__}: {error}"
            os.write(write_end, text.encode())
            os._exit(0)
        os.close(write_end)
        text = os.read(read_end, 4096).decode()
        os.waitpid(child, 0)
        return text or "none: the probe died"
    finally:
        os.close(read_end)
        shutil.rmtree(directory, ignore_errors=True)
