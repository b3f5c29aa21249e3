"""Asynchronous training beside synchronous, where a few responses are much longer than the others.

    python benchmarks/asynchrony.py examples/reasoning/two-gpus.yaml --steps 60 [--staleness 2]
        [--ways sync in_place retract partial first] [--evaluate 40] [--set FIELD=VALUE ...]
        [--out DIR]
    python benchmarks/asynchrony.py --steps 10             the quickstart, on a CPU

Each way is a `sluice run` of the same job, one after another. *sync*: every sample is of the newest
weights, so each step waits for its longest response. *in_place*, *retract*: asynchronous, so many
steps stale at most, with `weightSync.pauseMode` of that name. *partial*: an update ends what runs,
and it is continued (`rollout.partial`). *first*: updates in place, and a batch takes the groups
that are done first, however old the others become (`rollout.partial` too), where *in_place* and
*retract* wait for a response that would else be older than the staleness allows. Asynchronous ones
correct for samples' age by truncated importance sampling, as AReaL (arXiv:2505.24298, figure 4:
2.77 times a synchronous system) does in its own way. Without a manifest the quickstart's responses
get a long tail: a wait before each, of lognormal length.

*planner* is the gain that `sluice.telemetry.planner` predicts from the synchronous run's device
seconds, before any other way was tried; *tail* the share of the engines' working time with the last
few responses of a batch, of which that prediction takes account.

The step's time is the mean of the steps behind WARM_UP: single steps of an asynchronous run say
little. Speeds count only beside rewards: those of the last quarter of the steps stand in the table.
With `--evaluate` the manifest's evaluations run every so many steps and are kept in --out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.end_to_end import make_data
from benchmarks.processes import sluice_run
from sluice.api import load_job
from sluice.telemetry import run_directory
from sluice.telemetry.planner import Split, work_of
from sluice_cli.exits import Exit

QUICKSTART = Path(__file__).parents[1] / "examples/quickstart"
WARM_UP = 3
AREAL = 2.77
STARTS = ("starting", "restarting")
TAIL = '''"""One response behind a wait whose length has a long tail."""

import asyncio
import random


async def play(episode):
    await asyncio.sleep(min(random.lognormvariate(-1.5, 1.2), 8.0))
    await episode.generate()
'''
CORRECTED = "algorithm.offPolicy={method: tis}"
WAYS: dict[str, tuple[str, ...]] = {
    "sync": ("rollout.mode=sync", "rollout.maxStaleness=0"),
    "in_place": (CORRECTED, "weightSync.pauseMode=in_place"),
    "retract": (CORRECTED, "weightSync.pauseMode=retract"),
    "partial": (CORRECTED, "weightSync.pauseMode=abort", "rollout.partial={enabled: true}"),
    "first": (CORRECTED, "weightSync.pauseMode=in_place", "rollout.partial={enabled: true}"),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """A run, its steps behind WARM_UP. seconds, tokens: of a step. waiting: the trainer's share
    of its time without a batch; idle, tail: the engines' without a request, and with the last few
    of a batch. reward: of the last quarter. states: device seconds by role/state of the whole run.
    """

    seconds: float
    tokens: float
    waiting: float
    idle: float
    reward: float
    lag: float
    tail: float
    states: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifest", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="the longest that a run takes"
    )
    parser.add_argument(
        "--evaluate", type=int, metavar="STEPS", help="between evaluations; default: none"
    )
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--out", type=Path, help="keep metrics.jsonl and summary.json here")
    options = parser.parse_args()
    if options.steps <= WARM_UP + 4:
        parser.error(f"--steps: expected more than {WARM_UP + 4}: the first {WARM_UP} do not count")
    print(
        "| | s a step | of sync | planner | tokens/s | trainer waits | engines idle | tail "
        "| reward | lag |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    first: float | None = None
    said: float | None = None
    with tempfile.TemporaryDirectory() as parent:
        manifest, chosen = job(options.manifest, Path(parent), options.set)
        for way in options.ways:
            figures = run(
                manifest,
                way,
                chosen,
                Path(parent) / way,
                steps=options.steps,
                staleness=options.staleness,
                seconds=options.seconds,
                evaluate=options.evaluate,
                out=options.out,
            )
            first = first or figures.seconds
            print(row(way, figures, first, said), flush=True)
            if way == "sync":
                now = split_of(manifest, chosen)
                said = predicted_gain(figures.states, options.steps, now, options.staleness)
    print(f"\npublished by AReaL for asynchronous over synchronous: {AREAL} times")


def job(manifest: Path | None, parent: Path, chosen: list[str]) -> tuple[Path, list[str]]:
    """The manifest, and what is set in it for all ways."""
    if manifest is not None:
        make_data(manifest, load_job(manifest, chosen))
        return manifest, chosen
    subprocess.run([sys.executable, str(QUICKSTART / "make_data.py"), str(QUICKSTART)], check=True)
    (parent / "tail.py").write_text(TAIL)
    small = [
        "rollout.batchSize=8",
        "rollout.concurrency=64",
        f"rollout.function={parent}/tail.py:play",
    ]
    return QUICKSTART / "job.yaml", [*small, *chosen]


def run(
    manifest: Path,
    way: str,
    chosen: list[str],
    directory: Path,
    *,
    steps: int,
    staleness: int,
    seconds: float,
    evaluate: int | None = None,
    out: Path | None = None,
) -> Figures:
    """Figures of one way's run. Exits with its last lines where it fails.

    evaluate: steps between evaluations; None: without.
    """
    stale = [] if way == "sync" else ["rollout.mode=async", f"rollout.maxStaleness={staleness}"]
    overrides = [
        *chosen,
        *stale,
        *WAYS[way],
        f"trainer.steps={steps}",
        f"checkpoint.everySteps={steps}",
        f"evaluation.everySteps={evaluate}" if evaluate else "evaluation=null",
    ]
    code, output = sluice_run(manifest, directory, overrides, seconds)
    records = list(run_directory.by_step(directory / run_directory.METRICS).values())
    if out:
        out.mkdir(parents=True, exist_ok=True)
        for name in (run_directory.METRICS, run_directory.EVALUATION, run_directory.SUMMARY):
            if (directory / name).exists():
                shutil.copy(directory / name, out / f"{way}-{name}")
    if code not in (0, Exit.STOPPED) or len(records) <= WARM_UP + 4:
        sys.exit(f"{output[-3000:]}\n{way}: {len(records)} steps, exit code {code}")
    return figures_of(records, json.loads((directory / run_directory.SUMMARY).read_text()))


def figures_of(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Figures:
    late = records[WARM_UP:]

    def mean(name: str, averaged: Sequence[Mapping[str, Any]] = late) -> float:
        return fmean(record.get(name, 0.0) for record in averaged)

    seconds = mean("perf/step_time")
    engines = {
        state.removeprefix("rollout/"): spent
        for state, spent in summary["device_seconds"].items()
        if state.startswith("rollout/")
    }
    working = sum(spent for state, spent in engines.items() if state not in STARTS)
    return Figures(
        seconds=seconds,
        tokens=mean("rollout/tokens") / seconds,
        waiting=mean("perf/train_wait_time") / seconds,
        idle=engines.get("idle", 0.0) / working if working else 0.0,
        reward=mean("rollout/raw_reward", records[-max(len(records) // 4, 1) :]),
        lag=mean("rollout/policy_lag"),
        tail=engines.get("tail", 0.0) / working if working else 0.0,
        states=summary["device_seconds"],
    )


def split_of(manifest: Path, chosen: list[str]) -> Split:
    """The job's devices, synchronous. On CPUs a pod counts as one."""
    spec = load_job(manifest, chosen).spec
    unit = max(spec.rollout.gpus_per_replica, 1) * spec.rollout.nodes_per_replica
    trainer = spec.trainer.devices if spec.trainer.gpus_per_node else 1
    return Split((spec.replicas or 1) * unit, trainer)


def predicted_gain(
    states: Mapping[str, float], steps: int, now: Split, staleness: int
) -> float | None:
    """How many times as fast a step is, by the planner, in asynchronous mode with this staleness.

    states: device seconds of the synchronous run. None: they do not say.
    """
    work = work_of(states, steps, now)
    if work is None:
        return None
    return work.seconds(now) / work.seconds(replace(now, staleness=staleness))


def row(way: str, figures: Figures, sync: float, said: float | None) -> str:
    """sync: seconds of its step. said: the gain that the planner predicts."""
    gain = "" if said is None else f"{said:.2f} times"
    return (
        f"| {way} | {figures.seconds:.2f} | {sync / figures.seconds:.2f} times | {gain} "
        f"| {figures.tokens:,.0f} | {figures.waiting:.0%} | {figures.idle:.0%} "
        f"| {figures.tail:.0%} | {figures.reward:.3f} | {figures.lag:.2f} |"
    )


if __name__ == "__main__":
    main()
