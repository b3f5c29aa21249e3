"""Command line and environment of an SGLang server, which runs in a container of its image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sluice.api import RLJobSpec
from sluice.api.groups.data import ModelSource
from sluice.api.groups.lora import ALL_LINEAR
from sluice.api.pool import PoolModel, RLEnginePoolSpec
from sluice.engines import arguments
from sluice.engines.plugin_common import precision
from sluice.engines.protocol import Plugin, ServerPlacement
from sluice.runtime import kernel_cache

PLUGIN_DIR = "/sluice/sglang"
_COMMAND = ["python3", "-m", "sglang.launch_server"]
_COMMAND_WITH_PLUGIN = ["python3", f"{PLUGIN_DIR}/launch_server.py"]
_PLUGIN = Plugin("sglang", PLUGIN_DIR, ("python", "-m", "sluice.engines.sglang.plugin", PLUGIN_DIR))
_ENV = {
    # Makes /health say at once that the server lives, also while it is paused for an update. The
    # default generates a token.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
# NCCL's default, in a form that SGLang does not change: if the variable is missing it sets 0, which
# also rules out NVLink across hosts (MNNVL). Trainer and engine must agree, or the sender of an
# update waits for ever. So both keep the default, unless a template sets it.
UNDECIDED = {"NCCL_CUMEM_ENABLE": "-2"}
# SGLang keeps what the vision tower has computed of an image, also when an update brings another
# tower. Requests for one prompt share its images by the prefix cache, which an update empties.
IMAGE_ENV = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
_CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Compiling needs a C++ compiler in the image, and costs more than it saves.
    "TORCH_COMPILE_DISABLE": "1",
    # With two OpenMP threads on a busy machine a tiny model is 10 to 40 times slower.
    "OMP_NUM_THREADS": "1",
}
# Read by the launch script, which knows how the image's release spells the argument.
_GRAPHS_VARIABLE = "SLUICE_CUDA_GRAPH_MAX_BS"
# Requests of the largest graph: SGLang's limit on the largest GPUs. Each graph costs memory and
# time at the start.
_MOST_GRAPHED = 512
# Arguments by which a user says for how many requests there are graphs. Others of similar names,
# such as disable-piecewise-cuda-graph, concern prompts.
_GRAPH_ARGS = {
    "cuda-graph-backend-decode",
    "cuda-graph-bs",
    "cuda-graph-bs-decode",
    "cuda-graph-config",
    "cuda-graph-max-bs",
    "cuda-graph-max-bs-decode",
    "disable-cuda-graph",
    "disable-decode-cuda-graph",
}
# Read by the plugin: passes for which prompts wait for each other while other requests generate.
_PREFILL_VARIABLE = "SLUICE_PREFILL_PASSES"
# So that many prompts share one pass: at 512 requests a step takes 8 to 12 ms, a prompt's pass 10
# to 15 ms. A response begins at most this many tokens later.
_PREFILL_PASSES = 8
# Arguments by which a user says what prompts wait for.
_PREFILL_ARGS = {"enable-mixed-chunk", "enable-prefill-delayer", "min-free-slots-delay"}
# Read by the plugin and the launch script: compute as the trainer does.
_DETERMINISTIC = "SLUICE_DETERMINISTIC"
_DETERMINISTIC_ARGS: dict[str, Any] = {
    # The plugin replaces this backend's attention.
    "attention-backend": "triton",
    # Without this the pass of a prompt is compiled, and compilers fuse functions.
    "disable-prefill-cuda-graph": True,
}
# Read by the plugin and the launch script: how the engine speculates.
_SPECULATIVE = "SLUICE_SPECULATIVE"
# SGLang's names of the algorithms of rollout.speculative.
_ALGORITHMS = {"ngram": "NGRAM", "eagle3": "EAGLE3", "mtp": "NEXTN", "draft": "STANDALONE"}
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
    """The start of SGLang."""

    health = "/health"
    undecided = UNDECIDED

    def plugin(self, spec: RLJobSpec) -> Plugin | None:
        return _PLUGIN if spec.weight_sync.engine_plugin else None

    def command(self, spec: RLJobSpec) -> list[str]:
        """Return SGLang's command or, with the plugin, a script that extends its path."""
        return _COMMAND_WITH_PLUGIN if spec.weight_sync.engine_plugin else _COMMAND

    def missing(self) -> str:
        """Return an empty text: `make` installs SGLang in sluice's environment."""
        return ""

    def env(self, spec: RLJobSpec) -> dict[str, str]:
        """Return variables of the server.

        On CPUs each tensor-parallel rank gets a core, because SGLang wants a NUMA node for each.
        """
        rollout = spec.rollout
        further = arguments.adapter_variables(spec) | (
            IMAGE_ENV if spec.data.images is not None else {}
        )
        if rollout.precision != "bf16":
            further[precision.VARIABLE] = rollout.precision
        if rollout.speculative is not None:
            further[_SPECULATIVE] = rollout.speculative.algorithm
        if rollout.gpus_per_replica:
            deterministic = {_DETERMINISTIC: "1"} if spec.trainer.deterministic else {}
            scheduling = {}
            if spec.weight_sync.engine_plugin:
                scheduling = _scheduling(rollout.engine_args, rollout.concurrency)
            return _ENV | UNDECIDED | scheduling | deterministic | further
        several = rollout.nodes_per_replica > 1
        return (
            _ENV
            | _CPU_ENV
            | further
            | ({_BIND: "|".join(map(str, range(rollout.nodes_per_replica)))} if several else {})
        )

    def caches(self, directory: str) -> dict[str, str]:
        """Return variables for the caches of compilers, FlashInfer, DeepGEMM and SGLang."""
        return kernel_cache.caches(directory) | {
            "FLASHINFER_WORKSPACE_BASE": directory,
            "SGLANG_CACHE_DIR": f"{directory}/sglang",
            "SGLANG_DG_CACHE_DIR": f"{directory}/deep_gemm",
            "TVM_FFI_CACHE_DIR": f"{directory}/tvm-ffi",
        }

    def args(self, spec: RLJobSpec, place: ServerPlacement) -> list[str]:
        """Return the server's arguments: sluice's, overridden by spec.rollout.engineArgs.

        Weights are not read from disk if the trainer sends them.
        """
        rollout, chosen = spec.rollout, normalized(spec.rollout.engine_args)
        args = _server_args(place, max(rollout.gpus_per_replica, 1) * rollout.nodes_per_replica)
        if arguments.brought_by_trainer(spec):
            args["load-format"] = "dummy"
        args |= _model_args(spec.model)
        if rollout.kv_cache_dtype != "auto":
            args["kv-cache-dtype"] = rollout.kv_cache_dtype
        if spec.trainer.routing_replay == "rollout":
            args["enable-return-routed-experts"] = True
        if spec.data.images is not None:
            args |= image_args(on_cpu=rollout.gpus_per_replica == 0)
        args |= _speculative_args(spec, place)
        if rollout.gpus_per_replica == 0:
            args |= _CPU_ARGS
        elif spec.trainer.colocate:
            # Lets the engine release its memory for the trainer.
            args["enable-memory-saver"] = True
            # An update brings the adapter alone, so the engine keeps the model in host memory.
            args["enable-weights-cpu-backup"] = spec.weight_sync.lora == "adapter"
        if rollout.gpus_per_replica and spec.trainer.deterministic:
            args |= _DETERMINISTIC_ARGS
        if arguments.held_versions(spec):
            args |= _adapter_args(spec)
        if place.head is not None:
            args |= {
                "nnodes": rollout.nodes_per_replica,
                "node-rank": place.index,
                "dist-init-addr": place.head,
            }
        return render_args(args | chosen)

    # --- engines of a pool, which always have the plugin

    def pool_plugin(self) -> Plugin:
        return _PLUGIN

    def pool_command(self) -> list[str]:
        return _COMMAND_WITH_PLUGIN

    def pool_env(self, spec: RLEnginePoolSpec) -> dict[str, str]:
        """Return variables of a pool's server, but for the pool's key."""
        settings = {"rank": spec.max_rank, "versions": 1, "jobs": spec.max_adapters}
        on_gpu = UNDECIDED | _scheduling(spec.engine_args, _MOST_GRAPHED)
        device = on_gpu if spec.gpus_per_replica else _CPU_ENV
        return _ENV | device | {arguments.ADAPTER_VARIABLE: json.dumps(settings)}

    def pool_args(self, spec: RLEnginePoolSpec, place: ServerPlacement) -> list[str]:
        """Return the arguments of a pool's server: sluice's, overridden by spec.engineArgs."""
        on_cpu = spec.gpus_per_replica == 0
        args = _server_args(place, max(spec.gpus_per_replica, 1))
        # SGLang's own first request has no credential: it would be refused, and SGLang would end.
        args |= {"skip-server-warmup": True}
        args |= lora_args(spec.max_rank, spec.target_modules, spec.max_adapters, on_cpu=on_cpu)
        args |= _model_args(spec.model)
        return render_args(args | (_CPU_ARGS if on_cpu else {}) | normalized(spec.engine_args))


