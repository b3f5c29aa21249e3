"""`debug.profile`: profiler traces, and on GPUs memory histories, of selected steps.

The files are in `profiles/` of the run directory, one of each kind for each step and rank. A step
that is repeated after a restart replaces them. docs/profiling.md explains how to view them.
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

# Allocations and frees that a memory history keeps: the last ones of its step.
MEMORY_EVENTS = 100_000


@dataclass(frozen=True, slots=True)
class Profiles:
    """The profiles of one rank.

    Attributes
    ----------
    steps
        Steps to profile (`debug.profile`).
    directory
        Directory of the files.
    rank
        Rank of this process, part of the file names.

    """

    steps: Collection[int] = ()
    directory: Path = Path(run_directory.PROFILES)
    rank: int = 0

    @contextmanager
    def profile_step(self, step: int) -> Iterator[None]:
        """Profile the block if the step is selected, also if the block raises."""
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
    """Decorate a function so that each call is a bar of this name in the trace."""
    decorate: Callable[[Callable[P, T]], Callable[P, T]] = record_function(f"sluice: {name}")
    return decorate


@contextmanager
def _trace(path: Path) -> Iterator[None]:
    """Trace everything that this thread and the GPU do, as gzipped trace events of Chrome."""
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
    """Record the GPU's allocations with their Python lines, for pytorch.org/memory_viz."""
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python")
    try:
        yield
    finally:
        try:
            memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        finally:
            memory._record_memory_history(enabled=None)
