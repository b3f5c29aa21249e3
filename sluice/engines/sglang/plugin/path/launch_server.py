"""Run `python -m sglang.launch_server` with this directory on the path, for the plugin.

PYTHONPATH is not used: an image or the user may set it, and a pod's variable would replace theirs.

If one of SGLang's processes dies, SGLang ends, as the first process of a container with exit code
0, and the pod's status then has no message of it. So a server that was not told to end exits with 1
here.

A server that is told to end while it starts does so at once: the first process of a container
ignores signals that it does not handle, so only the end of the pod's grace period would end it.
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

# Signals that have told the server to end.
received_signals: list[int] = []
install = signal.signal


def end(number: int, _: Any) -> None:
    """End a server that does not handle SIGTERM yet."""
    if not received_signals:
        os._exit(128 + number)


if __name__ == "__main__" and os.getpid() == 1:
    install(signal.SIGTERM, end)

HERE = os.path.dirname(os.path.abspath(__file__))
# The first entry is as in `python -m`. The second hides modules from the processes started here.
sys.path[0:1] = [os.getcwd(), f"{HERE}/absent"]
sys.path.append(HERE)


def model_config(arguments: list[str]) -> dict[str, Any]:
    """Return config.json of the model in these arguments; empty if it is not in a directory."""
    from sluice_sglang.startup.arguments import last

    model = last(arguments, "--model-path")
    file = Path(model, "config.json")
    return dict(json.loads(file.read_text())) if model and file.is_file() else {}


def threads_on_cpu(arguments: list[str]) -> str:
    """Return OMP_NUM_THREADS of a server on CPUs, which must be set before torch is loaded.

    Ranks that are bound to separate cores have one thread each.
    """
    from sluice_sglang.startup.cpu_threads import threads

    present = os.environ.get("OMP_NUM_THREADS", "1")
    bound = "SGLANG_CPU_OMP_THREADS_BIND" in os.environ or not present.isdigit()
    return present if bound else str(threads(model_config(arguments), int(present)))


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    import setproctitle

    # Finds the memory of process names, which is not possible once the first variable has changed.
    setproctitle.getproctitle()
    os.environ["OMP_NUM_THREADS"] = threads_on_cpu(sys.argv)
    # SGLang spawns its processes because of CUDA, and each imports all modules again, which is most
    # of a small engine's start. There is one thread at that moment, so processes can be forked.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None


def uncompiled(function: Any = None, **_: Any) -> Any:
    """Replace torch.compile.

    With TORCH_COMPILE_DISABLE=1 it compiles no function and still imports its compiler for each
    function that is declared: a fifth of a small engine's start.
    """
    return function or uncompiled


if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
    import torch

    torch.compile = uncompiled  # type: ignore[assignment]

# Memory for the pixels of some hundred images, in the process that serves HTTP.
_PREPROCESS_CACHE_MB = "256"
_IDENTIFIER = re.compile(r"\w+")


def noting(number: int, handler: Any) -> Any:
    """Replace signal.signal, and note that SIGTERM has come, whoever handles it."""

    def noted(*arguments: Any) -> Any:
        received_signals.append(number)
        return handler(*arguments)

    return install(number, noted if number == signal.SIGTERM and callable(handler) else handler)


def graph_arguments(limit: str) -> list[str]:
    """Return the limit of CUDA graphs as this release of SGLang spells it."""
    from sglang.srt.server_args import ServerArgs

    has_prefill_graphs = hasattr(ServerArgs, "cuda_graph_max_bs_decode")
    return [f"--cuda-graph-max-bs{'-decode' if has_prefill_graphs else ''}", limit]


def other_models(arguments: list[str]) -> str:
    """Return modules of SGLang's models that this server does not use, separated by commas.

    SGLang imports all of them, some 200, to serve one. Empty if the model's module is not known.
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
    used = {
        n for n, entry in entries.items() if not {*classes}.isdisjoint(_IDENTIFIER.findall(entry))
    }
    # SGLang may serve a model for which it has no class through transformers.
    return ",".join(sorted(entries.keys() - used - {"transformers"})) if used else ""


def load_arguments(arguments: list[str]) -> list[str]:
    """Return the argument that reads the checkpoint if the trainer does not send all of it.

    The trainer sends the language model. Other parts would keep random weights.
    """
    from sluice_sglang.startup.arguments import last
    from sluice_sglang.startup.model_parts import kept_parts_of

    model, dummy = last(arguments, "--model-path"), last(arguments, "--load-format") == "dummy"
    return ["--load-format", "auto"] if dummy and model and kept_parts_of(Path(model)) else []


