"""Time and memory of the output layer with log-probs and entropies, forward and backward: logits in
float32 beside bf16, a chunk of tokens at a time beside all at once.

    python benchmarks/head.py [--shape qwen3-0.6b] [--tokens 16384] [--rounds 5]

Hidden states and weights are random, in bf16. "exact" is float64. Memory is the peak above weight,
hidden states and their gradients: of the allocator on a GPU, of the process on a CPU, where each
way has one of its own. The limit is the time of the three matrix products alone, in bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.step.head import Head, score_tokens
from sluice_trainer.step.logits import log_probs_and_entropies

GPU = DEVICE.type == "cuda"
# Tokens whose log-probs are compared with exact ones.
CHECKED = 64
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def score(logits: Tensor, targets: Tensor, teacher_hidden: Tensor | None = None) -> Tensor:
    return torch.stack(log_probs_and_entropies(logits, targets, scale=1.0))


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, *, float32: bool) -> Tensor:
    """All logits at once, by autograd."""
    if float32:
        hidden, weight = hidden.float(), weight.float()
    log_p = torch.log_softmax((hidden @ weight.T).float(), -1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    return torch.stack((log_p.gather(-1, targets[:, None])[:, 0], entropies))


def products(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The matrix products alone."""
    return (hidden @ weight.T).sum(-1)[None]


WAYS: dict[str, Way] = {
    "products alone, bf16": products,
    "all at once, bf16": lambda h, w, t: plain(h, w, t, float32=False),
    "all at once, float32": lambda h, w, t: plain(h, w, t, float32=True),
    "sluice, bf16": lambda h, w, t: score_tokens(score, h, Head(w), t),
    "sluice, fp32LmHead": lambda h, w, t: score_tokens(score, h, Head(w, float32=True), t),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b" if GPU else "tiny")
    parser.add_argument("--tokens", type=int, default=16384 if GPU else 4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measured(options)))
        return
    shape = SHAPES[options.shape]
    print(
        f"{options.shape}: {options.tokens} tokens, {shape['hidden_size']} x "
        f"{shape['vocab_size']}, {torch.cuda.get_device_name() if GPU else platform.processor()}"
    )
    for way in WAYS:
        call = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        result = subprocess.run(call, capture_output=True, text=True)
        if result.returncode:
            print(f"{way:24} {result.stderr.strip().splitlines()[-1][:100]}")
            continue
        figures = json.loads(result.stdout)
        print(
            f"{way:24} {figures['seconds'] * 1e3:9.1f} ms {figures['mib']:8.0f} MiB"
            f"   log-probs off by {figures['mean']:.2g} (mean) {figures['max']:.2g} (max)"
        )


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Of one way: seconds (median), MiB, distance of log-probs from exact ones."""
    shape, way = SHAPES[options.shape], WAYS[options.way]
    torch.manual_seed(0)
    words = shape["vocab_size"]
    hidden = torch.randn(options.tokens, shape["hidden_size"], device=DEVICE).bfloat16()
    weight = torch.randn(words, shape["hidden_size"], device=DEVICE).bfloat16()
    weight *= 5 / math.sqrt(shape["hidden_size"])  # logits as large as a trained model's
    targets = torch.randint(words, (options.tokens,), device=DEVICE)
    hidden.requires_grad_()
    weight.requires_grad_()
    if not GPU:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, seconds = held(), []
    for _ in range(options.rounds + 1):
        hidden.grad = weight.grad = None
        started = time.perf_counter()
        scores = way(hidden, weight, targets)
        scores.sum().backward()
        if GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    gradients = 2 * (hidden.numel() + weight.numel()) / 2**20
    peak = (torch.cuda.max_memory_allocated() if GPU else held()) - before
    exact = hidden[:CHECKED].double() @ weight.double().T
    exact = exact.log_softmax(-1).gather(-1, targets[:CHECKED, None])[:, 0]
    off = (scores[0, :CHECKED].double() - exact).abs()
    return {
        "seconds": statistics.median(seconds[1:]),
        "mib": peak / 2**20 - gradients,
        "mean": float(off.mean()),
        "max": float(off.max()),
    }


def held() -> int:
    """Bytes: allocated now on a GPU, at most so far by the process on a CPU."""
    if GPU:
        return torch.cuda.memory_allocated()
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak
    return int(peak[1]) * 1024


if __name__ == "__main__":
    main()
