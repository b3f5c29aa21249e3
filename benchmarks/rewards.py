"""Rewards a second through the judge, beside the bare function called in a loop in one process.

    python benchmarks/rewards.py [--samples 2048] [--processes 2] [--out docs/results/rewards.md]

The judge gets the samples as a rollout worker gives them: one call for each response that is
finished, 256 of them in flight. What it adds is the way to a process with limits and back; with
more than one process it can be faster than the bare loop. `code` has no bare function: its limit is
a bare fork and exec of Python for each program.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.api import Reward
from sluice.rewards import RewardInput
from sluice.rewards.judging.judge import Judge

IN_FLIGHT = 256
WORDS = " so" * 300
USER = "def same(sample):\n    return float(sample.response.strip().endswith(str(sample.label)))\n"
PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"


@dataclass(frozen=True)
class Case:
    name: str
    fields: dict[str, Any]
    sample: Callable[[int], RewardInput]
    # Share of --samples that is judged: less than 1 for slow rewards.
    share: float = 1.0


def sample(response: str, label: Any) -> RewardInput:
    """A response of 400 tokens."""
    return RewardInput("What is it?", response, label, tokens=list(range(450)), response_length=400)


def cases(user: Path) -> Iterator[Case]:
    yield Case("exact_match", {"type": "exact_match"}, lambda i: sample(f"{i}", f"{i}"))
    yield Case("f1", {"type": "f1"}, lambda i: sample(f"{WORDS} {i}", f"so {i}"))
    yield Case("dapo", {"type": "dapo"}, lambda i: sample(f"{WORDS}\nAnswer: {i}", f"{i}"))
    yield Case("function", {"function": f"{user}:same"}, lambda i: sample(f"{WORDS} {i}", f"{i}"))
    yield Case(
        "math, whole numbers", {"type": "math"}, lambda i: sample(rf"{WORDS} \boxed{{{i}}}", f"{i}")
    )
    yield Case(
        "math, fractions",
        {"type": "math"},
        lambda i: sample(rf"{WORDS} \boxed{{\frac{{{2 * i}}}{{14}}}}", f"{i}/7"),
        0.1,
    )
    yield Case(
        "math_prm800k, roots",
        {"type": "math_prm800k"},
        lambda i: sample(rf"\boxed{{\sqrt{{{4 * i}}}}}", rf"2\sqrt{{{i}}}"),
        0.05,
    )
    tests = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "7 8\n"], "outputs": ["3", "7", "11", "15"]}
    yield Case("code, 4 tests", {"type": "code"}, lambda i: sample(PROGRAM, tests), 0.05)


async def judged(case: Case, samples: list[RewardInput], processes: int) -> float:
    """Rewards a second through the judge."""
    judge = Judge(Reward(**case.fields), workers=processes)
    try:
        await asyncio.gather(
            *(judge([s]) for s in samples[: 4 * processes])
        )  # processes are there, modules are loaded
        room = asyncio.Semaphore(IN_FLIGHT)

        async def judge_sample(s: RewardInput) -> Any:
            async with room:
                return await judge([s])

        started = time.perf_counter()
        outcomes = await asyncio.gather(*map(judge_sample, samples))
        elapsed = time.perf_counter() - started
    finally:
        await judge.close()
    assert all(isinstance(outcome[0], tuple) for outcome in outcomes), outcomes[0]
    return len(samples) / elapsed


BARE = """
import sys, time
sys.path.insert(0, {benchmarks!r})
import rewards
from pathlib import Path
from sluice.rewards import registry
from sluice.runtime.user_code import load_reward
case = next(c for c in rewards.cases(Path({user!r})) if c.name == {name!r})
kind = case.fields.get("type")
function = registry.IN_PROCESS.get(kind)
if function is None:
    function = load_reward(case.fields.get("function") or registry.IN_POOL[kind].function)
samples = [case.sample(i) for i in range(1, {count} + 1)]
function(samples[0])
started = time.perf_counter()
for s in samples: function(s)
print({count} / (time.perf_counter() - started))
"""


def bare(case: Case, count: int, user: Path) -> float:
    """Calls a second of the function alone; of `code`: programs a second, each test a Python
    process of its own."""
    if case.fields.get("type") == "code":
        started = time.perf_counter()
        for _ in range(10):
            subprocess.run(
                [sys.executable, "-I", "-c", "print(1)"], check=True, capture_output=True
            )
        return 10 / (time.perf_counter() - started) / 4
    script = BARE.format(
        benchmarks=str(Path(__file__).parent), user=str(user), name=case.name, count=count
    )
    return float(
        subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True
        ).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [
        "| reward | judge, rewards/s | bare function in a loop, /s | ratio |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as directory:
        user = Path(directory) / "user.py"
        user.write_text(USER)
        for case in cases(user):
            count = max(int(arguments.samples * case.share), 32)
            samples = [case.sample(i) for i in range(1, count + 1)]
            ours, limit = (
                asyncio.run(judged(case, samples, arguments.processes)),
                bare(case, count, user),
            )
            rows.append(f"| {case.name} | {ours:,.0f} | {limit:,.0f} | {ours / limit:.2f} |")
            print(rows[-1], flush=True)
    text = (
        f"# Rewards\n\n`python benchmarks/rewards.py`: {IN_FLIGHT} responses in flight, "
        f"{arguments.processes} judging processes, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}. exact_match, f1 and dapo run in the worker itself; the "
        "others in processes with limits. For `code` the bare figure is one Python process for "
        "each test.\n\n"
    )
    text += "\n".join(rows) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
