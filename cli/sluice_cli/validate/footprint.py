"""Estimate from a model's files whether it fits into this machine, before a run starts.

The estimate is a lower bound: the trainer's weights, gradients and optimizer state, spread over all
its GPUs, and the engines' weights. With `data.images` a vision tower is whole in each GPU while a
pass runs, and without the trainer has none. Activations and caches are not counted, so a job that
passes may still run out of memory.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.api import RLEnginePoolSpec, RLJob, RLJobSpec
from sluice.api.groups.rollout import Precision
from sluice.api.groups.trainer import VisionPart
from sluice.model_parts import is_vision, safetensors_header, vision_part
from sluice_operator.cluster.local import gpus

_GIB = 1 << 30
_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of a machine and of each of its GPUs in bytes; None if it is unknown."""

    memory: int
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Lower bounds in bytes: in the machine, in each GPU of the trainer and of the engines."""

    memory: int = 0
    trainer_gpu: int = 0
    engine_gpu: int = 0


def shortage(job: RLJob) -> str:
    """Say why the model of a resolved job does not fit into this machine; empty if it may fit."""
    spec = job.spec
    if spec.model.volume is not None:
        return ""
    count = parameters(Path(spec.model.path))
    if count is None:
        return ""
    return shortage_on(spec, count, this_machine(), vision_parameters(Path(spec.model.path)))


def pool_shortage(spec: RLEnginePoolSpec) -> str:
    """Say why the engines of a resolved pool do not fit into this machine; empty if they may."""
    count = parameters(Path(spec.model.path))
    if count is None:
        return ""
    least = _of_engines(count, spec.replicas, spec.gpus_per_replica)
    return _comparison(least, count, this_machine())


def shortage_on(
    spec: RLJobSpec,
    count: int,
    machine: MachineMemory,
    vision: Mapping[VisionPart, int] | None = None,
) -> str:
    """Say why `count` parameters do not fit into a machine; empty if they may fit.

    vision: those of each part of the vision side, which `count` includes.
    """
    return _comparison(needs(spec, count, vision), count, machine)


def _comparison(least: MemoryNeeds, count: int, machine: MachineMemory) -> str:
    model = f"spec.model.path: a model of {_billions(count)} parameters"
    if least.memory > machine.memory:
        return (
            f"{model} takes at least {_gib(least.memory)} of memory, and this machine has "
            f"{_gib(machine.memory)}: use a smaller model, or a machine with more memory"
        )
    if machine.gpu is None:
        return ""
    for role, size, remedy in (
        ("trainer", least.trainer_gpu, "raise trainer.gpusPerNode, or set trainer.cpuOffload"),
        ("engine", least.engine_gpu, "raise gpusPerReplica of the engines"),
    ):
        if size > machine.gpu:
            return (
                f"{model} takes at least {_gib(size)} of each GPU of the {role}, and a GPU has "
                f"{_gib(machine.gpu)}: use a smaller model or larger GPUs, {remedy}"
            )
    return ""


def needs(
    spec: RLJobSpec, count: int, vision: Mapping[VisionPart, int] | None = None
) -> MemoryNeeds:
    """Return the least memory that a job with a model of `count` parameters takes.

    Engines of a pool are not the job's. vision: parameters of each part of the vision side, which
    `count` includes.
    """
    trainer, rollout = spec.trainer, spec.rollout
    host = trainer_gpu = 0
    if not spec.debug.rollout_only:
        trained, kept, whole = _vision_bytes(spec, vision or {})
        language = count - sum((vision or {}).values())
        state, gradients = _state_and_gradients(spec, language + trained)
        state += kept
        if not spec.on_gpu:
            host = state + gradients
        elif trainer.cpu_offload == "all":
            host, trainer_gpu = state, whole
        else:
            fraction = trainer.cpu_offload_fraction or 1.0
            host = int(state * fraction) if trainer.cpu_offload == "optimizer" else 0
            trainer_gpu = (state - host + gradients) // trainer.world_size + whole
    gpus_of_engine = rollout.gpus_per_replica * rollout.nodes_per_replica
    engines = _of_engines(count, spec.own_engines, gpus_of_engine, rollout.precision)
    return MemoryNeeds(host + engines.memory, trainer_gpu, engines.engine_gpu)


def _vision_bytes(spec: RLJobSpec, vision: Mapping[VisionPart, int]) -> tuple[int, int, int]:
    """Return what the vision side takes in the trainer, which has none without `data.images`.

    (parameters that are trained, bytes of frozen ones over all ranks, bytes of the whole side in
    each GPU while a pass runs, if ranks share it).
    """
    trainer = spec.trainer
    if spec.data.images is None:
        return 0, 0, 0
    size = _BYTES[_precision(spec)]
    parts = () if trainer.lora else trainer.trained_parts
    trained = sum(vision.get(part, 0) for part in parts)
    gathered = trainer.world_size > 1 or trainer.cpu_offload == "all"
    total = sum(vision.values())
    return trained, size * (total - trained), size * total if gathered else 0


def _precision(spec: RLJobSpec) -> str:
    return spec.trainer.precision or ("bf16" if spec.on_gpu else "fp32")


def _state_and_gradients(spec: RLJobSpec, count: int) -> tuple[int, int]:
    """Return the bytes of weights with their moments, and of gradients.

    If the model has adapters, only the frozen weights count.
    """
    trainer, optimizer = spec.trainer, spec.trainer.optimizer
    if trainer.lora is None:
        moments = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
        # The state is fp32 weights and the moments, and may be offloaded to the host's memory.
        # Gradients are bf16.
        return count * (4 + sum(_BYTES[kind] for kind in moments)), 2 * count
    if trainer.lora.quantize_base:
        # 4 bits, and a float32 for 64 weights. Every process holds all of them.
        return count * 9 // 16 * trainer.world_size, 0
    return _BYTES[_precision(spec)] * count, 0


def _of_engines(
    count: int, engines: int, gpus_of_engine: int, precision: Precision = "bf16"
) -> MemoryNeeds:
    """Return the needs of engines, which hold bf16 weights on GPUs and fp32 ones on a CPU.

    Quantized weights count one byte each.
    """
    size = 1 if precision != "bf16" else 2 if gpus_of_engine else 4
    if engines and gpus_of_engine:
        return MemoryNeeds(engine_gpu=size * count // gpus_of_engine)
    return MemoryNeeds(memory=size * count * engines)


def parameters(directory: Path) -> int | None:
    """Count the parameters in a checkpoint's safetensors, or else by its config.json.

    Returns None if neither is there or can be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    try:
        if files:
            return sum(_in_file(path) for path in files)
        return by_config(json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError):  # other checks report a broken checkpoint
        return None


