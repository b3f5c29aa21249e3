"""`python -m sglang.launch_server`, with this directory at the end of the path, where SGLang finds
plugins.

Not PYTHONPATH: an image, or the user, may have one already, and a pod's variable would stand in its
place.

Where a process of SGLang's own dies, SGLang ends, and as the first process of a container with 0.
Then the container's log is lost to the pod's status. So a server that was not told to end ends with
1 here.

And a server that is told to end while it starts does so at once: the first process of a container
ignores signals that it has no handler for, so that only the end of the pod's grace would end it.
"""

import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

told: list[int] = []
install = signal.signal


def end(number: int, _: Any) -> None:
    """End a server that has no handler of its own yet."""
    if not told:
        os._exit(128 + number)


if __name__ == "__main__" and os.getpid() == 1:
    install(signal.SIGTERM, end)

HERE = os.path.dirname(os.path.abspath(__file__))
# As `python -m` has it; then what the processes that this one starts shall not find elsewhere.
sys.path[0:1] = [os.getcwd(), f"{HERE}/absent"]
sys.path.append(HERE)


def model_config(arguments: list[str]) -> dict[str, Any]:
    """config.json of the model of a server with these arguments; empty: it is in no directory."""
    from sluice_sglang.startup.arguments import last

    model = last(arguments, "--model-path")
    file = Path(model, "config.json")
    return dict(json.loads(file.read_text())) if model and file.is_file() else {}


def threads_on_cpu(arguments: list[str]) -> str:
    """OMP_NUM_THREADS of a server on CPUs, which has to be there before torch is loaded. Ranks that
    are bound to cores of their own have one each.
    """
    from sluice_sglang.startup.cpu_threads import threads

    present = os.environ.get("OMP_NUM_THREADS", "1")
    bound = "SGLANG_CPU_OMP_THREADS_BIND" in os.environ or not present.isdigit()
    return present if bound else str(threads(model_config(arguments), int(present)))


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    import setproctitle

    # Finds the place of the processes' names, which it cannot once the first variable is another.
    setproctitle.getproctitle()
    os.environ["OMP_NUM_THREADS"] = threads_on_cpu(sys.argv)
    # SGLang spawns its processes, for CUDA's sake, and each imports all of it again: most of a
    # small engine's start. At that moment there is one thread, so they can be forked.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None


def uncompiled(function: Any = None, **_: Any) -> Any:
    """Stands for torch.compile, which with TORCH_COMPILE_DISABLE=1 compiles nothing and yet imports
    its compiler for each function that is declared: a fifth of a small engine's start.
    """
    return function or uncompiled


if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
    import torch

    torch.compile = uncompiled  # type: ignore[assignment]

_NAME = re.compile(r"\w+")


def noting(number: int, handler: Any) -> Any:
    """signal.signal, which writes down that SIGTERM has come, whoever handles it."""

    def noted(*arguments: Any) -> Any:
        told.append(number)
        return handler(*arguments)

    return install(number, noted if number == signal.SIGTERM and callable(handler) else handler)


def graph_arguments(limit: str) -> list[str]:
    """CUDA graphs for at most so many requests, as this release of SGLang spells it."""
    from sglang.srt.server_args import ServerArgs

    several = hasattr(ServerArgs, "cuda_graph_max_bs_decode")  # prefill has graphs too
    return [f"--cuda-graph-max-bs{'-decode' if several else ''}", limit]


def other_models(arguments: list[str]) -> str:
    """Modules of SGLang's models that this server has no use for, divided by commas: it imports all
    of them, some 200, to serve one. Empty where it cannot be said which one that is.

    arguments: of the server.
    """
    decides_itself = ("--speculative", "--json-model-override-args")
    if any(word.startswith(decides_itself) for word in arguments):
        return ""
    sglang, config = importlib.util.find_spec("sglang"), model_config(arguments)
    if not config or sglang is None or sglang.origin is None:
        return ""
    classes = config.get("architectures") or []
    modules = Path(sglang.origin).parent.joinpath("srt", "models").glob("*.py")
    entries = {module.stem: module.read_text().rpartition("EntryClass")[2] for module in modules}
    used = {n for n, entry in entries.items() if not {*classes}.isdisjoint(_NAME.findall(entry))}
    # Where SGLang has no class for it, it may serve it through transformers.
    return ",".join(sorted(entries.keys() - used - {"transformers"})) if used else ""


def check_exact(arguments: list[str]) -> None:
    """End here where another attention is asked for than the one that the trainer computes."""
    from sluice_sglang.startup.arguments import last

    named = [last(arguments, f"--{part}attention-backend") for part in ("", "prefill-", "decode-")]
    if others := [name for name in named if name not in ("", "triton")]:
        sys.exit(
            f"trainer.deterministic: rollout.engineArgs has attention backend {others[0]}, "
            "expected triton, in whose place sluice computes attention as its trainer does: leave "
            "it out"
        )


def serve() -> int:
    """SGLang's server; its exit code."""
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            return end.code if isinstance(end.code, int) else 1
    return 0 if told else 1


if __name__ == "__main__":
    from sluice_sglang.startup import kernel_cache, open_files, preforked_processes

    signal.signal = noting  # type: ignore[assignment]
    if warning := kernel_cache.leave_unwritable():
        print(warning, file=sys.stderr, flush=True)
    open_files.raise_limit()  # SGLang asks for 65,535, and takes nothing where it may have fewer
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", other_models(sys.argv))
    if os.environ.get("SLUICE_DETERMINISTIC"):
        check_exact(sys.argv)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        preforked_processes.begin(preforked_processes.parts(sys.argv))
    if graphs := os.environ.get("SLUICE_CUDA_GRAPH_MAX_BS"):
        sys.argv += graph_arguments(graphs)
    sys.exit(serve())
