"""`trainer.deterministic` on one GPU: trainer and engine to the bit, a resumed run to the bit, and
what it costs.

    python benchmarks/deterministic.py [--shape smollm2-135m] [--steps 6] [--kernels] [--resume]

Kernels: each function beside itself in other batches (equal or not), beside float32 (error), and
beside the usual one (time). Runs: trainer and engine share the GPU, random weights and rewards, a
learning rate that moves every weight; the same job with and without `deterministic`. Then given
answers (sft) are trained on three times, at last with the trainer killed behind a checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.processes import sluice_run
from benchmarks.shapes import write_config
from sluice.telemetry import run_directory

ROOT = Path(__file__).parents[1]
WARM_UP = 2
MOST = "train/train_rollout_logprob_abs_diff_max"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kernels", action="store_true", help="nothing but the kernels")
    parser.add_argument("--resume", action="store_true", help="no runs with an engine")
    parser.add_argument("--head", action="store_true", help="a run with fp32LmHead as well")
    parser.add_argument("--seconds", type=float, default=240.0, help="the longest that a run takes")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--out", type=Path, help="keep logs and metrics of the runs here")
    options = parser.parse_args()
    lines = kernels() if torch.cuda.is_available() else []
    if not options.kernels:
        with tempfile.TemporaryDirectory() as parent:
            lines += [] if options.resume else runs(Path(parent), options)
            lines += resumed(Path(parent), options)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}", *lines, sep="\n")


def kernels() -> list[str]:
    """A table of the functions."""
    from sluice.numerics import invariant

    torch.manual_seed(0)
    device, bf16 = torch.device("cuda"), torch.bfloat16

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(bf16)

    rows, width, out = 4096, 1024, 3072
    x, weight, gain, logits = (
        normal(rows, width),
        normal(out, width),
        normal(width),
        normal(512, 49152),
    )
    place = torch.randint(0, 49152, (512,), device=device)
    scales = torch.full((512,), 1.25, device=device)
    exact = {
        "linear": (invariant.linear(x, weight), F.linear(x.float(), weight.float())),
        "rms_norm": (
            invariant.rms_norm(x, gain, 1e-6),
            F.rms_norm(x.float(), (width,), gain.float(), 1e-6),
        ),
        "log_probs": (
            invariant.log_probs(logits, place, scales),
            torch.log_softmax(logits.float() * 1.25, -1).gather(1, place[:, None])[:, 0],
        ),
    }
    parts = {
        "linear": [invariant.linear(x[a:b], weight) for a, b in ((0, 1), (1, 130), (130, rows))],
        "rms_norm": [invariant.rms_norm(x[a:b], gain, 1e-6) for a, b in ((0, 1), (1, rows))],
        "log_probs": [
            invariant.log_probs(logits[a:b], place[a:b], scales[a:b]) for a, b in ((0, 3), (3, 512))
        ],
    }
    times = {
        "linear": (lambda: invariant.linear(x, weight), lambda: F.linear(x, weight)),
        "rms_norm": (
            lambda: invariant.rms_norm(x, gain, 1e-6),
            lambda: F.rms_norm(x, (width,), gain, 1e-6),
        ),
        "log_probs": (
            lambda: invariant.log_probs(logits, place, scales),
            lambda: torch.log_softmax(logits.float() * 1.25, -1),
        ),
    }
    lines = [
        "| function | equal in other batches | error | ms | usual, ms |",
        "|---|---|---|---|---|",
    ]
    for name, (result, reference) in exact.items():
        equal = torch.equal(torch.cat(parts[name]), result)
        lines.append(_row(name, equal, result, reference, times[name]))
    return [*lines, _attention(normal, 9, 3, 64), _attention(normal, 16, 8, 128)]


def _attention(normal: Callable[..., Tensor], heads: int, shared: int, width: int) -> str:
    """Prompts at once; their last tokens alone and their second halves, over a paged cache."""
    from sluice.numerics import invariant

    device, lengths = torch.device("cuda"), [1, 7, 300, 1000, 64, 65]
    tokens, longest = sum(lengths), max(lengths)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = (sizes.cumsum(0) - sizes).int()
    q = normal(tokens, heads, width)
    k, v = normal(tokens, shared, width), normal(tokens, shared, width)
    rows = torch.arange(len(lengths), dtype=torch.int32, device=device)
    steps = torch.arange(longest, device=device, dtype=torch.int32)
    table = starts[:, None] + steps
    attend = partial(
        invariant.attention, key_lengths=sizes, rows=rows, longest=longest, scale=width**-0.5
    )
    at_once = partial(attend, q, k, v, starts=starts, lengths=sizes, table=table)
    whole = at_once()
    slots = torch.randperm(2 * tokens, device=device)[:tokens]  # tokens lie anywhere
    keys, values = normal(2 * tokens, shared, width), normal(2 * tokens, shared, width)
    keys[slots], values[slots] = k, v
    paged = slots[table.clamp(max=tokens - 1).long()].int()
    late = sizes - sizes // 2
    places = [(s, s + n // 2, s + n) for s, n in zip(starts.tolist(), lengths, strict=True)]
    second = torch.cat([torch.arange(middle, end) for _, middle, end in places]).to(device)
    last, ones = (starts + sizes - 1).long(), torch.ones_like(sizes)
    single = attend(q[last], keys, values, starts=rows, lengths=ones, table=paged)
    halves = attend(
        q[second], keys, values, starts=(late.cumsum(0) - late).int(), lengths=late, table=paged
    )
    equal = torch.equal(single, whole[last]) and torch.equal(halves, whole[second])
    reference = []
    for start, _, end in places:
        qs, ks, vs = (x[start:end].float().transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
        reference.append(out[0].transpose(0, 1))
    return _row(
        f"attention, {heads} x {width}", equal, whole, torch.cat(reference), (at_once, None)
    )


def _row(name: str, equal: bool, result: Tensor, reference: Tensor, times: tuple[Any, Any]) -> str:
    error = float((result.float() - reference).norm() / reference.norm())
    ours, usual = (f"{_milliseconds(call):.3f}" if call else "" for call in times)
    return f"| {name} | {'yes' if equal else 'NO'} | {error:.2g} | {ours} | {usual} |"


def _milliseconds(call: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, return_mode="median"))


def runs(parent: Path, options: argparse.Namespace) -> list[str]:
    """A table of the runs."""
    example = parent / "job"
    shutil.copytree(ROOT / "examples/quickstart", example, ignore=shutil.ignore_patterns("model"))
    subprocess.run([sys.executable, "make_data.py", "."], cwd=example, check=True, timeout=120)
    write_config(example / "model", options.shape, "bfloat16")
    gpu = bool(torch.cuda.is_available())
    job = [
        f"trainer.steps={options.steps}",
        "trainer.optimizer={lr: 1e-4}",
        "reward={type: random}",
        "evaluation=null",
        "rollout.batchSize=16",
        "rollout.sampling.maxResponseTokens=256",
        f"checkpoint={{everySteps: {options.steps // 2}, keep: 3}}",
        *options.set,
    ]
    if gpu:
        job += [
            "trainer.gpusPerNode=1",
            "trainer.colocate=true",
            "rollout.gpusPerReplica=1",
            "rollout.replicas=1",
            "rollout.engineArgs={memFractionStatic: 0.4, samplingBackend: pytorch, "
            "grammarBackend: none, attentionBackend: triton, disablePiecewiseCudaGraph: true}",
        ]
    exact = [*job, "trainer.deterministic=true"]
    measured = {}
    for name, overrides in (
        ("deterministic", exact),
        *([("deterministic, fp32LmHead", [*exact, "model.fp32LmHead=true"])] * options.head),
        ("usual", job),
    ):
        directory = parent / name.replace(", ", "-")
        began = time.monotonic()
        code, output = sluice_run(example / "job.yaml", directory, overrides, options.seconds)
        print(f"{name}: exit code {code}, {time.monotonic() - began:.0f} s", file=sys.stderr)
        _keep(directory, options.out)
        records = [*run_directory.by_step(directory / run_directory.METRICS).values()]
        if code or not records:
            print(output[-2000:], *_ends(directory), sep="\n", file=sys.stderr)
        measured[name] = records
    lines = [
        "",
        "| run | steps | differ at most | mean | tokens/s | step, s | training, s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_run_row(name, records) for name, records in measured.items()]
    return lines


def _run_row(name: str, records: Sequence[Mapping[str, Any]]) -> str:
    late = records[WARM_UP:] or records

    def middle(key: str) -> float:
        return median([record.get(key, math.nan) for record in late] or [math.nan])

    most = max((record.get(MOST, math.nan) for record in records), default=math.nan)
    mean = middle("train/train_rollout_logprob_abs_diff")
    return (
        f"| {name} | {len(records)} | {most:.6g} | {mean:.3g} | "
        f"{middle('perf/tokens_per_second'):,.0f} | {middle('perf/step_time'):.2f} | "
        f"{middle('perf/actor_train_time'):.2f} |"
    )


def resumed(parent: Path, options: argparse.Namespace) -> list[str]:
    """Given answers, which need no engine, trained on thrice, at last with a killed trainer."""
    example = parent / "sft"
    shutil.copytree(ROOT / "examples/sft", example, ignore=shutil.ignore_patterns("model"))
    subprocess.run([sys.executable, "make_data.py", "."], cwd=example, check=True, timeout=120)
    write_config(example / "model", options.shape, "bfloat16")
    job = [
        "trainer.epochs=null",
        "trainer.steps=24",
        "trainer.optimizer={lr: 1e-4}",
        "trainer.deterministic=true",
        "checkpoint={everySteps: 12, keep: 3}",
        "evaluation=null",
        f"trainer.gpusPerNode={int(torch.cuda.is_available())}",
        f"rollout.gpusPerReplica={int(torch.cuda.is_available())}",
    ]
    models = {}
    for name, kill in (("straight", False), ("again", False), ("killed", True)):
        directory = parent / name
        command = [sys.executable, "-m", "sluice_cli", "run", str(example / "job.yaml"), "--plain"]
        command += ["--run-dir", str(directory)]
        command += [word for override in job for word in ("--set", override)]
        with (parent / f"{name}.log").open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            if kill:
                _kill_trainer(directory, 12, process)
            try:
                process.wait(options.seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        _keep(directory, options.out)
        models[name] = _digest(directory)
        if not models[name]:
            print((parent / f"{name}.log").read_text()[-2000:], *_ends(directory), file=sys.stderr)
    lines = ["", "| 24 steps of given answers | weights |", "|---|---|"]
    for name, digest in models.items():
        equal = "equal to the bit" if digest and digest == models["straight"] else "NOT EQUAL"
        lines.append(f"| {name} | {digest[:12]}{'' if name == 'straight' else f', {equal}'} |")
    return lines


def _kill_trainer(directory: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    """Kill the trainer once a step behind the checkpoint of `step` is done."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and run.poll() is None:
        done = run_directory.by_step(directory / run_directory.METRICS)
        if done and max(done) > step:
            for pid in _trainers(directory):
                os.kill(pid, signal.SIGKILL)
            print(f"the trainer was killed behind step {max(done)}", file=sys.stderr)
            return
        time.sleep(0.05)
    print("the trainer was not killed: the run was faster, or did not begin", file=sys.stderr)


def _trainers(directory: Path) -> list[int]:
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode().split("\0")
            environment = (process / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "sluice_trainer" in command and str(directory) in environment:
            pids.append(int(process.name))
    return pids


def _digest(directory: Path) -> str:
    """Of the exported model; empty where there is none."""
    files = sorted(directory.rglob("model*.safetensors"))
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _keep(directory: Path, out: Path | None) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "summary.json"):
        if (file := directory / name).exists():
            shutil.copy(file, out / f"{directory.name}-{name}")


def _ends(directory: Path) -> list[str]:
    """The last lines of each log, without what is said of every request."""
    ends = []
    for log in sorted((directory / "logs").glob("*")):
        kept = [
            line for line in log.read_text().splitlines() if not re.search(r'HTTP/1.1" 200', line)
        ]
        ends.append(f"--- {log.name}\n" + "\n".join(kept[-15:])[-2500:])
    return ends


if __name__ == "__main__":
    main()
