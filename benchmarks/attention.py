"""Attention of packed rows by each kernel that the trainer may use, forward and backward.

    python benchmarks/attention.py [--shapes qwen3-0.6b smollm2-135m] [--row 32768]
        [--lengths 512 2048 8192 16384] [--rounds 10]

A row holds sequences of one length. *torch*: its FlashAttention 2 over the packed row. *cuDNN*: one
call a sequence, as the trainer makes it of long ones. *flash 4*: FlashAttention 4 over the packed
row, where the package is installed. TFLOP/s count causal attention by half and the backward pass as
two and a half times the forward one. *Off by* is the larger relative error of output and gradients
beside float32, of the first 2,048 tokens' sequences. Without a GPU there is only torch's, in
float32: a rehearsal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from sluice_trainer.kernels import flash_attention
from sluice_trainer.megatron.model import attention
from sluice_trainer.megatron.model.layout import Packing, packing

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# Tokens that are computed in float32 too.
SEEN = 2048
Way = Callable[[Tensor, Tensor, Tensor, Packing, float], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.6b"])
    parser.add_argument("--row", type=int, default=32768 if CUDA else 256)
    lengths = [512, 2048, 4096, 8192, 16384] if CUDA else [64, 128]
    parser.add_argument("--lengths", nargs="+", type=int, default=lengths)
    parser.add_argument("--rounds", type=int, default=10 if CUDA else 2)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name() if CUDA else 'CPU'}, torch {torch.__version__}")
    print("| heads | length | kernel | forward ms | TFLOP/s | both ms | TFLOP/s | off by |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for shape in options.shapes:
        for length in options.lengths:
            measure(shape, options.row, length, options.rounds)


def ways(length: int, width: int) -> dict[str, Way]:
    """Those that this machine has for sequences of this length."""
    chosen: dict[str, Way] = {"torch": torch_packed if CUDA else dense}
    if CUDA and width <= 128 and torch.cuda.get_device_capability() >= (9, 0):
        chosen["cuDNN"] = one_by_one
    if CUDA and flash_attention.flash4_fits(width):
        chosen["flash 4"] = flash4
    return chosen


def torch_packed(q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float) -> Tensor:
    starts, longest = packed.varlen.starts, packed.varlen.longest
    return flash_attention.attend2(q, k, v, (starts, starts), (longest, longest), scale=scale)


def flash4(q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float) -> Tensor:
    return flash_attention.attend4(
        q, k, v, packed.varlen.starts, packed.varlen.longest, scale=scale
    )


def one_by_one(q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float) -> Tensor:
    sequences = zip(*(x.split(packed.lengths) for x in (q, k, v)), strict=True)
    return torch.cat([attention._cudnn_attention(a, b, c, scale) for a, b, c in sequences])


def dense(q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float) -> Tensor:
    return attention._padded_attention(q, k, v, packed.dense, scale)


def measure(shape: str, row: int, length: int, rounds: int) -> None:
    """Print a line for each kernel."""
    config = SHAPES[shape]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    lengths = [length] * (row // length)
    packed, scale = packing(lengths, DEVICE), width**-0.5
    dtype = torch.bfloat16 if CUDA else torch.float32
    torch.manual_seed(length)
    q, k, v = (
        torch.randn(sum(lengths), n, width, device=DEVICE, dtype=dtype, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    output_grads = torch.randn(sum(lengths), heads, width, device=DEVICE, dtype=dtype)
    forward_flops = sum(2.0 * n * n * heads * width for n in lengths)
    for name, way in ways(length, width).items():

        def forward(way: Way = way) -> Tensor:
            return way(q, k, v, packed, scale)

        def both(way: Way = way) -> Tensor:
            out = way(q, k, v, packed, scale)
            torch.autograd.grad(out, (q, k, v), output_grads)
            return out

        once, twice = seconds(forward, rounds), seconds(both, rounds)
        print(
            f"| {heads}/{kv_heads} x {width} | {length} | {name} "
            f"| {once * 1e3:.2f} | {forward_flops / once / 1e12:.0f} "
            f"| {twice * 1e3:.2f} | {3.5 * forward_flops / twice / 1e12:.0f} "
            f"| {error(way, (q, k, v), output_grads, lengths, scale):.4f} |",
            flush=True,
        )


def seconds(function: Callable[[], Tensor], rounds: int) -> float:
    """The median time of a call, after three."""
    for _ in range(3):
        function()
    spent = []
    for _ in range(rounds):
        if CUDA:
            torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        if CUDA:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def error(
    way: Way, inputs: Sequence[Tensor], output_grads: Tensor, lengths: Sequence[int], scale: float
) -> float:
    """The larger relative error of output and gradients, of sequences cut to SEEN tokens."""
    rows = min(sum(lengths), SEEN)
    short = [min(lengths[0], rows)] * max(rows // lengths[0], 1)
    packed = packing(short, DEVICE)

    def outcome(way: Way, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.detach()[:rows].to(dtype).requires_grad_() for x in inputs)
        result = way(q, k, v, packed, scale)
        gradients = torch.autograd.grad(result, (q, k, v), output_grads[:rows].to(dtype))
        return [result.detach(), *gradients]

    pairs = zip(outcome(way, output_grads.dtype), outcome(dense, torch.float32), strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


if __name__ == "__main__":
    main()
