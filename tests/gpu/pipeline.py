"""Pipelines on two GPUs compared with one GPU: five steps of a tiny Qwen3, in float32 and bf16.

    python tests/gpu/pipeline.py             equal, uneven and interleaved stages, recompute
    python tests/gpu/pipeline.py --offload   the optimizer in host memory too: on one GPU, with
    turns, a resume, and on two
    python tests/gpu/pipeline.py --cpu       the rehearsal, by gloo

Losses, gradient norms, log-probs and weights are compared with those of one GPU. In float32 they
must be equal up to the order of sums. In bf16 they may differ from one GPU's three times as much as
those differ from its float32 results: two runs are rounded in both directions, and the worst of
five steps varies. Weights are compared on average, because a single weight that is rounded the
other way differs by a hundredth. The exit code is 1 if a difference is larger.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

STEPS = 5
# The run with which all others are compared.
ONE = "one"
PIPELINES: dict[str, dict[str, Any]] = {
    "pipeline 2": {"parallelism": {"pipeline": 2}},
    "pipeline 2, virtual 2": {"parallelism": {"pipeline": 2, "virtualPipeline": 2}},
    "stages of 1 and 3 layers": {"parallelism": {"pipeline": 2, "firstStageLayers": 1}},
    "pipeline 2, recompute": {"parallelism": {"pipeline": 2}, "recompute": "selective"},
    "virtual 2, recompute": {
        "parallelism": {"pipeline": 2, "virtualPipeline": 2},
        "recompute": "selective",
        "recomputeModules": ["core_attn", "mlp"],
    },
}
HOST: dict[str, Any] = {"cpuOffload": "optimizer"}
HALF: dict[str, Any] = {**HOST, "cpuOffloadFraction": 0.5}
COMPACT = {"optimizer": {"lr": 1e-3, "eps": 1e-5, "expAvgDtype": "bf16", "expAvgSqDtype": "bf16"}}
OFFLOADS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "optimizer on the host": HOST,
        "half of it": HALF,
        "with turns": {**HOST, "colocate": True, "offload": "all"},
        "resumed": {**HALF, "resume": True},
        "moments in bf16": {**COMPACT, "resume": True},
        "moments in bf16, host": {**COMPACT, **HOST},
    },
    2: {
        "on the host, data 2": HOST,
        "on the host, pipeline 2": {**HALF, "parallelism": {"pipeline": 2}},
    },
}
# Runs that are compared with another run than `ONE`.
BESIDE = {"moments in bf16": "moments in bf16, host", "moments in bf16, host": "moments in bf16"}
NUMBERS = ("loss", "norm", "log-probs", "weights")
# Differences that the order of sums causes; relative for the norm. A step moves a weight by at most
# 1e-3.
FLOAT32 = {"loss": 1e-5, "norm": 5e-4, "log-probs": 2e-3, "weights": 1e-6}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, also where GPUs are")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory:
        ranks(options)
        return 0
    with tempfile.TemporaryDirectory() as name:
        directory, results = Path(name), dict[str, dict[str, Any]]()
        for world in (1, 2):
            if code := launch(options, directory, world):
                print(f"FAILED: {world} processes ended with {code}")
                return 1
            results |= torch.load(directory / f"{world}.pt")
    return report(results)


def launch(options: argparse.Namespace, directory: Path, world: int) -> int:
    """Run all cases for this number of ranks and return the exit code."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "PYTHONPATH": path}
    if options.cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", __file__, *sys.argv[1:]]
    return subprocess.run(
        [*command, "--directory", str(directory)], env=environment, timeout=500
    ).returncode


def ranks(options: argparse.Namespace) -> None:
    """Run the cases of one rank, one after another; rank 0 writes the results."""
    import torch.distributed as dist

    from sluice_trainer.distributed.process_group import join
    from sluice_trainer.megatron import parallel
    from tests.integration.trainer import tiny

    join(timedelta(seconds=120))
    model, world = options.directory / "model", dist.get_world_size()
    if world == 1:
        tiny.save_model("qwen3-tied", model)
    cases = {ONE: dict[str, Any]()} if world == 1 else dict(PIPELINES)
    cases |= OFFLOADS[world] if options.offload else {}
    results = {
        f"{name}/{precision}": case(model, dict(trainer), precision)
        for name, trainer in cases.items()
        for precision in ("fp32", "bf16")
    }
    if dist.get_rank() == 0:
        torch.save(results, options.directory / f"{world}.pt")
    parallel.shutdown()


