"""The planner's model against runs of several splits.

    python benchmarks/planner.py [--steps 12] [--engines 1 2]

Each row is `sluice run` of examples/quickstart on this machine, with so many engines that generate
(SGLang) and one trainer; a tool that takes a second stands in every response's way, and a worker
keeps few of them open, so that more engines help also where they share the cores. From the first
run's device seconds the planner's model says what a step takes with the other numbers of engines;
beside it is what one took, the median without the first step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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
    options = parser.parse_args()
    subprocess.run([sys.executable, str(EXAMPLE / "make_data.py"), str(EXAMPLE)], check=True)
    print("| engines | mode | predicted, s a step | measured | apart |")
    print("|---|---|---|---|---|", flush=True)
    for mode in ("sync", "async"):
        work: Work | None = None
        for engines in options.engines:
            split = Split(engines, 1, mode == "async")
            states, measured = run(options.steps, engines, mode)
            known = work
            work = work or work_of(states, options.steps, split)
            if work is None:
                sys.exit(f"{engines} engines: no work was counted in {options.steps} steps")
            predicted = work.seconds(split)
            print(
                f"| {engines} | {mode} | {predicted:.2f}{'' if known else ' (from this run)'} "
                f"| {measured:.2f} | {predicted / measured - 1:+.0%} |",
                flush=True,
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
