"""Times a job's start without `kernelCache`, with an empty claim for it, and with a filled one.

    python benchmarks/kernel_cache.py examples/reasoning/one-gpu.yaml [--rounds 2]
        [--set FIELD=VALUE ...]
    python benchmarks/kernel_cache.py            the quickstart, on a CPU

Each start is a `sluice run` of two steps with a home directory of its own, and places of its own
for what compilers else keep in /tmp, as a new pod has them: without a claim, with an empty one, and
then with the same one again. All seconds are from the start of the command: until the engine is
healthy (of its worker's log, which has whole seconds), and until the end of the first and of the
second step, of which the first compiles what training needs. The lengths of both steps stand beside
that, and what the claim holds afterwards. Each start is told when it is over: on a GPU it takes
minutes.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.asynchrony import QUICKSTART
from benchmarks.end_to_end import make_data
from benchmarks.processes import sluice_run
from sluice.api import load_job
from sluice.runtime import kernel_cache
from sluice.telemetry import run_directory

STEPS = 2
READY = re.compile(r"^(\S+) +info +engine ready")
COLUMNS = (
    "engine ready",
    "first step over",
    "second over",
    "of the first",
    "of the second",
    "files",
    "MiB",
)


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds since the command, seconds of the steps, and what the claim holds."""

    engine: float
    first: float
    second: float
    in_first: float
    in_second: float
    files: float = 0
    mebibytes: float = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifest", type=Path, nargs="?", default=QUICKSTART / "job.yaml")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=400.0, help="the longest that a run takes")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args()
    ways: dict[str, list[Start]] = {"none": [], "empty": [], "filled": []}
    print(f"| claim | {' | '.join(COLUMNS)} |\n{'|---' * (len(COLUMNS) + 1)}|", flush=True)
    with tempfile.TemporaryDirectory() as parent:
        make_data(options.manifest, load_job(options.manifest, options.set))
        for number in range(options.rounds):
            for way, starts in ways.items():
                claim = Path(parent) / f"claim-{number}" if way != "none" else None
                place = Path(parent) / f"{way}-{number}"
                starts.append(run(options.manifest, place, options.set, options.seconds, claim))
                print(_row(way, starts[-1:]), flush=True)
    if options.rounds > 1:
        print("medians", *(_row(way, starts) for way, starts in ways.items()), sep="\n")


def _row(way: str, starts: Sequence[Start]) -> str:
    """Medians, as a row of the table."""
    columns = zip(*map(astuple, starts), strict=True)
    return f"| {way} | {' | '.join(f'{statistics.median(column):.1f}' for column in columns)} |"


def run(
    manifest: Path, place: Path, chosen: Sequence[str], seconds: float, claim: Path | None
) -> Start:
    """A start in a place of its own. Raises SystemExit with the output of a run that fails."""
    home, directory = place / "home", place / "run"
    home.mkdir(parents=True)
    settings = [*chosen, f"trainer.steps={STEPS}"]
    if claim is not None:
        volume = f"{{hostPath: {{path: {claim}, type: DirectoryOrCreate}}}}"
        settings.append(f"kernelCache.volume={volume}")
    variables = kernel_cache.caches(str(home / "kernels"))
    variables |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    began = time.time()
    code, output = sluice_run(manifest, directory, settings, seconds, variables)
    if code:
        raise SystemExit(output[-3000:])
    steps = run_directory.by_step(directory / run_directory.METRICS)
    first, second = steps[1], steps[2]
    ready = min(map(_ready, directory.glob("logs/*.worker.log"))) - began
    files = [path for path in claim.rglob("*") if path.is_file()] if claim is not None else []
    size = sum(path.stat().st_size for path in files) / 2**20
    return Start(
        ready,
        first["time"] - began,
        second["time"] - began,
        first["perf/step_time"],
        second["perf/step_time"],
        len(files),
        size,
    )


def _ready(log: Path) -> float:
    """When the engine was, by its worker's log; seconds since 1970."""
    lines = (READY.match(line) for line in log.read_text().splitlines())
    return next(datetime.fromisoformat(line[1]).timestamp() for line in lines if line)


if __name__ == "__main__":
    main()