def vision_parameters(directory: Path) -> dict[VisionPart, int]:
    """Count the parameters of tower and projector in a checkpoint's safetensors.

    Empty if it has neither, or if they cannot be read.
    """
    counts: Counter[VisionPart] = Counter()
    try:
        for path in directory.glob("*.safetensors"):
            for name, tensor in safetensors_header(path).items():
                if is_vision(name):
                    counts[vision_part(name)] += math.prod(tensor["shape"])
    except (OSError, ValueError, KeyError, TypeError):  # other checks report a broken checkpoint
        return {}
    return dict(counts)


def by_config(config: Mapping[str, Any]) -> int | None:
    """Count the parameters of a decoder by its configuration; None for other architectures."""
    # Models with several modalities nest the decoder's configuration.
    config = config.get("text_config", config)
    # The formula below does not hold for latent attention (DeepSeek).
    if "kv_lora_rank" in config or "hidden_size" not in config:
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    # Queries and the output have all heads, keys and values have the key-value heads.
    attention = 2 * hidden * head * (heads + groups)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    # SwiGLU has three matrices: gate, up and down.
    feed_forward = 3 * hidden * (width * experts if experts else config["intermediate_size"])
    embeddings = 1 if config.get("tie_word_embeddings") else 2
    layers = config["num_hidden_layers"]
    total = layers * (attention + feed_forward) + embeddings * config["vocab_size"] * hidden
    return int(total)


def _in_file(path: Path) -> int:
    """Count the parameters of a safetensors file by its header."""
    return sum(math.prod(tensor["shape"]) for tensor in safetensors_header(path).values())


def this_machine() -> MachineMemory:
    """Return the memory that processes of this machine, or of this container, may use."""
    # A container's limit may be less than the machine's memory: cgroup version 2 or version 1.
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _swap()
    limits = [
        int(text)
        for path in (
            Path("/sys/fs/cgroup/memory.max"),
            Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        )
        if path.exists() and (text := path.read_text().strip()).isdigit()
    ]
    return MachineMemory(min([memory, *limits]), _gpu_memory())


def _swap() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("SwapTotal:"))


def _gpu_memory() -> int | None:
    """Return the bytes of the largest visible GPU by nvidia-smi, or None."""
    if not gpus.visible_gpus():
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return max(int(line) for line in done.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):  # nvidia-smi is missing or failed
        return None


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.0f}M"


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
