"""Functions that trainer and engine share give a token the same bits in every batch.

On the CPU, by Triton's interpreter, which has to be chosen before Triton is imported: in a process
of its own. benchmarks/deterministic.py shows the same on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

PROGRAM = """
import json, torch
import torch.nn.functional as F
from sluice.numerics import invariant

torch.manual_seed(0)
results = {}
half = lambda *size: torch.randn(*size).half()  # noqa: E731 - the interpreter has no bf16

def note(name, result, reference, parts):
    off = float((result.float() - reference).abs().max())
    results[name] = {"off": off, "equal": torch.equal(torch.cat(parts), result)}

x, weight, bias = half(131, 70), half(130, 70), half(130)
split = ((0, 1), (1, 130), (130, 131))
note(
    "linear",
    invariant.linear(x, weight, bias),
    F.linear(x.float(), weight.float(), bias.float()),
    [invariant.linear(x[a:b], weight, bias) for a, b in split],
)
gain = half(70)
note(
    "norm",
    invariant.rms_norm(x, gain, 1e-5),
    F.rms_norm(x.float(), (70,), gain.float(), 1e-5),
    [invariant.rms_norm(x[a:b], gain, 1e-5) for a, b in split],
)
logits, words = torch.randn(4, 5000) * 5, torch.tensor([1, 2, 3, 4999])
scales = torch.full((4,), 0.5)
note(
    "log-probs",
    invariant.log_probs(logits, words, scales),
    (logits * 0.5).log_softmax(-1).gather(1, words[:, None])[:, 0],
    [invariant.log_probs(logits[i:i + 1], words[i:i + 1], scales[i:i + 1]) for i in range(4)],
)

heads, shared, width, lengths = 6, 2, 24, [5, 130, 64]
sizes = torch.tensor(lengths, dtype=torch.int32)
starts = (sizes.cumsum(0) - sizes).int()
tokens, longest, rows = sum(lengths), max(lengths), torch.arange(3, dtype=torch.int32)
q, k, v = half(tokens, heads, width), half(tokens, shared, width), half(tokens, shared, width)
table = starts[:, None] + torch.arange(longest, dtype=torch.int32)
common = {"key_lengths": sizes, "scale": width**-0.5}
whole = invariant.attention(
    q, k, v, starts=starts, lengths=sizes, rows=rows, table=table, longest=longest, **common
)
reference = torch.cat([
    F.scaled_dot_product_attention(
        *(t[s : s + n].float().transpose(0, 1)[None] for t in (q, k, v)),
        is_causal=True, enable_gqa=True,
    )[0].transpose(0, 1)
    for s, n in zip(starts.tolist(), lengths)
])
slots = torch.randperm(2 * tokens)[:tokens]
keys, values = half(2 * tokens, shared, width), half(2 * tokens, shared, width)
keys[slots], values[slots] = k, v
paged = slots[table.clamp(max=tokens - 1).long()].int()
last = (starts + sizes - 1).long()
alone = invariant.attention(
    q[last], keys, values, starts=rows, lengths=torch.ones_like(sizes), rows=rows, table=paged,
    longest=1, **common,
)
off = float((whole.float() - reference).abs().max())
results["attention"] = {"off": off, "equal": torch.equal(alone, whole[last])}
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> Mapping[str, Mapping[str, Any]]:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    answer: Mapping[str, Mapping[str, Any]] = json.loads(process.stdout)
    return answer


@pytest.mark.parametrize(
    ("name", "bound"),
    [("linear", 0.02), ("norm", 0.005), ("log-probs", 1e-5), ("attention", 0.003)],
    ids=lambda value: str(value),
)
def test_it_is_right_and_equal_to_the_bit_in_other_batches(
    results: Mapping[str, Mapping[str, Any]], name: str, bound: float
) -> None:
    assert results[name]["off"] < bound
    assert results[name]["equal"]
