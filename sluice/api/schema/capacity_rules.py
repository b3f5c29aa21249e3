"""Rules that the longest responses of a job fit: a batch on the buffer's disk, a group in memory.

A job that cannot be finished must not start.
"""

from __future__ import annotations

from typing import Any

from sluice.api.schema.base import quantity_value
from sluice.api.schema.rules import Rule, written

# Bytes of a response token: id (4), log-prob (4), mask (1). Text and prompt come on top.
BYTES_PER_TOKEN = 9
# Bytes of the buffer's process without messages: interpreter, libraries, an index of 1M groups.
BASE_BYTES = 320 << 20
# Peak memory of the buffer per byte of messages in flight (benchmarks/buffer_memory.py).
OVERHEAD = 1.3
# Messages in flight that a buffer may always have, however little memory it has.
_LEAST_BYTES = 64 << 20


def budget_bytes(memory: int) -> int:
    """Return the bytes of messages that a buffer with `memory` bytes may have in flight."""
    return max(int((memory - BASE_BYTES) / OVERHEAD), _LEAST_BYTES)


def largest_group(budget: int) -> int:
    """Return the bytes of the largest group: its bytes are in memory twice while it is written."""
    return min(budget // 2, (2 << 30) - 1)


def _longest_group(spec: Any) -> int:
    return int(
        spec.samples_per_prompt * spec.rollout.sampling.max_response_tokens * BYTES_PER_TOKEN
    )


def _memory_fits(spec: Any) -> bool:
    return _longest_group(spec) <= largest_group(
        budget_bytes(int(quantity_value(str(spec.buffer.memory))))
    )


def _batch_fits(spec: Any) -> bool:
    size = quantity_value(str(spec.buffer.storage.size))
    return bool(_longest_group(spec) * spec.rollout.batch_size <= size * 7 / 8)


def _bytes(path: str) -> str:
    """CEL of the bytes of a quantity."""
    return f"quantity(string({path})).asApproximateFloat()"


def _unless_malformed(path: str, rule: str) -> str:
    """CEL of a rule that holds if the text at `path` is not a quantity.

    A server evaluates rules even if a pattern has failed, and would also report the error of
    `quantity()`.
    """
    return f"!isQuantity(string({path})) || {rule}"


def capacity_rules(sequences: str, samples: str, longest: str) -> tuple[Rule, ...]:
    """Return the rules.

    Parameters
    ----------
    sequences, samples, longest
        CEL of the sequences of a batch, the samples of a group, and maxResponseTokens.

    """
    memory = _bytes("self.buffer.memory")
    storage = _bytes("self.buffer.storage.size")
    group = f"double({samples} * {longest} * {BYTES_PER_TOKEN})"
    budget = f"({memory} - {BASE_BYTES}.0) / {OVERHEAD} / 2.0"
    return (
        Rule(
            written(
                _unless_malformed(
                    "self.buffer.storage.size",
                    f"double({sequences} * {longest} * {BYTES_PER_TOKEN}) <= {storage} * 0.875",
                ),
                _batch_fits,
            ),
            "a batch of the longest responses {} does not fit: batchSize x samplesPerPrompt x "
            "maxResponseTokens x "
            f"{BYTES_PER_TOKEN} bytes are more than 7/8 of it; make it larger, or the batch "
            "smaller",
            "buffer.storage.size",
            lambda s: f"{_longest_group(s) * s.rollout.batch_size / 2**30:.1f} GiB",
        ),
        Rule(
            written(
                _unless_malformed(
                    "self.buffer.memory",
                    f"{group} <= {_LEAST_BYTES // 2}.0 || "
                    f"({group} <= {budget} && {group} < 2147483648.0)",
                ),
                _memory_fits,
            ),
            "a group of the longest responses {} is more than the buffer takes with this memory: "
            "samplesPerPrompt x "
            f"maxResponseTokens x {BYTES_PER_TOKEN} bytes must be below (memory - 320Mi) / "
            f"{OVERHEAD} / 2, and 2 GiB",
            "buffer.memory",
            lambda s: f"{_longest_group(s) / 2**20:.0f} MiB",
        ),
    )
