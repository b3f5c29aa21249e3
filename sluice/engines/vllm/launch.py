"""Command line and environment of a vLLM server, which runs in a container of its image."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sluice.api import RLJobSpec, Sampling
from sluice.engines.arguments import (
    adapter_variables,
    brought_by_trainer,
    held_versions,
    normalized,
)
from sluice.engines.protocol import Plugin, ServerPlacement
from sluice.runtime import kernel_cache

PLUGIN_DIR = "/sluice/vllm"
PYTHON_FINDER = Path(__file__).parent / "plugin" / "path" / "sluice_vllm" / "python.py"
_COMMAND = ["python3", f"{PLUGIN_DIR}/launch_server.py"]
_PLUGIN = Plugin("vllm", PLUGIN_DIR, ("python", "-m", "sluice.engines.vllm.plugin", PLUGIN_DIR))
_ENV = {
    # Enables the calls that pause it, change its weights and put it to sleep.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_ENV = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default it takes nearly all memory of the machine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines would share the first cores
    "OMP_NUM_THREADS": "1",
}
_ARGS: dict[str, Any] = {
    "enable-scale-out": True,  # enables /inference/v1/generate
    "disable-uvicorn-access-log": True,  # it logs each request and each probe
    "worker-extension-cls": "sluice_vllm.worker.Weights",
    "middleware": [
        "sluice_vllm.adapters.Adapters",
        "sluice_vllm.attempt_fence.Fence",
        "sluice_vllm.pauses.Pauses",
    ],
}
_CPU_ARGS: dict[str, Any] = {
    "enforce-eager": True,  # else it compiles, for which there may be no compiler
    "dtype": "float32",
    "max-num-seqs": 256,
}
_ALIASES = {
    "model-path": "model",
    "tp": "tensor-parallel-size",
    "tp-size": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "pp-size": "pipeline-parallel-size",
    "context-length": "max-model-len",
}
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# The only argument that is repeated before each of its values.
_REPEATED = "middleware"


class Launch:
    """The start of vLLM."""

    health = "/health"
    undecided: Mapping[str, str] = MappingProxyType({})

    def plugin(self, spec: RLJobSpec) -> Plugin | None:
        return _PLUGIN

    def command(self, spec: RLJobSpec) -> list[str]:
        return _COMMAND

    def missing(self) -> str:
        """Return one sentence if neither this Python nor that of `make vllm` has vLLM."""
        find = runpy.run_path(str(PYTHON_FINDER))["other_python"]
        try:
            find()
        except LookupError as error:
            return str(error.args[0])
        return ""

    def env(self, spec: RLJobSpec) -> dict[str, str]:
        device = {} if spec.rollout.gpus_per_replica else _CPU_ENV
        return _ENV | device | adapter_variables(spec)

    def caches(self, directory: str) -> dict[str, str]:
        """Return variables for the caches of compilers, FlashInfer and vLLM."""
        return kernel_cache.caches(directory) | {
            "FLASHINFER_WORKSPACE_BASE": directory,
            "VLLM_CACHE_ROOT": f"{directory}/vllm",
        }

    def args(self, spec: RLJobSpec, place: ServerPlacement) -> list[str]:
        """Return the server's arguments: sluice's, overridden by spec.rollout.engineArgs.

        Weights are not read from disk if the trainer sends them.
        """
        rollout, chosen = spec.rollout, normalized(spec.rollout.engine_args, _ALIASES)
        args: dict[str, Any] = {
            "model": place.model,
            "host": place.bind,
            "port": place.port,
            "tensor-parallel-size": max(rollout.gpus_per_replica, 1),
            "logprobs-mode": logprobs_mode(rollout.sampling),
            **_ARGS,
        }
        if brought_by_trainer(spec):
            args["load-format"] = "dummy"
        if spec.model.trust_remote_code:
            args["trust-remote-code"] = True
        if spec.model.fp32_lm_head:
            # Set by its path: vLLM merges such arguments, so other overrides of engineArgs stay.
            args["hf-overrides.head_dtype"] = "float32"
        if rollout.kv_cache_dtype != "auto":
            args["kv-cache-dtype"] = rollout.kv_cache_dtype
        if rollout.gpus_per_replica == 0:
            args |= _CPU_ARGS
        elif spec.trainer.colocate:
            args["enable-sleep-mode"] = True  # lets it release its memory for the trainer
        if spec.trainer.lora is not None and spec.weight_sync.lora == "adapter":
            args |= lora_args(spec.trainer.lora.stored_rank, held_versions(spec))
        return render_args(args | chosen)


def lora_args(rank: int, versions: int) -> dict[str, Any]:
    """Return the arguments for adapters of a rank. versions: as `held_versions` returns it."""
    return {
        "enable-lora": True,
        # vLLM has memory for adapters of these ranks only.
        "max-lora-rank": next(most for most in _RANKS if most >= rank),
        # Another one is of responses that still use an older version.
        "max-loras": versions + 1 if versions else 1,
    }


def logprobs_mode(sampling: Sampling) -> str:
    """Return vLLM's mode for log-probs as the trainer computes them.

    Those are of all tokens, with logits divided by the temperature. vLLM has log-probs of the
    distribution that it samples from, in which top-p and top-k leave tokens out, or of the model's,
    without temperature. The API refuses a job that needs a third kind.
    """
    return "raw_logprobs" if sampling.truncated else "processed_logprobs"


def render_args(args: dict[str, Any]) -> list[str]:
    """Return words: `--name value`; for True and False `--name` and `--no-name`.

    A list has all its values after one flag.
    """
    words: list[str] = []
    for name, value in args.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list) and name == _REPEATED:
            words += [word for entry in value for word in (f"--{name}", str(entry))]
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words
