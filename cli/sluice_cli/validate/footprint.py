"""Does a model fit into this machine at all? Told from its files, before anything is started.

What is counted is the least that any layout needs: weights, gradients and the optimizer's state of
the trainer, spread over all of its GPUs, and the weights of the engines. Activations and caches
come on top, so a job that passes may still run out of memory.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.api import RLJob, RLJobSpec
from sluice_operator.cluster.local import gpus

_GIB = 1 << 30
_MOMENT_BYTES = {"fp32": 4, "bf16": 2}
# A header that is longer is none of a checkpoint's.
_MOST_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes of memory; of each GPU, None if nothing tells."""

    memory: int
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """The least bytes that a job takes. trainer_gpu, engine_gpu: of each GPU of theirs."""

    memory: int = 0
    trainer_gpu: int = 0
    engine_gpu: int = 0


def shortage(job: RLJob) -> str:
    """Why the model of a resolved job is too large for this machine; empty: it may fit."""
    spec = job.spec
    if spec.model.volume is not None:
        return ""
    count = parameters(Path(spec.model.path))
    return "" if count is None else lacking(spec, count, this_machine())


def lacking(spec: RLJobSpec, count: int, machine: Machine) -> str:
    """Say in a sentence why a machine is too small for so many parameters; empty: it may do."""
    least = needs(spec, count)
    model = f"spec.model.path: a model of {_billions(count)} parameters"
    cure = "take a smaller model, or a machine with more"
    if least.memory > machine.memory:
        return (
            f"{model} takes at least {_gib(least.memory)} of memory here, and this machine has "
            f"{_gib(machine.memory)}: {cure}"
        )
    if machine.gpu is None:
        return ""
    for role, each, field in (
        ("trainer", least.trainer_gpu, "trainer.gpusPerNode, or trainer.cpuOffload"),
        ("engine", least.engine_gpu, "rollout.gpusPerReplica"),
    ):
        if each > machine.gpu:
            return (
                f"{model} takes at least {_gib(each)} of each GPU of the {role}, and one has "
                f"{_gib(machine.gpu)}: {cure}, or raise {field}"
            )
    return ""


def needs(spec: RLJobSpec, count: int) -> Needs:
    """The least that a job with a model of so many parameters takes."""
    trainer, rollout = spec.trainer, spec.rollout
    host = trainer_gpu = engine_gpu = 0
    if not spec.debug.rollout_only:
        optimizer = trainer.optimizer
        moments = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
        # Weights in fp32 and the moments, which may be in the host's memory; and gradients in bf16.
        state, gradients = count * (4 + sum(_MOMENT_BYTES[kind] for kind in moments)), 2 * count
        if not spec.on_gpu:
            host = state + gradients
        elif trainer.cpu_offload == "all":
            host = state
        else:
            fraction = trainer.cpu_offload_fraction or 1.0
            host = int(state * fraction) if trainer.cpu_offload == "optimizer" else 0
            trainer_gpu = (state - host + gradients) // trainer.world_size
    engines = spec.replicas
    if engines and rollout.gpus_per_replica:
        engine_gpu = 2 * count // (rollout.gpus_per_replica * rollout.nodes_per_replica)
    elif engines:
        host += 4 * count * engines  # an engine computes in fp32 on a CPU
    return Needs(host, trainer_gpu, engine_gpu)


def parameters(directory: Path) -> int | None:
    """Parameters of a checkpoint: of its safetensors, else by its config.json; None: unknown."""
    files = sorted(directory.glob("*.safetensors"))
    try:
        if files:
            return sum(_in_file(path) for path in files)
        return by_config(json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError):  # other checks say what is wrong with them
        return None


def by_config(config: Mapping[str, Any]) -> int | None:
    """Parameters of a decoder by its configuration; None if it is of another kind."""
    config = config.get("text_config", config)
    if "kv_lora_rank" in config or "hidden_size" not in config:
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * head * (heads + groups)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    feed_forward = 3 * hidden * (width * experts if experts else config["intermediate_size"])
    embeddings = 1 if config.get("tie_word_embeddings") else 2
    layers = config["num_hidden_layers"]
    total = layers * (attention + feed_forward) + embeddings * config["vocab_size"] * hidden
    return int(total)


def _in_file(path: Path) -> int:
    """Parameters of a safetensors file, by its header alone."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{path}: not a safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")


def this_machine() -> Machine:
    """The memory that processes may have here: of the machine, or less in a container."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _swap()
    limits = [
        int(text)
        for path in (
            Path("/sys/fs/cgroup/memory.max"),
            Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        )
        if path.exists() and (text := path.read_text().strip()).isdigit()
    ]
    return Machine(min([memory, *limits]), _gpu_memory())


def _swap() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("SwapTotal:"))


def _gpu_memory() -> int | None:
    """Bytes of the largest GPU here, as the driver's own program tells; None: it does not."""
    if not gpus.visible_gpus():
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return max(int(line) for line in done.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):  # no such program, or no number
        return None


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.0f}M"


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
