"""`debug.profile`: a trace of torch's profiler, and on GPUs a history of memory, for named steps.

Files lie in `profiles/` of the run directory, one of each kind for each step and rank; a step that
is made again after a restart replaces them. docs/profiling.md says how to look at them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sluice.telemetry import logs, run_directory

P = ParamSpec("P")
T = TypeVar("T")

MEMORY_EVENTS = 100_000
"""Allocations and frees that a history of memory keeps: the last ones of its step."""


@dataclass(frozen=True, slots=True)
class Profiles:
    """The profiles of one rank. steps: those of debug.profile; directory: where the files go."""

    steps: Collection[int] = ()
    directory: Path = Path(run_directory.PROFILES)
    rank: int = 0

    @contextmanager
    def profile_step(self, step: int) -> Iterator[None]:
        """Profile the block, where this step is one of them; also a block that raises."""
        if step not in self.steps:
            yield
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"step_{step:07d}_rank_{self.rank}"
        with ExitStack() as stack:
            if torch.cuda.is_available():
                stack.enter_context(_memory(self.directory / f"{name}.memory.pickle"))
            stack.enter_context(_trace(self.directory / f"{name}.trace.json.gz"))
            yield
        logs.get().info(f"step {step} was profiled", directory=str(self.directory))


def region(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: each call is a bar of this name in the trace."""
    decorate: Callable[[Callable[P, T]], Callable[P, T]] = record_function(f"sluice: {name}")
    return decorate


@contextmanager
def _trace(path: Path) -> Iterator[None]:
    """Everything that this thread and the GPU do, as Chrome's trace events, gzipped."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
    profiler.start()
    try:
        yield
    finally:
        profiler.stop()
        profiler.export_chrome_trace(str(path))


@contextmanager
def _memory(path: Path) -> Iterator[None]:
    """The GPU's allocations with the Python lines that made them, as a pickle for
    pytorch.org/memory_viz.
    """
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python")
    try:
        yield
    finally:
        try:
            memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        finally:
            memory._record_memory_history(enabled=None)
