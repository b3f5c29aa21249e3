"""Faults of a run with two trainer ranks and two engines, on four GPUs, and what each costs.

    python tests/gpu/faults.py              examples/gpu/four-gpus.yaml
    python tests/gpu/faults.py --rehearse   the same with processes of a CPU

Three faults come one after another: one of the trainer's two ranks is killed; an engine is killed
when a step has ended, while it gets the weights; an engine is stopped for a minute. Printed are the
seconds until the next step ended, beside the median step. It exits with code 1 if the run does not
go on, or if a group was lost or trained twice.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.integration.run.laptop import PROGRAMS, Laptop, send_signal  # noqa: E402

CPU = (
    "trainer.gpusPerNode=0",
    "trainer.processesPerNode=2",
    "rollout.gpusPerReplica=0",
    "rollout.engineArgs={}",
    "rollout.batchSize=8",
    "evaluation=null",
)
SECONDS = 240.0  # until the next step, else the fault has ended the run
RANK = "sluice_trainer"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="processes of a CPU")
    parser.add_argument("--stopped", type=float, default=60.0, help="seconds of the stopped engine")
    parser.add_argument("--set", action="append", default=[], help="as of `sluice run`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = prepare(Path(scratch), options)
        run.start()
        try:
            return inflict_all(run, options.stopped)
        finally:
            run.stop()


def prepare(scratch: Path, options: argparse.Namespace) -> Laptop:
    example = scratch / "quickstart"
    unwanted = shutil.ignore_patterns("__pycache__", "*.jsonl", "model")
    shutil.copytree(ROOT / "examples/quickstart", example, ignore=unwanted)
    subprocess.run([sys.executable, "make_data.py", "."], cwd=example, check=True, timeout=120)
    (scratch / "gpu").mkdir()
    shutil.copy(ROOT / "examples/gpu/four-gpus.yaml", scratch / "gpu/job.yaml")
    own = CPU if options.rehearse else ()
    overrides = ("trainer.steps=100000", "checkpoint.everySteps=5", *own, *options.set)
    return Laptop(scratch / "gpu", scratch / "run", *overrides)


def inflict_all(run: Laptop, stopped: float) -> int:
    """Inflict the faults, print what each cost, and return 1 if something was lost."""
    run.until_step(8, SECONDS)
    usual = statistics.median(record["perf/step_time"] for record in run.steps().values())
    print(f"the median of {run.step()} steps: {usual:.2f} s\n")
    print("| fault | seconds to the next step |\n|---|---|")
    faults: dict[str, Callable[[], None]] = {
        "SIGKILL of one of two trainer ranks": lambda: kill_rank(run),
        "SIGKILL of an engine in an update": lambda: kill_engine(run, "rollout-1"),
        f"SIGSTOP of an engine for {stopped:.0f} s": lambda: stop_engine(run, "rollout-0", stopped),
    }
    for name, inflict in faults.items():
        both_engines(run)
        inflict()
        started, step = time.monotonic(), run.step()
        run.until_step(step + 1, SECONDS)
        print(f"| {name} | {time.monotonic() - started:.1f} |", flush=True)
        run.until_step(run.step() + 3, SECONDS)
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    run.wait(120)
    summary = run.summary()
    books = {name: summary[name] for name in ("groups_lost", "groups_trained_twice")}
    print(f"\n{summary['groups_trained']} groups trained in {run.step()} steps, {books}")
    return 1 if any(books.values()) else 0


def both_engines(run: Laptop) -> None:
    """Wait until both engines run: the one before may have to start again."""
    for name in ("rollout-0", "rollout-1"):
        run.engine(name)


def kill_rank(run: Laptop) -> None:
    """Kill the second of the trainer's ranks, once a step has ended."""
    assert run.process is not None
    ranks = [
        process.pid
        for process in psutil.Process(run.process.pid).children(recursive=True)
        if any(RANK in word for word in process.cmdline()[1:])
        and PROGRAMS["engine"] not in " ".join(process.cmdline())
    ]
    next_step(run)
    send_signal([psutil.Process(max(ranks))], signal.SIGKILL)


def kill_engine(run: Laptop, name: str) -> None:
    """Kill an engine as soon as a step has ended: its weights are sent then."""
    processes = run.engine(name)
    next_step(run)
    send_signal(processes, signal.SIGKILL)


def stop_engine(run: Laptop, name: str, seconds: float) -> None:
    """Stop an engine's processes, and let them go on later."""
    processes = run.engine(name)
    next_step(run)
    send_signal(processes, signal.SIGSTOP)
    pids = " ".join(str(process.pid) for process in processes)
    # It outlives this function, and does no harm if the engine has been replaced meanwhile.
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pids} 2>/dev/null"])


def next_step(run: Laptop) -> None:
    before = run.step()
    run.until(lambda: run.step() > before, f"step after {before}", SECONDS)


if __name__ == "__main__":
    sys.exit(main())