def case(model: Path, trainer: dict[str, Any], precision: str) -> dict[str, Any]:
    """Train five steps in one layout.

    Return its numbers, the median step time, and the GPU's memory.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    from sluice_trainer.megatron.policy import MegatronPolicy
    from tests.integration.trainer import tiny

    world, cuda = dist.get_world_size(), torch.cuda.is_available()
    resume, layout = trainer.pop("resume", False), trainer.setdefault("parallelism", {})
    trainer |= {"gpusPerNode": world if cuda else 0, "processesPerNode": world}
    spec = tiny.spec(
        model,
        trainer={**trainer, "precision": precision, "maxTokensPerGpu": 128},
        rollout={"gpusPerReplica": 1 if cuda else 0},
        algorithm={"kl": {"lossCoef": 0.05}, "entropyCoef": 0.01},
    )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    policy = MegatronPolicy(spec, model_dir=model, timeout=timedelta(seconds=120))
    losses, norms, seconds = [], [], []
    for number in range(STEPS):
        if resume and number == 3:
            with tempfile.TemporaryDirectory() as directory:
                tiny.save(policy, Path(directory), number)
                policy = MegatronPolicy(spec, model_dir=model, timeout=timedelta(seconds=120))
                assert policy.load_latest(Path(directory)) == number
        batch = tiny.batch(16, seed=number, longest=100)
        shard = batch[policy.ranks.data_parallel_rank :: policy.ranks.data_parallel_size]
        started = time.perf_counter()
        metrics = policy.train([shard], [tiny.totals(batch)])
        seconds.append(time.perf_counter() - started)
        losses.append(metrics["train/loss"])
        norms.append(metrics["train/grad_norm"])
        if trainer.get("colocate"):
            policy.offload(weights=True)
            policy.restore()
    log_probs = policy.log_probs(tiny.batch(16, seed=99, longest=100))
    tensors = [tensor.float().flatten().cpu() for _, tensor in policy.hf_tensors()]
    assert layout.get("pipeline", 1) == parallel_state.get_pipeline_model_parallel_world_size()
    return {
        "loss": torch.tensor(losses),
        "norm": torch.tensor(norms),
        "log-probs": torch.cat(log_probs),
        "weights": torch.cat(tensors),
        "seconds": sorted(seconds[1:])[len(seconds) // 2 - 1],
        "mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0,
    }


def report(results: dict[str, dict[str, Any]]) -> int:
    """Print a table of differences, and return 1 if one exceeds its bound."""
    by_rounding = apart(results[f"{ONE}/bf16"], results[f"{ONE}/fp32"])
    bf16 = {name: 3 * difference for name, difference in by_rounding.items()}
    bounds = {"fp32": FLOAT32, "bf16": bf16}
    header = ["case", "type", *NUMBERS, "ms", "MiB", ""]
    rows = [["may differ by", name, *map(short, bound.values())] for name, bound in bounds.items()]
    failed = False
    for key, result in results.items():
        name, precision = key.split("/")
        differences = apart(result, results[f"{BESIDE.get(name, ONE)}/{precision}"])
        above = [n for n in NUMBERS if not differences[n] <= bounds[precision][n]]
        failed |= bool(above)
        times = f"{result['seconds'] * 1e3:.0f}", f"{result['mib']:.0f}"
        verdict = f"FAILED: {', '.join(above)}" if above else "equal"
        rows.append([name, precision, *map(short, differences.values()), *times, verdict])
    rows = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(" | ".join(cells).rstrip(" |"))
    return int(failed)


def apart(result: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return the largest difference of each number (relative for the norm, mean for weights)."""
    differences = {name: (result[name] - other[name]).abs() for name in NUMBERS}
    differences["norm"] /= other["norm"]
    return {
        name: (difference.mean() if name == "weights" else difference.max()).item()
        for name, difference in differences.items()
    }


def short(number: float) -> str:
    return f"{number:.1e}"


if __name__ == "__main__":
    sys.exit(main())
