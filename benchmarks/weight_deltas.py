r"""Bytes of a weight update as a difference to the version before, and what making it costs.

    python examples/reasoning/make_model.py /tmp/smollm2
    python benchmarks/weight_deltas.py /tmp/smollm2 [--lr 1e-6 1e-5 1e-4] [--steps 6] [--threads 1]

A model is trained as RL does it: groups of its own responses with normalized rewards, the policy
gradient, Adam with float32 main weights, which are rounded to bf16 after each step. Each step's
bf16 weights are compared with those of the step before, and encoded in several ways. Rows are means
over the steps; `encode` and `apply` are GB of weights for a second of one core's time.

- `changed`: share of bf16 values with another bit pattern.
- `xor`: XOR of both versions, zstd level 1 (slime's default way).
- `planes`: the same with low and high bytes apart.
- `indices`: gaps between changed values as uint16, then their XORs, zstd level 1.
- `bitmap`: one bit for each value, then the XORs of changed values in two planes, zstd level 1.
  This is `sluice/weight_store/delta.py`, verified to the bit.

All ways end with the same verification, whose rate is printed last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.weight_store import delta

Words = NDArray[np.uint16]
CHUNK = 32 << 20
GROUPS, SAMPLES, PROMPT, RESPONSE = 4, 4, 16, 48
WAYS = ("xor", "planes", "indices", "bitmap")


def compress(data: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(data).tobytes())


def expand(data: bytes, kind: Any = np.uint8) -> NDArray[Any]:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), kind)


def planes(words: Words) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    both = words.view(np.uint8).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def joined(low: NDArray[np.uint8], high: NDArray[np.uint8]) -> Words:
    return np.stack((low, high), axis=1).reshape(-1).view(np.uint16)


class Way(Protocol):
    """A format of the difference between two versions."""

    def encode(self, old: Words, new: Words) -> list[bytes]: ...
    def apply(self, data: Words, parts: list[bytes]) -> None: ...


class Xor:
    def encode(self, old: Words, new: Words) -> list[bytes]:
        return [compress(old ^ new)]

    def apply(self, data: Words, parts: list[bytes]) -> None:
        data ^= expand(parts[0], np.uint16)


class Planes:
    def encode(self, old: Words, new: Words) -> list[bytes]:
        return [compress(plane) for plane in planes(old ^ new)]

    def apply(self, data: Words, parts: list[bytes]) -> None:
        data ^= joined(expand(parts[0]), expand(parts[1]))


class Indices:
    def encode(self, old: Words, new: Words) -> list[bytes]:
        changes = old ^ new
        places = np.flatnonzero(changes)
        gaps = np.diff(places, prepend=0)
        # Wide gaps are rare: their places are kept beside.
        wide = np.flatnonzero(gaps > 65535)
        return [
            compress(gaps.astype(np.uint16)),
            compress(changes[places]),
            compress(np.stack((wide, gaps[wide]))),
        ]

    def apply(self, data: Words, parts: list[bytes]) -> None:
        gaps = expand(parts[0], np.uint16).astype(np.int64)
        wide, full = expand(parts[2], np.int64).reshape(2, -1)
        gaps[wide] = full
        data[np.cumsum(gaps)] ^= expand(parts[1], np.uint16)


class Bitmap:
    def encode(self, old: Words, new: Words) -> list[bytes]:
        return [delta.encode(old.view(np.uint8), new.view(np.uint8))]

    def apply(self, data: Words, parts: list[bytes]) -> None:
        delta.apply(data.view(np.uint8), parts[0])


FORMATS: dict[str, Way] = dict(zip(WAYS, (Xor(), Planes(), Indices(), Bitmap()), strict=True))


def versions(model_dir: Path, rate: float, steps: int) -> Iterator[list[Words]]:
    """Yield the bf16 weights before training and after each step."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    weights = list(model.parameters())
    # RL begins from bf16 weights on disk.
    with torch.no_grad():
        for weight in weights:
            weight.copy_(weight.bfloat16())
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.1)
    yield [rounded(weight) for weight in weights]
    for step in range(steps):
        numbers = torch.randint(2, 99, (GROUPS, 2)).tolist()
        texts = [f"What is {a} + {b}? Answer: " for a, b in numbers for _ in range(SAMPLES)]
        tokenizer.padding_side = "left"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        prompts = tokenizer(texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            tokens = model.generate(
                **prompts, max_new_tokens=RESPONSE, do_sample=True, pad_token_id=0
            )
        length = prompts["input_ids"].shape[1]
        rewards = reward(tokens[:, length:], step).view(GROUPS, SAMPLES)
        spread = rewards.std(1, keepdim=True) + 1e-6
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
        logits = model(tokens).logits[:, length - 1 : -1].float()
        taken = logits.log_softmax(-1).gather(-1, tokens[:, length:, None]).squeeze(-1)
        (-(advantages * taken).mean()).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield [rounded(weight) for weight in weights]


def reward(responses: Tensor, step: int) -> Tensor:
    """Return a reward that tells responses apart: the share of frequent tokens among theirs."""
    return (responses % 7 == step % 7).float().mean(1)


def rounded(weight: Tensor) -> Words:
    words: Words = weight.detach().bfloat16().view(torch.int16).view(-1).numpy().view(np.uint16)
    return words.copy()


def chunks(weights: list[Words]) -> list[Words]:
    whole = np.concatenate(weights)
    step = CHUNK // 2
    return [whole[start : start + step] for start in range(0, len(whole), step)]


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    started = time.thread_time()
    result = work(*arguments)
    return result, time.thread_time() - started


def compare(old: list[Words], new: list[Words]) -> dict[str, float]:
    """Return shares of bytes, and seconds, of one step in every format."""
    total = sum(words.nbytes for words in new)
    facts = {
        "changed": sum(int(np.count_nonzero(a != b)) for a, b in zip(old, new, strict=True))
        / (total // 2),
        "full": sum(len(compress(words)) for words in new) / total,
    }
    for name, way in FORMATS.items():
        size, encoding, applying = 0, 0.0, 0.0
        for before, after in zip(old, new, strict=True):
            parts, seconds = timed(way.encode, before, after)
            encoding += seconds
            size += sum(map(len, parts))
            copy = before.copy()
            _, seconds = timed(way.apply, copy, parts)
            applying += seconds
            if not np.array_equal(copy, after):
                raise SystemExit(f"{name} is not lossless")
        facts |= {
            name: size / total,
            f"{name} encode": total / encoding / 1e9,
            f"{name} apply": total / applying / 1e9,
        }
    seconds = sum(timed(xxhash.xxh3_128_digest, words.data)[1] for words in new)
    return facts | {"verify": total / seconds / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    columns = ["changed", "full", *WAYS]
    print(f"| lr | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|", flush=True)
    measured: dict[float, dict[str, float]] = {}
    for rate in options.lr:
        steps: list[dict[str, float]] = []
        old: list[Words] = []
        for weights in versions(options.model, rate, options.steps):
            new = chunks(weights)
            if old:
                steps.append(compare(old, new))
            old = new
        mean = {name: statistics.fmean(step[name] for step in steps) for name in steps[0]}
        measured[rate] = mean
        print(f"| {rate:g} | {' | '.join(f'{mean[c]:.2%}' for c in columns)} |", flush=True)
    print("\n| lr | way | encode GB/s | apply GB/s |\n|---|---|---|---|")
    for rate, mean in measured.items():
        for way in WAYS:
            print(
                f"| {rate:g} | {way} | {mean[f'{way} encode']:.2f} | {mean[f'{way} apply']:.2f} |"
            )
    verify = statistics.fmean(mean["verify"] for mean in measured.values())
    print(f"\nverification (xxh3-128): {verify:.1f} GB/s")
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
