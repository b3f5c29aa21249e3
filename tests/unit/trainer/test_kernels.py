"""The trainer's kernels and their gradients agree with the same functions of torch.

They run on the CPU by Triton's interpreter, which must be chosen before Triton is imported, so in a
separate process. The tests of the GPU run the same there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

PROGRAM = """
import json, torch
import torch.nn.functional as F
from sluice_trainer.kernels import compact_adamw, feed_forward, norm_rotary, softmax
from sluice_trainer.megatron.model.experts import _gated
from sluice_trainer.megatron.model.token_routes import _sums
from sluice_trainer.megatron.model.rotary import rotate
from sluice_trainer.megatron.step import adamw
from sluice_trainer.step.logits import log_probs_and_entropies

torch.manual_seed(0)
half = torch.float16  # the interpreter has no bf16
results = {}

def compare(name, ours, theirs, leaves, dtype):
    'Note the largest relative difference of results and gradients.'
    outcomes = []
    for function, kind in ((ours, dtype), (theirs, torch.float32)):
        inputs = [leaf.detach().to(kind).requires_grad_() for leaf in leaves]
        out = function(*inputs)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(kind)
        outcomes.append([out, *torch.autograd.grad(out, inputs, grad)])
    results[name] = max(
        float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(*outcomes)
    )

tokens, width, eps = 21, 64, 1e-6
angles = torch.randn(tokens, width // 2) * 5
cos, sin = angles.cos(), angles.sin()
mixed = torch.randn(tokens, 5, 3 * width).to(half)
for heads in (1, 5):
    x, gain = mixed[:, :heads, width : 2 * width], torch.rand(width).to(half) + 0.5
    assert not x.is_contiguous()
    compare(
        f"normalised and rotated, {heads}",
        lambda x, w: norm_rotary.norm_and_rotate(x, w, eps, cos, sin),
        lambda x, w: rotate(F.rms_norm(x, (width,), w, eps), cos, sin, False),
        [x, gain],
        half,
    )
compare(
    "rotated",
    lambda x: norm_rotary.norm_and_rotate(x, None, 0.0, cos, sin),
    lambda x: rotate(x, cos, sin, False),
    [x],
    half,
)
many = torch.randn(700, 3, 32)
turns = torch.randn(700, 16)
norm_rotary.PROGRAMS = 4  # so that each program has many rows
compare(
    "parts of the weight's gradient",
    lambda x, w: norm_rotary.norm_and_rotate(x, w, eps, turns.cos(), turns.sin()),
    lambda x, w: rotate(F.rms_norm(x, (32,), w, eps), turns.cos(), turns.sin(), False),
    [many, torch.rand(32)],
    torch.float32,
)

words, scale = 5000, 0.8
logits = torch.randn(6, words) * 4
targets = torch.tensor([0, 1, 4095, 4096, 4999, 77])
by_torch = logits.clone().requires_grad_()
numbers = torch.stack(log_probs_and_entropies(by_torch, targets, scale=scale))
grad = torch.randn(2, 6)
(expected,) = torch.autograd.grad(numbers, by_torch, grad)
z = logits * scale
log_total, entropy = z.logsumexp(-1), numbers[1].detach()
for name, dtype in (("float32", torch.float32), ("half", half)):
    gradient = softmax.gradient(
        logits.to(dtype), targets, log_total, entropy, grad[0], (grad[0], grad[1]), scale
    )
    assert gradient.dtype == dtype
    results[f"logits, {name}"] = float((gradient.float() - expected).abs().max())
elsewhere = softmax.gradient(
    logits, torch.zeros_like(targets), log_total, entropy, 0 * grad[0], (grad[0], grad[1]), scale
)
p = (z - log_total[:, None]).exp()
plain = -p * (grad[0][:, None] + (p.log() + entropy[:, None]) * grad[1][:, None]) * scale
results["logits of another rank's word"] = float((elsewhere - plain).abs().max())

feed_forward.COLUMNS = 64  # so that a row takes several iterations
for width in (40, 150):
    compare(
        f"gated, {width}",
        feed_forward.gated,
        _gated,
        [torch.randn(33, 2 * width), torch.rand(33)],
        torch.float32,
    )
    compare(
        f"gated without weights, {width}",
        lambda up: feed_forward.gated(up, None),
        lambda up: F.silu(up[:, :width]) * up[:, width:],
        [torch.randn(33, 2 * width)],
        torch.float32,
    )
    rows, places = torch.randn(50, width), torch.randint(0, 51, (30, 3)).sort(1).values
    sums = feed_forward.sums(rows, places), _sums(rows, places)
    results[f"sums, {width}"] = float((sums[0] - sums[1]).abs().max())
assert feed_forward.sums(rows[:0], places[:4] * 0).equal(torch.zeros(4, width))

group = {"betas": (0.9, 0.95), "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}
adamw.PIECE = 3000
for kinds in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
    gradient = torch.randn(5001)
    ours = [torch.randn(5001), *(torch.rand(5001).to(kind) for kind in kinds)]
    theirs = [tensor.clone() for tensor in ours]
    steps = 8
    for step in range(steps):
        compact_adamw.update(
            ours[0], gradient, tuple(ours[1:]), step, group,
            piece=adamw.PIECE, golden=adamw._GOLDEN, offset=adamw._offset(step),
        )
        for place in adamw.pieces(5001):
            pieces = (tensor[place] for tensor in (theirs[0], gradient, *theirs[1:]))
            adamw.update(*pieces, float(step), group)
    name = " ".join(str(kind).removeprefix("torch.") for kind in kinds)
    results[f"weights, {name}"] = float((ours[0] - theirs[0]).abs().max())
    # Another order of operations can move a number across its rounding threshold.
    results[f"moments that differ, {name}"] = max(
        float((a.float() - b.float()).abs().gt(1e-5 * b.float().abs()).float().mean())
        for a, b in zip(ours[1:], theirs[1:])
    )
print(json.dumps(results))
"""
# Half precision has 11 bits, so 0.02 is one step of a logit of 16.
BOUNDS = {
    "normalised and rotated, 1": 2e-3,
    "normalised and rotated, 5": 2e-3,
    "rotated": 1e-3,
    "parts of the weight's gradient": 1e-5,
    "logits, float32": 1e-5,
    "logits, half": 2e-2,
    "logits of another rank's word": 1e-5,
    "gated, 40": 1e-5,
    "gated, 150": 1e-5,
    "gated without weights, 40": 1e-5,
    "gated without weights, 150": 1e-5,
    "sums, 40": 1e-6,
    "sums, 150": 1e-6,
    "weights, bfloat16 bfloat16": 1e-4,
    "moments that differ, bfloat16 bfloat16": 1e-2,
    "weights, float32 bfloat16": 1e-4,
    "moments that differ, float32 bfloat16": 1e-2,
}


@pytest.fixture(scope="module")
def results() -> Mapping[str, float]:
    pytest.importorskip("triton")
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    answer: Mapping[str, float] = json.loads(process.stdout)
    return answer


@pytest.mark.parametrize("name", BOUNDS)
def test_a_kernel_computes_what_torch_does(results: Mapping[str, float], name: str) -> None:
    assert results[name] < BOUNDS[name]


def test_every_result_has_a_bound(results: Mapping[str, float]) -> None:
    assert results.keys() == BOUNDS.keys()
