"""Start vLLM's server with this directory at the end of the path, so that it finds the plugin.

PYTHONPATH is not used: an image or the user may set it, and a pod's variable would replace theirs.
A laptop has vLLM in a separate environment, whose Python takes over here.

A server that ends by itself, for example because its engine has died, exits with 1: the pod's
status has no message of a first process that exits with 0. A server that is told to end while it
starts does so at once: the first process of a container ignores signals that it does not handle, so
only the end of the pod's grace period would end it.
"""

import importlib
import itertools
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

if (os.environ.get("VLLM_TARGET_DEVICE"), os.environ.get("OMP_NUM_THREADS")) == ("cpu", "1"):
    # On CPUs vLLM spawns its processes, and each imports all modules again: most of the start of a
    # small engine. With one OpenMP thread there is no pool that a fork would break.
    _context = multiprocessing.get_context
    forked: Any = lambda method=None: _context(method and "fork")  # noqa: E731
    multiprocessing.get_context = forked

# Signals that have told the server to end.
received_signals: list[int] = []
_install = signal.signal


def end(number: int, _: Any) -> None:
    """End a server that does not handle SIGTERM yet."""
    if not received_signals:
        os._exit(128 + number)


def noting(number: int, handler: Any) -> Any:
    """Replace signal.signal, and note that SIGTERM has come, whoever handles it."""

    def noted(*arguments: Any) -> Any:
        received_signals.append(number)
        return handler(*arguments)

    return _install(number, noted if number == signal.SIGTERM and callable(handler) else handler)


def load_arguments(arguments: list[str]) -> list[str]:
    """Return the argument that reads the checkpoint if the trainer does not send all of it.

    The trainer sends the language model. Other parts would keep random weights.
    """
    options = dict(itertools.pairwise(arguments))
    if options.get("--load-format") != "dummy" or "--model" not in options:
        return []
    parts = importlib.import_module("sluice_vllm.model_parts").kept_parts_of
    return ["--load-format", "auto"] if parts(Path(options["--model"])) else []


def serve() -> int:
    """Run vLLM's server and return its exit code."""
    from vllm.entrypoints.launchers.api_server.entry import main

    try:
        main()
    except SystemExit as end:
        if end.code:
            return end.code if isinstance(end.code, int) else 1
    return 0 if received_signals else 1


def main() -> int:
    """Serve here, or in the Python that has vLLM; return the exit code."""
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
    importlib.import_module("sluice_vllm.adapters").begin(sys.argv)
    # vLLM asks for 65,535 open files, and keeps the old limit if it may not have that many.
    importlib.import_module("sluice_vllm.open_files").raise_limit()
    sys.argv += load_arguments(sys.argv)
    return serve()


if __name__ == "__main__":
    sys.exit(main())
