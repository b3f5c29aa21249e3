"""vLLM's server, with this directory at the end of the path, where it finds our plugin.

Not PYTHONPATH: an image, or the user, may have one already, and a pod's variable would stand in its
place. A laptop has vLLM in an environment of its own, whose Python takes over here.

A server that ends by itself, as it does when its engine has died, ends with 1: the first process of
a container that ends with 0 has nothing to tell to the pod's status. And one that is told to end
while it starts does so at once: the first process of a container ignores signals that it has no
handler for, so that only the end of the pod's grace would end it.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from typing import Any

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

if (os.environ.get("VLLM_TARGET_DEVICE"), os.environ.get("OMP_NUM_THREADS")) == ("cpu", "1"):
    # On CPUs vLLM spawns its processes, and each imports all of it again: most of a small engine's
    # start. With one OpenMP thread there is no pool that a fork would break.
    _context = multiprocessing.get_context
    forked: Any = lambda method=None: _context(method and "fork")  # noqa: E731
    multiprocessing.get_context = forked

told: list[int] = []
_install = signal.signal


def end(number: int, _: Any) -> None:
    """End a server that has no handler of its own yet."""
    if not told:
        os._exit(128 + number)


def noting(number: int, handler: Any) -> Any:
    """signal.signal, which writes down that SIGTERM has come, whoever handles it."""

    def noted(*arguments: Any) -> Any:
        told.append(number)
        return handler(*arguments)

    return _install(number, noted if number == signal.SIGTERM and callable(handler) else handler)


def serve() -> int:
    """The exit code of vLLM's server."""
    from vllm.entrypoints.launchers.api_server.entry import main

    try:
        main()
    except SystemExit as end:
        if end.code:
            return end.code if isinstance(end.code, int) else 1
    return 0 if told else 1


def main() -> int:
    """Serve here, or give way to the Python that can; the exit code."""
    try:
        python = importlib.import_module("sluice_vllm.python").other_python()
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 1
    if python is not None:
        os.execv(python, [str(python), *sys.argv])  # noqa: S606 - the same program, elsewhere
    if os.getpid() == 1:
        _install(signal.SIGTERM, end)
    signal.signal = noting  # type: ignore[assignment]
    if warning := importlib.import_module("sluice_vllm.kernel_cache").leave_unwritable():
        print(warning, file=sys.stderr, flush=True)
    # vLLM asks for 65,535, and takes nothing where it may have fewer.
    importlib.import_module("sluice_vllm.open_files").raise_limit()
    return serve()


if __name__ == "__main__":
    sys.exit(main())
