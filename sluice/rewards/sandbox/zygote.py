"""Zygote: forks one confined process for each test of a program. Standard library only.

The zygote is a clean interpreter that never receives labels or expected outputs, so a program
cannot find them. A fork costs a few milliseconds, a new interpreter ten times as much. Requests and
answers are length-prefixed JSON on stdin and stdout. An error at one test becomes the answer of
that test. The zygote ends when the other side closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
import secrets
import struct
import sys
import tempfile
import traceback
import types
from typing import Any, NoReturn

from sluice.rewards.sandbox import scratch, tree
from sluice.rewards.sandbox.confine import Layers, Limits, Rights, confine, hide, probe
from sluice.rewards.sandbox.watch import watch

_ERROR_BYTES = 4000
_RESULT, _UNCONFINED = 3, 4
_PLAIN = Rights()
# Names that contest programs use without imports, as the judges of APPS and LiveCodeBench allow.
_PRELUDE = (
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
    "typing",
    "builtins",
)


def main() -> None:
    """Serve requests until the other side is gone."""
    hide()
    prelude = _prelude()
    with scratch.directory() as place, contextlib.suppress(BrokenPipeError):
        layers = _probe(place)
        _write({"layers": layers.names, "missing": layers.missing, "refused": layers.refused})
        programs: list[Layers] = []  # probed on first use
        while (request := _read()) is not None:
            try:
                if "command" in request and not programs:
                    programs.append(_probe(place, Rights(programs=True)))
                held = programs[0] if "command" in request else layers
                answer = _run(request, prelude, held, place)
            except Exception as error:
                answer = {
                    "status": "failed",
                    "output": "",
                    "error": f"{type(error).__name__}: {error}",
                }
            _write(answer)


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


def _run(
    request: dict[str, Any], prelude: dict[str, Any], layers: Layers, place: str
) -> dict[str, Any]:
    """Run one test in a forked process.

    Fields of a request: source, input (text for stdin), memory (bytes), cpu_seconds, seconds; call
    and arguments (JSON) to call a function; check, code to run after the source. Instead of a
    source: command, the absolute path of a program and its arguments, with environment, readable
    (paths) and folder (working directory). A command's output is what it writes to descriptor 3,
    its error what it writes to stdout and stderr.

    Fields of the answer: status, output, error. Status is ok, error, timeout, output, limit,
    refused (a command that cannot be confined), or failed if the sandbox is at fault.
    """
    if "command" in request and layers.refused:
        return {"status": "refused", "output": "", "error": layers.refused}
    directory = tempfile.mkdtemp(prefix="test-", dir=place)
    try:
        with contextlib.ExitStack() as stack:
            stdin = stack.enter_context(tempfile.TemporaryFile())
            stdin.write(request.get("input", "").encode("utf-8", "replace"))
            stdin.seek(0)
            channels = {name: _pipe(stack) for name in (1, 2, _RESULT, _UNCONFINED)}
            token, zygote = secrets.token_hex(16), os.getpid()
            child = os.fork()
            if child == 0:
                descriptors = {
                    0: stdin.fileno(),
                    **{name: end.fileno() for name, (_, end) in channels.items()},
                }
                _be_the_test(request, prelude, layers, directory, descriptors, token, zygote)
            for _, write_end in channels.values():
                write_end.close()
            readers = {read_end.fileno(): name for name, (read_end, _) in channels.items()}
            group = "command" in request
            ended = watch(child, readers, directory, request["seconds"], group=group)
    finally:
        _remove(directory)
    needs_token = "call" in request or "check" in request
    status, result = ended.status, ended.data[_RESULT].decode("utf-8", "replace")
    if ended.data[_UNCONFINED]:
        return {
            "status": "failed",
            "output": "",
            "error": ended.data[_UNCONFINED].decode("utf-8", "replace"),
        }
    if status == "ok" and needs_token and not result.startswith(token):
        status = "error"  # the program ended before the call or check was done
    if "command" in request:
        token, needs_token = "", True
    return {
        "status": status,
        "output": result[len(token) :] if needs_token else ended.data[1].decode("utf-8", "replace"),
        "error": ended.excess or ended.data[2][-_ERROR_BYTES:].decode("utf-8", "replace"),
    }


def _pipe(stack: contextlib.ExitStack) -> tuple[io.FileIO, io.FileIO]:
    read_end, write_end = os.pipe()
    return stack.enter_context(io.FileIO(read_end)), stack.enter_context(io.FileIO(write_end, "w"))


def _remove(directory: str) -> None:
    try:
        tree.remove(directory)
    except OSError as error:  # the next sandbox on this machine retries
        print(f"code: {directory} cannot be removed: {error}", file=sys.stderr, flush=True)


# --- inside


def _be_the_test(
    request: dict[str, Any],
    prelude: dict[str, Any],
    layers: Layers,
    directory: str,
    descriptors: dict[int, int],
    token: str,
    zygote: int,
) -> NoReturn:
    code = 1
    try:
        _take_over(descriptors)
        limits = Limits(request["memory"], request["cpu_seconds"])
        if "command" in request:
            os.setpgid(0, 0)
            os.dup2(2, 1)  # stdout and stderr form one text
            rights = Rights(True, tuple(request["readable"]), _processes_of_ours())
            _confine(directory, limits, layers, zygote, rights)
            os.chdir(request["folder"])
            os.execve(request["command"][0], request["command"], request["environment"])  # noqa: S606
        _confine(directory, limits, layers, zygote)
        tempfile.tempdir = directory
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))
        sys.set_int_max_str_digits(0)  # contests print integers of any length
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


def _processes_of_ours() -> int:
    """Count the threads of this user on the machine, which a limit on processes includes."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _take_over(descriptors: dict[int, int]) -> None:
    """Give the test descriptors 0 to 4 and close all others, including the zygote's."""
    moved = {
        name: fcntl.fcntl(source, fcntl.F_DUPFD, 64) for name, source in descriptors.items()
    }  # moved up first, so that none overwrites another
    for name, source in moved.items():
        os.dup2(source, name)
    os.closerange(_UNCONFINED + 1, 1024)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="replace"
    )


def _confine(
    directory: str, limits: Limits, layers: Layers, zygote: int, rights: Rights = _PLAIN
) -> None:
    """Confine this process; on failure report it on a channel that programs never get, and exit."""
    try:
        confine(directory, limits, layers, zygote, rights)
    except BaseException as error:
        os.write(
            _UNCONFINED, f"a program could not be confined: {error}".encode("utf-8", "replace")
        )
        os._exit(1)
    os.close(_UNCONFINED)


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
    """Return the function of a module, or of its class Solution (LeetCode's form)."""
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


def _probe(place: str, rights: Rights = _PLAIN) -> Layers:
    directory = tempfile.mkdtemp(prefix="probe-", dir=place)
    try:
        return probe(directory, rights)
    finally:
        _remove(directory)