def _server_args(place: ServerPlacement, ranks: int) -> dict[str, Any]:
    return {
        "model-path": place.model,
        "host": place.bind,
        "port": place.port,
        "tp-size": ranks,
        "enable-metrics": True,
        "log-level-http": "warning",  # else a line for each request and each probe
    }


def _model_args(model: ModelSource | PoolModel) -> dict[str, Any]:
    """Return the arguments that the model asks for. `False` leaves a flag out."""
    return {
        "trust-remote-code": model.trust_remote_code,
        "enable-fp32-lm-head": model.fp32_lm_head,
    }


def image_args(*, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of a server that gets images."""
    return {
        "enable-multimodal": True,  # some families serve text alone by default
        # Scales images with Pillow, as the trainer does (sluice/images/processor.py). The other
        # implementation gives other pixels, also depending on the device.
        "disable-fast-image-processor": True,
    } | ({"mm-attention-backend": "sdpa"} if on_cpu else {})


def _scheduling(engine_args: Mapping[str, Any], concurrency: int) -> dict[str, str]:
    """Return variables of the plugin for graphs and prompts, unless the user says how.

    There are CUDA graphs of as many requests as workers keep open: SGLang's limit depends on the
    GPU's memory, and larger batches run kernel by kernel. Prompts wait for each other
    (sluice_sglang/prefill_batching.py).
    """
    args, variables = normalized(engine_args), dict[str, str]()
    if _GRAPH_ARGS.isdisjoint(args):
        requests = max(concurrency // int(args.get("dp-size", 1)), 1)
        variables[_GRAPHS_VARIABLE] = str(min(requests, _MOST_GRAPHED))
    if _PREFILL_ARGS.isdisjoint(args):
        variables[_PREFILL_VARIABLE] = str(_PREFILL_PASSES)
    return variables


def _speculative_args(spec: RLJobSpec, place: ServerPlacement) -> dict[str, Any]:
    """Return the arguments of a server that verifies proposed tokens, if it does."""
    rollout, speculative = spec.rollout, spec.rollout.speculative
    if speculative is None:
        return {}
    args: dict[str, Any] = {
        "speculative-algorithm": _ALGORITHMS[speculative.algorithm],
        "speculative-num-draft-tokens": speculative.verified_tokens,
        "max-running-requests": rollout.concurrency,  # by default 48 with speculative decoding
    }
    if speculative.algorithm == "ngram":
        return args | {"speculative-ngram-max-bfs-breadth": speculative.top_k}
    return args | {
        "speculative-num-steps": speculative.steps,
        "speculative-eagle-topk": speculative.top_k,
        "speculative-draft-model-path": place.draft or place.model,
        # By default as the model, which is not read from disk if the trainer sends it.
        "speculative-draft-load-format": "auto",
        # No update brings these weights again after the trainer has had the GPU's memory.
        "enable-draft-weights-cpu-backup": spec.trainer.colocate and rollout.gpus_per_replica > 0,
    }


def _adapter_args(spec: RLJobSpec) -> dict[str, Any]:
    """Return the arguments of a server with memory for the trainer's adapter."""
    lora = spec.trainer.lora
    assert lora is not None
    on_cpu = spec.rollout.gpus_per_replica == 0
    return lora_args(
        lora.stored_rank, lora.adapted_names, arguments.held_versions(spec), on_cpu=on_cpu
    )


def lora_args(rank: int, layers: list[str], adapters: int, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments for adapters: the largest rank, their layers, how many in a batch."""
    return {
        "enable-lora": True,
        "max-lora-rank": rank,
        "lora-target-modules": ["all"] if ALL_LINEAR in layers else layers,
        # Another one is for requests without adapter, such as those of SGLang's start.
        "max-loras-per-batch": adapters + 1,
    } | ({"lora-backend": "torch_native"} if on_cpu else {})


def normalized(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by one spelling and name each, such as `tp-size` for `tp`."""
    return arguments.normalized(args, _ALIASES)


def render_args(args: dict[str, Any]) -> list[str]:
    """Return words: `--name value`; the bare flag for True; no word for False.

    A list has all its values after one flag.
    """
    words: list[str] = []
    for name, value in args.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(entry) for entry in value] if isinstance(value, list) else [str(value)]
    return words
