"""The planner's model against runs of several splits, and of a long tail.

    python benchmarks/planner.py [--steps 12] [--engines 1 2]
    python benchmarks/planner.py --tail [MANIFEST] [--steps 12] [--staleness 2] [--set FIELD=VALUE]

Without --tail each row is `sluice run` of examples/quickstart on this machine, with so many engines
that generate (SGLang) and one trainer; a tool that takes a second stands in every response's way,
and a worker keeps few of them open, so that more engines help also where they share the cores. From
the first run's device seconds the planner's model says what a step takes with the other numbers of
engines; beside it is what one took, the median without the first step.

With --tail a job with a few responses much longer than the others runs in synchronous mode, then in
asynchronous mode, which the planner predicts from the first run: by how much it is shorter, so that
the first steps, which are slow, do not count. The job is a manifest's, or the quickstart with the
long tail of benchmarks/asynchrony.py; a step's time is the mean that is taken there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import asynchrony
from benchmarks.processes import sluice_run
from sluice.telemetry import run_directory
from sluice.telemetry.planner import Split, Work, work_of

EXAMPLE = Path(__file__).parents[1] / "examples/quickstart"
FUNCTION = '''"""One response after a tool's second."""

import asyncio


async def play(episode):
    await asyncio.sleep(1.0)
    await episode.generate()
'''


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tail", type=Path, nargs="?", const=None, default=False, metavar="JOB")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--seconds", type=float, default=3600.0, help="the longest of a run")
    options = parser.parse_args()
    if options.tail is False:
        splits(options)
    else:
        tail(options)


def splits(options: argparse.Namespace) -> None:
    """Print a row for each number of engines in each mode."""
    subprocess.run([sys.executable, str(EXAMPLE / "make_data.py"), str(EXAMPLE)], check=True)
    print("| engines | mode | predicted, s a step | measured | apart |")
    print("|---|---|---|---|---|", flush=True)
    for mode in ("sync", "async"):
        work: Work | None = None
        for engines in options.engines:
            split = Split(engines, 1, int(mode == "async"))
            states, measured = run(options.steps, engines, mode)
            earlier = work
            work = work or work_of(states, options.steps, split)
            if work is None:
                sys.exit(f"{engines} engines: no work was counted in {options.steps} steps")
            predicted = work.seconds(split)
            print(
                f"| {engines} | {mode} | {predicted:.2f}{'' if earlier else ' (from this run)'} "
                f"| {measured:.2f} | {predicted / measured - 1:+.0%} |",
                flush=True,
            )


def tail(options: argparse.Namespace) -> None:
    """Print a row for the synchronous run, which shows its tail, and one for what is predicted."""
    if options.steps <= asynchrony.WARM_UP + 1:
        sys.exit(f"--steps: expected more than {asynchrony.WARM_UP + 1}")
    print("| mode | engines in the tail | predicted, s a step | measured | apart |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as parent:
        manifest, chosen = asynchrony.job(options.tail, Path(parent), options.set)

        def measure(way: str) -> asynchrony.Figures:
            return asynchrony.run(
                manifest,
                way,
                chosen,
                Path(parent) / way,
                steps=options.steps,
                staleness=options.staleness,
                seconds=options.seconds,
            )

        sync = measure("sync")
        print(f"| sync | {sync.tail:.0%} | | {sync.seconds:.2f} | |", flush=True)
        now = asynchrony.split_of(manifest, chosen)
        gain = asynchrony.predicted_gain(sync.states, options.steps, now, options.staleness)
        if gain is None:
            sys.exit(f"no work was counted in {options.steps} steps")
        predicted, after = sync.seconds / gain, measure("in_place")
    print(
        f"| async, maxStaleness {options.staleness} | {after.tail:.0%} | {predicted:.2f} "
        f"| {after.seconds:.2f} | {predicted / after.seconds - 1:+.0%} |"
    )


def run(steps: int, engines: int, mode: str) -> tuple[dict[str, float], float]:
    """Device seconds by role/state of a run, and the seconds of its median step."""
    overrides = (
        f"trainer.steps={steps}",
        "evaluation=null",
        f"checkpoint.everySteps={steps}",
        f"rollout.replicas={engines}",
        f"rollout.mode={mode}",
        *(("rollout.maxStaleness=1",) if mode == "async" else ()),
        "rollout.batchSize=8",
        "rollout.samplesPerPrompt=8",
        "rollout.concurrency=16",
    )
    with tempfile.TemporaryDirectory() as parent:
        function = Path(parent) / "slow.py"
        function.write_text(FUNCTION)
        directory = Path(parent) / "run"
        chosen = (*overrides, f"rollout.function={function}:play")
        code, output = sluice_run(EXAMPLE / "job.yaml", directory, chosen, seconds=600)
        if code:
            sys.exit(output[-3000:])
        summary = json.loads((directory / run_directory.SUMMARY).read_text())
        records = list(run_directory.by_step(directory / run_directory.METRICS).values())
    times = [record["perf/step_time"] for record in records[1:]]
    return summary["device_seconds"], statistics.median(times)


if __name__ == "__main__":
    main()
