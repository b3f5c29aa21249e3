"""A plugin of SGLang that counts what the engine does, and whose rule for prompts that wait can be
changed meanwhile. For refill.py, in place of our plugin's own gather.py.

A file in shared memory has it all: COUNTS, of which the benchmark writes the turn and its
rule, and the rest is the plugin's.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

from benchmarks.waiting import RULES

FILE_VARIABLE = "SLUICE_BENCHMARK_COUNTS"
# Turn; its rule, as a place in RULES; tokens; passes that made one of each request; passes with
# prompts.
COUNTS = struct.Struct("<5q")
DISTRIBUTION = {
    "METADATA": "Name: sluice-benchmark\nVersion: 1\n",
    "entry_points.txt": "[sglang.srt.plugins]\nrefill = benchmarks.refill_plugin:register\n",
}


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sluice_sglang.prefill_batching import PREFILL

    HookRegistry.register(PREFILL, Switched(Path(os.environ[FILE_VARIABLE])), HookType.AROUND)


def shared(file: Path) -> mmap.mmap:
    """The counts, for both processes. Made with zeros where it is not there."""
    if not file.exists():
        file.write_bytes(bytes(COUNTS.size))
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), COUNTS.size)


def install(directory: Path) -> dict[str, str]:
    """Put there what makes the plugin one of SGLang's; the variables of the engine's server."""
    metadata = directory / "sluice_benchmark-1.dist-info"
    metadata.mkdir()
    for name, text in DISTRIBUTION.items():
        (metadata / name).write_text(text)
    root = Path(__file__).parents[1]
    path = [str(directory), str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        FILE_VARIABLE: str(directory / "counts"),
    }


class Switched:
    """Around the scheduler's choice of the prompts that run next, as gather.py's. A turn begins as
    after a weight update: what nobody uses has left the prefix cache.
    """

    def __init__(self, file: Path) -> None:
        self.counts = shared(file)
        self.rules = [make() for make in RULES.values()]
        self.turn = 0

    def __call__(self, original: Any, scheduler: Any, running: Any) -> Any:
        from sluice_sglang.weights.receive import drop_unused

        turn, rule, tokens, passes, prompts = COUNTS.unpack(self.counts)
        if turn != self.turn:
            self.turn = turn
            drop_unused(scheduler)
        plan = self.rules[rule](original, scheduler, running)
        if plan.batch_to_run is not None:
            prompts += 1
            # Its first token. With passes that overlap each has a pass too many, which is counted.
            tokens += 0 if scheduler.enable_overlap else len(plan.batch_to_run.reqs)
        elif running.reqs:
            passes += 1
            tokens += sum(not request.finished() for request in running.reqs)
        if COUNTS.unpack(self.counts)[0] == turn:  # else the benchmark has begun another one
            COUNTS.pack_into(self.counts, 0, turn, rule, tokens, passes, prompts)
        return plan
