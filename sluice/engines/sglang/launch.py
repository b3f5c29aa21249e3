"""Command line and environment of the SGLang server, which runs out of its own image beside our
worker.
"""

from __future__ import annotations

from typing import Any

from sluice.api import RLJobSpec
from sluice.engines import arguments
from sluice.engines.protocol import Plugin, ServerPlacement
from sluice.runtime import kernel_cache

PLUGIN_DIR = "/sluice/sglang"
_COMMAND = ["python3", "-m", "sglang.launch_server"]
_COMMAND_WITH_PLUGIN = ["python3", f"{PLUGIN_DIR}/launch_server.py"]
_PLUGIN = Plugin("sglang", PLUGIN_DIR, ("python", "-m", "sluice.engines.sglang.plugin", PLUGIN_DIR))
_ENV = {
    # /health then says that the server lives, at once, also while it is paused for an update; else
    # it makes a token.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
UNDECIDED = {"NCCL_CUMEM_ENABLE": "-2"}
"""NCCL's own default, in words that SGLang leaves alone: where it finds nothing it writes 0, which
also rules out NVLink across hosts (MNNVL). Trainer and engine must agree, or the sender of an
update waits for ever; so neither is told anything else, unless by a template."""
_CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # It would need a C++ compiler in the image, and costs more than it saves.
    "TORCH_COMPILE_DISABLE": "1",
    # With two OpenMP threads on a busy machine a tiny model is 10 to 40 times slower.
    "OMP_NUM_THREADS": "1",
}
_GRAPHS = "SLUICE_CUDA_GRAPH_MAX_BS"
"""For our script, which knows how the image's release spells the argument."""
_MOST_GRAPHED = 512
"""Requests of the largest graph: SGLang's own limit on the largest GPUs. Each graph costs memory
and time at the start."""
_OWN_GRAPHS = {
    "cuda-graph-backend-decode",
    "cuda-graph-bs",
    "cuda-graph-bs-decode",
    "cuda-graph-config",
    "cuda-graph-max-bs",
    "cuda-graph-max-bs-decode",
    "disable-cuda-graph",
    "disable-decode-cuda-graph",
}
"""Arguments by which a user says for how many requests there are graphs. Others of that name, such
as disable-piecewise-cuda-graph, are about prompts."""
_GATHERED = "SLUICE_PREFILL_PASSES"
"""For our plugin: passes for which prompts wait for each other while others generate."""
_PREFILL_PASSES = 8
"""So that one prompt's time goes to many: at 512 requests a step takes 8 to 12 ms, a prompt's pass
10 to 15. A response begins so many tokens later at most."""
_OWN_PREFILL = {"enable-mixed-chunk", "enable-prefill-delayer", "min-free-slots-delay"}
"""Arguments by which a user says himself what prompts wait for."""
_EXACT = "SLUICE_DETERMINISTIC"
"""For our plugin and our script: compute as the trainer does."""
_EXACT_ARGS: dict[str, Any] = {
    # The plugin's attention stands for this backend's.
    "attention-backend": "triton",
    # A prompt's pass would be compiled, and compilers put functions together.
    "disable-prefill-cuda-graph": True,
}
_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
_CPU_ARGS: dict[str, Any] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "dtype": "float32",
    "max-total-tokens": 16384,
    "sleep-on-idle": True,  # an idle scheduler would keep a core busy
    "skip-server-warmup": True,
}
_ALIASES = {
    "model": "model-path",
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dist-init-address": "dist-init-addr",
}


