"""A real model on real tasks: runs of examples/reasoning with several seeds at once, within a time.

    python examples/reasoning/make_model.py
    python benchmarks/reasoning.py countdown calculator [--seeds 3] [--gpus 0,1,2,3] [--each 1]
        [--limit-s 1800] [--steps 100] [--sft-steps 300] [--out DIR] [--set FIELD=VALUE ...]
        [--report]

A case that begins with given answers does so once, cases with the same ones together; each seed
goes on from that model. A seed gives the order of the prompts. Every run has GPUs of its own, or
shares one with `--each` others (give them less memory: --set
rollout.engineArgs.memFractionStatic=0.25); what finds none waits.
Prints a table of each case, means ± standard deviations over seeds, and keeps in --out, for each
run, its metrics, evaluations and summary, for each case a picture, and the last lines of logs of
what failed. A minute before --limit-s runs are stopped as by Ctrl-C; what they have done counts.
--report prints and draws again what is in --out, where it was run without matplotlib, say.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Condition

import torch

from benchmarks.end_to_end import gpus
from benchmarks.processes import sluice_run
from benchmarks.reasoning_table import KEPT, draw, kept, report
from sluice.api import load_job
from sluice.telemetry.report.drawing import png

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/reasoning"
# Seconds before the end in which runs stop and files are kept.
GRACE = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A manifest, that of the given answers that its model reads before, and what is set."""

    manifest: str
    first: str | None = None
    overrides: tuple[str, ...] = ()


CASES = {
    "sums": Case("one-gpu.yaml"),
    "two-gpus": Case("two-gpus.yaml"),
    "two-gpus-async": Case("two-gpus-async.yaml"),
    "four-gpus": Case("four-gpus.yaml"),
    "countdown": Case("countdown.yaml", "sft-countdown.yaml"),
    "countdown-two-gpus": Case("countdown-two-gpus.yaml", "sft-countdown.yaml"),
    "calculator": Case("calculator.yaml", "sft-calculator.yaml"),
    "agent": Case(
        "calculator.yaml",
        "sft-calculator.yaml",
        ("rollout.function=calculator_agent.py:play",),
    ),
}


@dataclass(slots=True)
class Gpus:
    """The GPUs of this machine, each with places for `each` runs."""

    names: Sequence[str]
    runs_per_gpu: int
    taken: dict[str, int] = field(default_factory=dict)
    changed: Condition = field(default_factory=Condition)

    @contextmanager
    def held(self, count: int) -> Iterator[list[str]]:
        """The least used `count` of them; waits until so many have a place."""
        with self.changed:
            self.changed.wait_for(lambda: len(self._free()) >= count)
            chosen = self._free()[:count]
            for name in chosen:
                self.taken[name] = self.taken.get(name, 0) + 1
        try:
            yield chosen
        finally:
            with self.changed:
                for name in chosen:
                    self.taken[name] -= 1
                self.changed.notify_all()

    def _free(self) -> list[str]:
        used = sorted(self.names, key=lambda name: self.taken.get(name, 0))
        return [name for name in used if self.taken.get(name, 0) < self.runs_per_gpu]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gpus", help="default: all of this machine")
    parser.add_argument("--each", type=int, default=1, help="runs that share a GPU")
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--steps", type=int, help="default: the manifest's")
    parser.add_argument(
        "--sft-steps",
        type=int,
        help="default: each manifest's own; many leave rewards little to teach",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/reasoning")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--report", action="store_true", help="run nothing, read --out")
    options = parser.parse_args()
    if not options.report:
        run_all(options, parser)
    for name in options.cases:
        runs = [kept(options.out, name, seed) for seed in range(options.seeds)]
        print(f"\n{report(name, runs)}", flush=True)
        if find_spec("matplotlib"):
            png(partial(draw, runs=runs), options.out / f"{name}.png")


def run_all(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """All cases at once, as far as there are GPUs and time."""
    deadline = time.monotonic() + options.limit_s - GRACE
    names = options.gpus.split(",") if options.gpus else _all_gpus()
    for name in options.cases:
        gpus_needed = gpus(load_job(EXAMPLE / CASES[name].manifest, options.set))
        if gpus_needed > len(names):
            parser.error(f"{name} takes {gpus_needed} GPU(s); this machine has {len(names)}")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as parent, ThreadPoolExecutor() as pool:
        start = partial(
            run_once, places=Gpus(names, options.each), out=options.out, deadline=deadline
        )
        steps = [f"trainer.steps={options.sft_steps}"] if options.sft_steps else []
        read = {
            first: pool.submit(start, EXAMPLE / first, _directory(Path(parent), first), steps)
            for first in dict.fromkeys(CASES[name].first for name in options.cases)
            if first
        }
        run = partial(run_case, options=options, start=start, read=read, parent=Path(parent))
        list(pool.map(run, options.cases))


def _all_gpus() -> list[str]:
    return [str(number) for number in range(torch.cuda.device_count())]


def _directory(parent: Path, first: str) -> Path:
    """Of the run of given answers of this manifest."""
    return parent / Path(first).stem


def run_case(
    name: str,
    *,
    options: argparse.Namespace,
    start: Callable[[Path, Path, list[str]], bool],
    read: Mapping[str, Future[bool]],
    parent: Path,
) -> None:
    """All seeds at once, after the given answers. read: True for those that have come to their end,
    by their manifests.
    """
    case, model = CASES[name], list[str]()
    if case.first:
        if not read[case.first].result():
            return
        model = [f"model.path={_directory(parent, case.first) / 'checkpoints/hf'}"]
    overrides = [*case.overrides, *model, *options.set]
    if options.steps:
        overrides += [f"trainer.steps={options.steps}", f"checkpoint.everySteps={options.steps}"]
    with ThreadPoolExecutor(options.seeds) as pool:
        list(
            pool.map(
                lambda seed: start(
                    EXAMPLE / case.manifest,
                    parent / f"{name}-{seed}",
                    [*overrides, f"data.seed={seed}"],
                ),
                range(options.seeds),
            )
        )


def run_once(
    manifest: Path,
    directory: Path,
    overrides: Sequence[str],
    *,
    places: Gpus,
    out: Path,
    deadline: float,
) -> bool:
    """True where the run came to its end. What it left is kept in `out`."""
    for name in KEPT:
        (out / f"{directory.name}-{name}").unlink(missing_ok=True)  # of an earlier one
    with places.held(gpus(load_job(manifest, [*overrides]))) as chosen:
        began = time.monotonic()
        if deadline - began < GRACE:
            print(f"{directory.name}: no time is left", file=sys.stderr, flush=True)
            return False
        print(f"{directory.name}: on GPUs {','.join(chosen)}", file=sys.stderr, flush=True)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
        code, output = sluice_run(manifest, directory, overrides, deadline - began, visible)
    for name in KEPT:
        if (directory / name).exists():
            shutil.copy(directory / name, out / f"{directory.name}-{name}")
    seconds = time.monotonic() - began
    print(f"{directory.name}: exit code {code}, {seconds:.0f} s", file=sys.stderr, flush=True)
    if code:
        (out / f"{directory.name}.log").write_text(output[-5000:] + ends(directory / "logs"))
    return code == 0


def ends(logs: Path) -> str:
    """The last lines of each log."""
    return "".join(
        f"\n--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        for log in sorted(logs.glob("*"))
        if log.is_file()
    )


if __name__ == "__main__":
    main()