def precision_arguments(arguments: list[str]) -> list[str]:
    """Return the argument that makes the engine hold quantized weights, which the trainer sends."""
    from sluice_sglang.startup import precision
    from sluice_sglang.startup.arguments import last
    from sluice_sglang.startup.model_parts import tensor_names

    chosen = os.environ.get(precision.VARIABLE)
    if not chosen:
        return []
    name = "--json-model-override-args"
    override = json.loads(last(arguments, name) or "{}")
    kept = precision.kept_modules(tensor_names(Path(last(arguments, "--model-path"))))
    override["quantization_config"] = precision.sglang_config(chosen, kept)
    return [name, json.dumps(override)]


def image_arguments(arguments: list[str]) -> list[str]:
    """Return the argument by which SGLang takes the tokens of a prompt with images as they are.

    Without a cache of what is computed from an image's pixels alone it decodes such a prompt, and
    fails if the model has written `<image>` in it. Qwen3-VL needs no cache for that.
    """
    from sluice_sglang.startup.arguments import has

    name = "--mm-preprocess-cache-size-mb"
    if not has(arguments, "--enable-multimodal") or has(arguments, name):
        return []
    from sglang.srt.server_args import ServerArgs

    is_qwen3_vl = str(model_config(arguments).get("model_type")).startswith("qwen3_vl")
    is_supported = hasattr(ServerArgs, "mm_preprocess_cache_size_mb")  # in later releases
    return [name, _PREPROCESS_CACHE_MB] if is_supported and not is_qwen3_vl else []


def linear_attention_on_cpu(arguments: list[str]) -> list[str]:
    """Return the arguments with which a CPU serves linear attention, with states in float32.

    SGLang's default keeps copies of states for its prefix cache, which needs a GPU.
    """
    from sluice_sglang.startup.arguments import last

    config = model_config(arguments)
    layers = (config.get("text_config") or config).get("layer_types") or []
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or "linear_attention" not in layers:
        return []
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", last(arguments, "--dtype") or "float32")
    return [
        *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
        *("--mamba-ssm-dtype", "float32"),
    ]


def check_attention_backend(arguments: list[str]) -> None:
    """End here if an attention is requested that the trainer does not compute."""
    from sluice_sglang.startup.arguments import last

    named = [last(arguments, f"--{part}attention-backend") for part in ("", "prefill-", "decode-")]
    if others := [name for name in named if name not in ("", "triton")]:
        sys.exit(
            f"trainer.deterministic: rollout.engineArgs has attention backend {others[0]}, "
            "expected triton, which sluice replaces by the trainer's attention: leave it out"
        )


def check_speculation() -> None:
    """End here if updates would change the draft model."""
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or sglang.origin is None:
        return
    updates = Path(sglang.origin).parent / "srt/managers/scheduler_components/weight_updater.py"
    if not updates.is_file() or "def _select_runners(" not in updates.read_text():
        sys.exit(
            "rollout.speculative needs SGLang 0.5.21 or later, in which updates can leave a draft "
            "model as it is: take a later image, or leave rollout.speculative out"
        )


def serve() -> int:
    """Run SGLang's server and return its exit code."""
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            return end.code if isinstance(end.code, int) else 1
    return 0 if received_signals else 1


if __name__ == "__main__":
    from sluice_sglang.startup import kernel_cache, open_files, preforked_processes

    signal.signal = noting  # type: ignore[assignment]
    if warning := kernel_cache.leave_unwritable():
        print(warning, file=sys.stderr, flush=True)
    # SGLang asks for 65,535 open files, and keeps the old limit if it may not have that many.
    open_files.raise_limit()
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", other_models(sys.argv))
    if os.environ.get("SLUICE_DETERMINISTIC"):
        check_attention_backend(sys.argv)
    if os.environ.get("SLUICE_SPECULATIVE"):
        check_speculation()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        preforked_processes.begin(preforked_processes.parts(sys.argv))
    sys.argv += load_arguments(sys.argv) + image_arguments(sys.argv)
    sys.argv += precision_arguments(sys.argv)
    sys.argv += linear_attention_on_cpu(sys.argv)
    if graphs := os.environ.get("SLUICE_CUDA_GRAPH_MAX_BS"):
        sys.argv += graph_arguments(graphs)
    sys.exit(serve())