class Launch:
    """How SGLang is started."""

    health = "/health"
    undecided = UNDECIDED

    def plugin(self, spec: RLJobSpec) -> Plugin | None:
        return _PLUGIN if spec.weight_sync.engine_plugin else None

    def command(self, spec: RLJobSpec) -> list[str]:
        """SGLang as it is; with our plugin, by a script that adds a directory to its path."""
        return _COMMAND_WITH_PLUGIN if spec.weight_sync.engine_plugin else _COMMAND

    def missing(self) -> str:
        """Nothing: it is part of the environment that `make` sets up."""
        return ""

    def env(self, spec: RLJobSpec) -> dict[str, str]:
        """Variables of the server. On CPUs each tensor-parallel rank gets a core: SGLang wants a
        NUMA node for each.
        """
        rollout = spec.rollout
        if rollout.gpus_per_replica:
            exact = {_EXACT: "1"} if spec.trainer.deterministic else {}
            return _ENV | UNDECIDED | _graphs(spec) | _gathered(spec) | exact
        several = rollout.nodes_per_replica > 1
        return (
            _ENV
            | _CPU_ENV
            | ({_BIND: "|".join(map(str, range(rollout.nodes_per_replica)))} if several else {})
        )

    def caches(self, directory: str) -> dict[str, str]:
        """Of Triton, torch.compile and CUDA; of FlashInfer, DeepGEMM and SGLang's own kernels."""
        return kernel_cache.caches(directory) | {
            "FLASHINFER_WORKSPACE_BASE": directory,
            "SGLANG_CACHE_DIR": f"{directory}/sglang",
            "SGLANG_DG_CACHE_DIR": f"{directory}/deep_gemm",
            "TVM_FFI_CACHE_DIR": f"{directory}/tvm-ffi",
        }

    def args(self, spec: RLJobSpec, place: ServerPlacement) -> list[str]:
        """Arguments of the server: ours, with spec.rollout.engineArgs over them.

        Weights are not read from disk where the trainer brings them.
        """
        rollout, chosen = spec.rollout, normalized(spec.rollout.engine_args)
        args: dict[str, Any] = {
            "model-path": place.model,
            "host": place.bind,
            "port": place.port,
            "tp-size": max(rollout.gpus_per_replica, 1) * rollout.nodes_per_replica,
            "enable-metrics": True,
            "log-level-http": "warning",  # else a line for each request and each probe
        }
        if arguments.brought_by_trainer(spec):
            args["load-format"] = "dummy"
        if spec.model.trust_remote_code:
            args["trust-remote-code"] = True
        if spec.model.fp32_lm_head:
            args["enable-fp32-lm-head"] = True
        if spec.trainer.routing_replay == "rollout":
            args["enable-return-routed-experts"] = True
        if rollout.gpus_per_replica == 0:
            args |= _CPU_ARGS
        elif spec.trainer.colocate:
            args["enable-memory-saver"] = (
                True  # so that it can give its memory away in the trainer's turn
            )
        if rollout.gpus_per_replica and spec.trainer.deterministic:
            args |= _EXACT_ARGS
        if place.head is not None:
            args |= {
                "nnodes": rollout.nodes_per_replica,
                "node-rank": place.index,
                "dist-init-addr": place.head,
            }
        return render_args(args | chosen)


def _graphs(spec: RLJobSpec) -> dict[str, str]:
    """CUDA graphs for as many requests as the worker keeps open: SGLang's own limit goes by the
    GPU's memory, and what is above it runs kernel by kernel.

    Nothing where the user says how many there are to be.
    """
    args = normalized(spec.rollout.engine_args)
    if not spec.weight_sync.engine_plugin or not _OWN_GRAPHS.isdisjoint(args):
        return {}
    requests = max(spec.rollout.concurrency // int(args.get("dp-size", 1)), 1)
    return {_GRAPHS: str(min(requests, _MOST_GRAPHED))}


def _gathered(spec: RLJobSpec) -> dict[str, str]:
    """Prompts wait for each other (sluice_sglang/prefill_batching.py), unless the user says how."""
    own = not _OWN_PREFILL.isdisjoint(normalized(spec.rollout.engine_args))
    return {} if own or not spec.weight_sync.engine_plugin else {_GATHERED: str(_PREFILL_PASSES)}


def normalized(args: dict[str, Any]) -> dict[str, Any]:
    """memFractionStatic, mem_fraction_static and mem-fraction-static are one argument; tp is
    tp-size.
    """
    return arguments.normalized(args, _ALIASES)


def render_args(args: dict[str, Any]) -> list[str]:
    """`--name value`; True: the bare flag; False: left out; a list: all its values behind one
    flag.
    """
    words: list[str] = []
    for name, value in args.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(entry) for entry in value] if isinstance(value, list) else [str(value)]
    return words
